"""Models of an encoder and a decoder: one file trains, and two files run."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad
from onnxgrad.errors import BadInput
from tests.commands import command
from tests.training.language.test_generate_encoder import SOURCES, encoder, merged, plain, whole


def trained():
    """The model of one file with other weights."""
    proto, random = whole(), np.random.default_rng(7)
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            moved = array + 0.3 * random.standard_normal(array.shape).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))
    return proto


@pytest.fixture
def place(tmp_path):
    files = {"base": whole(), "trained": trained(), "encoder": encoder(), "merged": merged(), "plain": plain()}
    for name, proto in files.items():
        onnx.save(proto, tmp_path / f"{name}.onnx")
    (tmp_path / "out").mkdir()
    return tmp_path


@pytest.mark.parametrize("decoder", ["merged", "plain"])
def test_both_files_get_their_weights(place, decoder):
    done = onnxgrad.transplant(
        place / "trained.onnx", place / f"{decoder}.onnx", encoder=place / "encoder.onnx", base=place / "base.onnx",
        output=place / "out",
    )  # fmt: skip
    assert [p.name for p in done.files] == [f"{decoder}.onnx", "encoder.onnx"]
    assert sorted(p.name for p in (place / "out").iterdir()) == sorted(p.name for p in done.files)
    assert done.difference < 1e-5 < 0.1 < done.before
    settings = {"decoder_start": [0], "max_new_tokens": 5}
    wanted = onnxgrad.generate(place / "trained.onnx", SOURCES, **settings)
    found = onnxgrad.generate(done.files[0], SOURCES, encoder=done.files[1], **settings)
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    assert wanted != onnxgrad.generate(place / "base.onnx", SOURCES, **settings)


def test_the_command(place):
    line = ["transplant", "trained.onnx", "--base", "base.onnx", "--into", "merged.onnx", "--encoder", "encoder.onnx"]
    found = command(*line, "-o", "out", cwd=place)
    assert found.returncode == 0, found.stderr
    assert sorted(p.name for p in (place / "out").iterdir()) == ["encoder.onnx", "merged.onnx"]
    into_itself = command(*line, "-o", ".", cwd=place)
    assert into_itself.returncode == 2
    assert "would write over" in into_itself.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "encoder.onnx", "output": "none"}, "there is no folder"),
        ({"encoder": "merged.onnx", "output": "out"}, "have one name"),
        ({"encoder": "plain.onnx", "output": "out"}, "cannot be compared"),
        ({"output": "out.onnx"}, "does not compute what the base computes"),
    ],
)
def test_what_does_not_fit_is_refused(place, settings, message):
    settings = {name: place / value for name, value in settings.items()}
    with pytest.raises(BadInput, match=message):
        onnxgrad.transplant(place / "trained.onnx", place / "merged.onnx", base=place / "base.onnx", **settings)
    assert not list((place / "out").iterdir())
    assert not (place / "out.onnx").exists()
