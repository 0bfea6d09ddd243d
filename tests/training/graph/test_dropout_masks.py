"""Masks of Dropout: as many ones as the ratio says, independent of place and step, the same again after a resume."""

import signal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad.runtime import Options, StepRunner
from onnxgrad.training import Interrupted, Trainer, attach, compile_step
from onnxgrad.training.graph.dropout_masks import COUNT, drop_by_count, first_count
from tests.training.loop.test_callbacks import At, bits
from tests.training.loop.test_trainer import NORMED
from tests.training.models import blobs, classifier

ONE = Options(threads=1)
RATIO = 0.3


def masks(shape, counts, ratio=RATIO, numbers=1):
    """The masks of `numbers` Dropouts in a row, for several counts: [counts, numbers, …shape]."""
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[{",".join("abcd"[: len(shape)])}] x) => ('
    text += ", ".join(f"y{k}" for k in range(numbers)) + ") <float r = {" + f"{ratio}" + "}, bool on = {1}> {"
    text += "".join(f"y{k} = Dropout (x, r, on)" for k in range(numbers)) + "}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert drop_by_count(model.graph) == COUNT
    assert not any(n.op_type == "Dropout" for n in model.graph)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    found = []
    for count in counts:
        *ys, after = session.run(None, {"x": np.ones(shape, np.float32), COUNT: np.array(count, np.int64)})
        assert after == count + 1
        found.append(ys)
    return np.array(found)


def expected_hash(x):
    """lowbias32, in Python's integers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> shift
        x = x * factor % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("count", [0, 5, (7 << 32) + 3, int(first_count(2**31 - 1)) + 2**31 + 12345])
def test_it_is_the_hash_that_the_module_tells(count):
    start = expected_hash((expected_hash((expected_hash(count >> 32) + 1) % 2**32) + count) % 2**32)
    drawn = [expected_hash((i + start) % 2**32) for i in range(4)]
    sixteen = [h & 0xFFFF for h in drawn] + [h >> 16 for h in drawn]
    kept = np.array(sixteen[:7]) >= round(RATIO * 65536)
    np.testing.assert_allclose(masks((7,), [count], numbers=2)[0, 1], kept / (1 - RATIO), rtol=1e-6)


@pytest.mark.parametrize("shape", [(200_000,), (3, 7, 11, 501)])
def test_the_share_is_the_ratio(shape):
    for ratio in (0.1, 0.5, 0.9):
        y = masks(shape, [4], ratio)
        kept = y != 0
        assert kept.mean() == pytest.approx(1 - ratio, abs=5 * np.sqrt(ratio * (1 - ratio) / kept.size) + 1 / 65536)
        np.testing.assert_allclose(y[kept], 1 / (1 - ratio), rtol=1e-6)


def test_masks_are_independent():
    """Correlations between places, steps, nodes and seeds are what chance gives."""
    n = 100_000
    y = masks((n,), [0, 1, 2, 1 << 32, 2 << 32], 0.5, numbers=2).reshape(10, n) - 1
    bound = 5 / np.sqrt(n)
    between = y @ y.T / n
    assert np.abs(between * (1 - np.eye(10))).max() < bound
    for lag in (1, 2, 3, 64, 1000, n // 2):
        assert np.abs((y[:, lag:] * y[:, :-lag]).mean(1)).max() < 1.5 * bound


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0, 3), (1, 1)])
def test_small_and_empty(shape):
    assert masks(shape, [0]).shape == (1, 1, *shape)


def test_the_gradient_goes_through_the_same_mask():
    model = attach(onnx.parser.parse_model(NORMED), optimizer="sgd", learning_rate=1.0, freeze_bn=True, trainable=["w"])
    step = compile_step(model, outputs=["labels"])
    assert step.state[COUNT].kind == "statistic"
    one, two = StepRunner(step, options=ONE), StepRunner(step, options=ONE)
    rows = {n: a[:5] for n, a in blobs().items()}
    for _ in range(3):
        assert one.step(rows)["loss"] == two.step(rows)["loss"]
    assert bits(one.state()) == bits(two.state())
    other = one.state()
    other[COUNT] = first_count(1)
    two.load_state(other)
    assert one.step(rows)["loss"] != two.step(rows)["loss"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("at", [2, 6, 7])
def test_a_run_that_resumes_drops_the_same(tmp_path, at):
    def trainer():
        return Trainer(attach(classifier(), optimizer="adam", dropout={"MatMul": 0.2}), options=ONE)

    options = {"epochs": 2, "batch_size": 16, "seed": 3}
    whole, other = trainer(), trainer()
    whole.fit(blobs(), **options)
    other.fit(blobs(), **(options | {"seed": 4}))
    assert bits(other.state()) != bits(whole.state())
    first = At(at, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted):
        trainer().fit(blobs(), checkpoint=tmp_path, callbacks=[first], **options)
    again = trainer()
    again.fit(blobs(), checkpoint=tmp_path, resume=True, **options)
    assert bits(again.state()) == bits(whole.state())
    assert whole.inference_model() is not None


def test_a_ratio_or_a_mode_that_is_computed_is_left_alone():
    for extra in ("float r", "bool on"):
        held = "bool on = {1}" if extra == "float r" else "float r = {0.1}"
        model = ir.from_proto(
            onnx.parser.parse_model(
                f'<ir_version: 10, opset_import: ["": 21]> g (float[N] x, {extra}) => (float[N] y) <{held}> '
                "{ y = Dropout (x, r, on) }"
            )
        )
        assert drop_by_count(model.graph) == ""
        assert [n.op_type for n in model.graph] == ["Dropout"]
