"""Scores of tokens [N, T, V] and of pixels [N, C, H, W] meet their labels without being told which axis is which."""

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach, evaluate

ONE = Options(threads=1)


def model(text, **weights):
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    for name, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, np.float32), name))
    return proto


def tokens(vocabulary=7, length="T"):
    rng = np.random.default_rng(0)
    return model(
        f"""(int64[N, {length}] ids) => (float[N, {length}, {vocabulary}] y) {{
            e = Gather (table, ids)  h = Tanh (e)  z = MatMul (h, w)  y = Add (z, b) }}""",
        table=rng.standard_normal((vocabulary, 5)), w=rng.standard_normal((5, vocabulary)), b=np.zeros(vocabulary),
    )  # fmt: skip


def scaled(shape, tail="y = Mul (x, w)"):
    dims = ", ".join(map(str, shape))
    return model(f"(float[{dims}] x) => (float[{dims}] y) {{ {tail} }}", w=[1.0])


def labels(proto, loss="cross_entropy"):
    (value,) = attach(proto, loss=loss, trainable=["w"]).training_info[0].algorithm.input
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", "focal", "cross_entropy:label_smoothing=0.1"])
def test_a_matrix_product_gives_classes_last(loss):
    assert labels(tokens(), loss) == ["N", "T"]
    assert labels(tokens(length=4), loss) == ["N", 4]


@pytest.mark.parametrize(
    ("shape", "tail", "expected"),
    [
        (("N", "T", 9), "y = Mul (x, w)", ["N", "T"]),
        (("N", 9, "T"), "y = Mul (x, w)", ["N", "T"]),
        (("N", 9, "H", "W"), "y = Mul (x, w)", ["N", "H", "W"]),
        (("N", 3, 8, 8), "y = Mul (x, w)", ["N", 8, 8]),
        (("N", 5, 9), "z = Mul (x, w)  y = Softmax (z)", ["N", 5]),
        (("N", 5, 9), "z = Mul (x, w)  y = Softmax <axis = 1> (z)", ["N", 9]),
        (("N", 5, 9), "z = Mul (x, w)  s = Softmax (z)  y = Log (s)", ["N", 5]),
    ],
)
def test_the_activation_and_sizes_tell(shape, tail, expected):
    assert labels(scaled(shape, tail)) == expected
    assert labels(scaled(shape, tail), "cross_entropy:axis=1" if expected[1] != shape[1] else "cross_entropy:axis=-1")


def test_what_cannot_be_told_is_asked_for():
    with pytest.raises(BadInput, match=r"'y' is \[N, 4, 4\]: along which axis"):
        labels(scaled(("N", 4, 4)))
    assert labels(scaled(("N", 4, 4)), "cross_entropy:axis=-1") == ["N", 4]
    with pytest.raises(BadInput, match="axis of the classes is a number, not 'last'"):
        labels(scaled(("N", 4, 5)), "cross_entropy:axis=last")
    wrong = {"x": np.zeros((6, 4, 5), np.float32), "labels": np.zeros((6, 4), int)}
    with pytest.raises(BadInput, match="along another axis, say so: cross_entropy:axis=-1"):
        Trainer(scaled(("N", 4, 5)), loss="cross_entropy", trainable=["w"]).fit(wrong)


def test_tokens_are_trained_measured_and_ignored(tmp_path):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 7, (60, 6))
    wanted = np.where(rng.random((60, 6)) < 0.3, -100, (ids + 1) % 7)
    wanted[40:44] = -100  # of some batches, nothing counts
    wanted[44:] = np.where(np.arange(6) < 1, wanted[44:], -100)
    data, held = {"ids": ids[:40], "labels": wanted[:40]}, {"ids": ids[40:], "labels": wanted[40:]}
    trainer = Trainer(tokens(), loss="cross_entropy:ignore_index=-100", learning_rate=0.05, options=ONE)
    trainer.fit(data, epochs=25, validation=held, batch_size=20)
    last = trainer.history.epochs[-1]
    assert last["validation_accuracy"] > 0.9
    assert last["validation_perplexity"] == pytest.approx(np.exp(last["validation_loss"]), rel=1e-5)
    trainer.save(tmp_path / "m.onnx")
    found = evaluate(tmp_path / "m.onnx", held, ignore_index=-100)
    assert found.rows == (held["labels"] >= 0).sum()
    assert found.metrics["perplexity"] == pytest.approx(last["validation_perplexity"], rel=1e-5)
    assert found.metrics["accuracy"] == last["validation_accuracy"]
    for size in (4, 7):
        assert trainer.evaluate(held, batch_size=size)["loss"] == pytest.approx(last["validation_loss"], rel=1e-5)


def test_classes_of_tokens_are_balanced():
    import onnxgrad

    ids = np.random.default_rng(0).integers(0, 7, (20, 6))
    found = onnxgrad.train(tokens(), {"ids": ids, "labels": ids}, loss="cross_entropy:weight=balanced", epochs=1)
    assert np.isfinite(found.history.epochs[-1]["loss"])
