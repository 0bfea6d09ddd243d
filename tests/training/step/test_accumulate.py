"""A step in two halves: parts of a batch add up to the batch, whatever the mean of the loss is taken over."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.training import Loss, Trainer, attach, compile_step
from onnxgrad.training.graph.mixed_precision import Precision
from onnxgrad.training.step.accumulate import Accumulating, split_step
from tests.training.graph.test_training_mode import norm_net
from tests.training.nets import mlp, model_of


def batches(kind, count=4, rows=12):
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = rng.standard_normal((rows, 4)).astype(np.float32)
        labels = rng.integers(0, 3, rows) if kind == "classes" else rng.standard_normal((rows, 3)).astype(np.float32)
        if kind == "classes":
            labels[: rows // 3] = 1  # so that parts differ in how many labels count
        yield {"x": x, "labels": labels}


CASES = {
    "mse": ("real", {"loss": "mse"}),
    "sum": ("real", {"loss": Loss("mse", reduction="sum"), "learning_rate": 1e-3}),
    "ignored": ("classes", {"loss": "cross_entropy:ignore_index=1"}),
    "weighted": ("classes", {"loss": Loss("cross_entropy", weight=[0.2, 1, 5])}),
    "both": ("classes", {"loss": Loss("nll", weight=[0.2, 1, 5], ignore_index=1)}),
    "focal": ("classes", {"loss": "focal:ignore_index=1"}),
    "smoothed": ("classes", {"loss": "cross_entropy:label_smoothing=0.1,ignore_index=1"}),
    "several": ("real", {"loss": ["mse", "0.3*huber"]}),
    "clipped": ("real", {"loss": "mse", "clip_norm": 0.05, "metrics": ["gradient_norm"], "ema": 0.5}),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("parts", [5])
@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_to_the_batch(case, parts):
    """Same losses, same weights, same state, also where a batch does not divide evenly."""
    kind, options = CASES[case]
    options = {"optimizer": "adam", "learning_rate": 0.05, **options}
    extra = options.get("metrics", [])
    model = attach(mlp(), accumulate=True, **options)
    whole = StepRunner(compile_step(model, outputs=extra), options=Options(threads=1))
    split = split_step(model, outputs=extra)
    for half in (split.gradient, split.update):
        onnx.checker.check_model(ir.to_proto(half.model), full_check=True)
    cut = Accumulating(split, parts, options=Options(threads=2))
    for batch in batches(kind):
        one, other = whole.step(batch), cut.step(batch)
        for name in ("loss", *extra):
            np.testing.assert_allclose(other[name], one[name], rtol=2e-5)
    wanted, found = whole.state(), cut.state()
    assert wanted.keys() == found.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=2e-3, atol=1e-5, err_msg=name)


def test_one_part_is_the_batch():
    model = attach(mlp(), loss="mse", accumulate=True)
    whole, cut = StepRunner(compile_step(model)), Accumulating(split_step(model), 1)
    for batch in batches("real"):
        np.testing.assert_allclose(cut.step(batch)["loss"], whole.step(batch)["loss"], rtol=1e-6)


def test_a_loaded_state_has_no_gradients_of_a_batch_before():
    cut = Accumulating(split_step(attach(mlp(), loss="mse", accumulate=True)), 2)
    before = cut.state()
    (batch,) = batches("real", 1)
    cut.step({**batch, "x": np.full_like(batch["x"], np.inf)})
    cut.load_state(before)
    assert all(np.isfinite(cut.step(batch)["loss"]) for _ in range(2))


def test_the_bucket_is_one_vector():
    """All gradients, flat; the update reads nothing else that depends on a batch."""
    split = split_step(attach(mlp(), loss="mse", accumulate=True))
    assert split.gradient.state["gradient_bucket"].initial.shape == (4 * 8 + 8 + 8 * 3 + 3,)
    assert set(split.gradient.reads) == {"w1", "b1", "w2", "b2"}
    assert set(split.update.reads) == {"gradient_bucket", "gradient_total"}
    assert split.update.batch == []
    assert not {"MatMul", "Tanh"} & {n.op_type for n in split.update.model.graph}
    assert "Sqrt" not in {n.op_type for n in split.gradient.model.graph}


def test_running_statistics_move_with_every_part():
    """Like PyTorch: two parts move them twice."""
    model = attach(norm_net(momentum=0.5), loss="mse", optimizer="sgd", learning_rate=0.0, accumulate=True)
    step = compile_step(model)
    x = np.random.default_rng(2).standard_normal((8, 4)).astype(np.float32)
    batch = {"x": x, "labels": np.zeros((8, 2), np.float32)}
    cut, twice = Accumulating(split_step(model), 2), StepRunner(step)
    cut.step(batch)
    for rows in (slice(4), slice(4, 8)):
        twice.step({n: a[rows] for n, a in batch.items()})
    for name in ("mean", "var"):
        np.testing.assert_allclose(cut.state()[name], twice.state()[name], rtol=1e-5)


def test_half_precision_is_gathered_in_float():
    model = attach(mlp(dtype=np.float16), loss="mse", optimizer="sgd", accumulate=True)
    split = split_step(model)
    assert split.gradient.state["gradient_bucket"].initial.dtype == ir.DataType.FLOAT
    cut = Accumulating(split, 3)
    batch = {n: a.astype(np.float16) for n, a in next(batches("real")).items()}
    first = cut.step(batch)["loss"]
    for _ in range(20):
        last = cut.step(batch)["loss"]
    assert last < first


def test_state_can_be_kept_and_put_back():
    model = attach(norm_net(), loss="mse", accumulate=True)
    cut, other = (Accumulating(split_step(model), 2) for _ in range(2))
    data = [{**b, "labels": b["labels"][:, :2]} for b in batches("real")]
    cut.step(data[0])
    other.load_state(cut.state())
    np.testing.assert_array_equal(cut.step(data[1])["loss"], other.step(data[1])["loss"])
    with pytest.raises(BadInput, match="state 'w1' is missing"):
        other.load_state({n: a for n, a in cut.state().items() if n != "w1"})


def test_a_trainer_accumulates():
    """Fed by the trainer: the same losses as with whole batches; the learning rate follows a schedule in both."""
    data = {"x": np.concatenate([b["x"] for b in batches("real")]),
            "labels": np.concatenate([b["labels"] for b in batches("real")])}  # fmt: skip
    model = attach(mlp(), loss="mse", accumulate=True)
    found = []
    for parts in (1, 4):
        trainer = Trainer(model, accumulate=parts, options=Options(threads=1))
        history = trainer.fit(data, epochs=2, batch_size=16, schedule="cosine")
        found.append([e["loss"] for e in history.epochs])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_a_model_with_a_fixed_batch_takes_several():
    """A batch of 8 rows for a model that takes 4 at a time."""
    node = helper.make_node
    w = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    fixed, free = (
        model_of([node("MatMul", ["x", "w"], ["y"])], {"w": w}, {"x": [n, 4]}, {"y": [n, 3]}) for n in (4, "N")
    )
    data = {"x": np.concatenate([b["x"] for b in batches("real", 2)]),
            "labels": np.concatenate([b["labels"] for b in batches("real", 2)])}  # fmt: skip
    found = []
    for model, parts in ((fixed, 2), (free, 1)):
        trainer = Trainer(attach(model, loss="mse", accumulate=True), accumulate=parts)
        found.append([e["loss"] for e in trainer.fit(data, epochs=2, batch_size=8).epochs])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_the_whole_of_a_cut_step_is_the_step(precision):
    """Its results in the order asked for, and the digest by which checkpoints know it, however a batch is cut."""
    model = attach(mlp(), loss="mse", accumulate=True, metrics=["gradient_norm"])
    narrow = precision and Precision.named(precision, lambda node: True)
    step = compile_step(model, outputs=["gradient_norm", "y"], precision=narrow)
    whole = split_step(model, outputs=["gradient_norm", "y"], precision=narrow).whole
    assert whole.results == step.results
    assert whole.fingerprint == step.fingerprint
    assert [v.name for v in whole.model.graph.outputs] == [v.name for v in step.model.graph.outputs]
    assert precision == "fp16" or len(whole.model.graph) == len(step.model.graph)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "triplet"}, "compares the examples of a batch with each other"),
        ({"loss": ["cross_entropy:ignore_index=0", "0.1*mse:labels=t"]}, "take their means over rows and weights with"),
    ],
)
def test_what_cannot_be_accumulated(options, message):
    with pytest.raises(BadInput, match=message):
        attach(mlp(), accumulate=True, **options)


def test_without_a_weight_it_is_refused():
    with pytest.raises(BadInput, match=r"does not say over how much.*\n.*accumulate=True"):
        split_step(attach(mlp(), loss="mse"))
    with pytest.raises(BadInput, match="at least 1 part, not 0"):
        Accumulating(split_step(attach(mlp(), loss="mse", accumulate=True)), 0)
