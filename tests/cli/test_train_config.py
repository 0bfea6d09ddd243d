"""A run that is written down and repeated; what the command says of a run."""

import numpy as np
import onnx
import pytest

from tests.cli.said import ran

X = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)


@pytest.fixture
def place(tmp_path):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N, 3] x) => (float[N, 3] y) { y = MatMul(x, w) }'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32) / 9, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X, kinds=X.argmax(1))
    return tmp_path


TRAIN = "train PLACE/m.onnx --data PLACE/d.npz --labels kinds --loss cross_entropy --optimizer sgd --lr 0.5 --seed 4"


def test_a_run_is_repeated_from_its_file(place):
    ran(place, f"{TRAIN} --epochs 3 --validation-split 0.25 --keep-best -o PLACE/a.onnx")
    text = (place / "a.checkpoint" / "run.toml").read_text()
    assert 'loss = ["cross_entropy"]' in text
    assert "validation-split = 0.25" in text
    ran(place, "train PLACE/m.onnx --config PLACE/a.checkpoint/run.toml -o PLACE/b.onnx")
    assert (place / "a.onnx").read_bytes() == (place / "b.onnx").read_bytes()
    ran(place, "train PLACE/m.onnx --config PLACE/a.checkpoint/run.toml -o PLACE/c.onnx --lr 0.1")
    assert (place / "a.onnx").read_bytes() != (place / "c.onnx").read_bytes()


def test_a_run_says_what_it_does_and_why_it_ended(place):
    found = ran(place, f"{TRAIN} --lr 0 --epochs 9 --validation-split 0.25 --keep-best --patience 2 -o PLACE/a.onnx")
    assert "data    45 rows, 15 held out; x → x, kinds → kinds" in found.stderr
    assert "rates   learning_rate 0, schedule constant" in found.stderr
    assert "run     9 epochs of 2 steps, 32 rows each" in found.stderr
    assert "stopped        validation_loss has not become better for 2 epochs" in found.stdout
    assert "kept           epoch 1, validation_loss" in found.stdout


def test_quiet(place):
    assert not ran(place, f"{TRAIN} --epochs 1 -q -o PLACE/a.onnx").stderr


def test_a_rate_is_looked_for_and_nothing_is_written(place):
    assert "learning rate" in ran(place, f"{TRAIN} --find-lr -o PLACE/a.onnx").stdout
    assert sorted(p.name for p in place.iterdir()) == ["d.npz", "m.onnx"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epocs = 3", "no flag named 'epocs'; did you mean 'epochs'"),
        ("epochs = ", "as TOML"),
        ("[run]\nepochs = 3", "no flag named 'run'"),
        ("[epochs]\na = 3", "has a table 'epochs'"),
        ('config = "x"', "no flag named 'config'"),
        ("loss = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        (".".join("a" * 5000) + " = 1", "no flag named 'a'"),
        ("a" * 100_000 + " = 1", "…'; "),
        ("epochs = " + "9" * 5000, "as TOML"),
        ("#" * (1 << 20) + "\nepochs = 3", "more than 1,048,576 bytes"),
        ("epochs = 2024-01-01", "rror"),
        ("momentum = [1, 2]", "rror"),
    ],
    ids=lambda text: text[:12],
)
def test_a_file_that_is_wrong_is_refused(place, content, words):
    (place / "c.toml").write_text(content)
    found = ran(place, f"{TRAIN} -o PLACE/a.onnx --config PLACE/c.toml", code=2).stderr
    assert words in found
    assert len(found) < 2000
    assert not (place / "a.onnx").exists()


def test_a_provider_that_is_not_there_is_refused(place):
    assert "this onnxruntime has" in ran(place, f"{TRAIN} -o PLACE/a.onnx --provider abacus", code=2).stderr
