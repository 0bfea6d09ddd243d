"""Ranks that share out the state of the optimizer: the weights of replicated training, and what is kept and sent."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxgrad.distributed import blocks
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach
from onnxgrad.training.adapters.config import LoRA
from onnxgrad.training.parallel.machine import DataParallel
from onnxgrad.training.parallel.sharded import Sharded
from onnxgrad.training.parallel.shares import Shares, arrangement
from onnxgrad.training.step.accumulate import split_step
from tests.distributed.simulated import World
from tests.training.models import blobs, classifier

ONE = Options(threads=1, target="portable")


def part_of(batch, rank, size):
    bounds = blocks(len(batch["x"]), size)
    return {name: array[bounds[rank] : bounds[rank + 1]] for name, array in batch.items()}


def batches(count, rows=24):
    data = blobs(count * rows)
    return [{n: a[k * rows : (k + 1) * rows] for n, a in data.items()} for k in range(count)]


def both(model, size, steps=6, parts=1, rows=24, data=None, how=ONE):
    """Of replicated ranks, and of ranks that share it out, by rank: machine, losses, state, and bytes that all sent."""
    plain, arranged = split_step(model), split_step(model, arrange=partial(arrangement, size))
    data, shares = data or batches(steps, rows), Shares(arranged, size)

    def run(make):
        def work(collective):
            machine = make(collective)
            losses = [float(machine.step(part_of(b, collective.rank, size))["loss"]) for b in data]
            sent = world.sent.copy()
            return machine, losses, machine.gather() if isinstance(machine, Sharded) else machine.state(), sent

        return (world := World(size)).run(work)

    first = run(lambda c: DataParallel(plain, parts, c, options=how))
    return first, run(lambda c: Sharded(arranged, parts, c, shares, options=how)), shares


def check_alike(first, second, atol=0.0):
    """All ranks hold the same bits; they are those of replicated ranks, or as close as that."""
    for _, losses, state, _ in second:
        assert losses == second[0][1]
        for name, array in state.items():
            np.testing.assert_array_equal(array, second[0][2][name], err_msg=name)
    np.testing.assert_allclose(second[0][1], first[0][1], rtol=atol)
    assert second[0][2].keys() == first[0][2].keys()
    for name, array in first[0][2].items():
        found = second[0][2][name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(found.astype(float), array.astype(float), rtol=0, atol=atol, err_msg=name)


def of(dtype):
    """The classifier with weights of this type."""
    model = classifier()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    kind = model.graph.initializer[0].data_type
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.elem_type = kind
    return model


#: By name: the options of `attach`, ranks, and by how much numbers may differ, where sums are rounded otherwise.
CASES = {
    "adam cuts tensors": ({"optimizer": "adam"}, 3, 0),
    "sgd has no state, and ranks without a weight": ({"optimizer": "sgd"}, 9, 0),
    "groups": ({"optimizer": "adamw", "groups": ["b1:decay=0,rate=0.5", "w2:decay=0.3"]}, 2, 0),
    "schedule": ({"optimizer": "lion", "schedule": "cosine:total=8,warmup=2"}, 2, 0),
    "state that all share": ({"optimizer": "nadam", "freeze": ["b1"]}, 3, 0),
    "norm, of tensors that are cut": ({"optimizer": "adam", "clip_norm": 0.05, "ema": 0.9}, 3, 1e-6),
    "elements and norm": ({"optimizer": "momentum", "clip_value": 0.01, "clip_norm": 0.02}, 2, 1e-6),
    "whole tensors": ({"optimizer": "lamb", "clip_norm": 0.05, "ema": 0.9}, 2, 0),
    "fewer tensors than ranks": ({"optimizer": "muon"}, 5, 0),
    "factors": ({"optimizer": "adafactor"}, 2, 0),
    "adapters": ({"optimizer": "adam", "adapter": LoRA(2, targets=["w*"])}, 3, 0),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_replicated_training(case):
    options, size, atol = CASES[case]
    options = {"learning_rate": 0.05, "loss": "cross_entropy", **options}
    first, second, shares = both(attach(classifier(), accumulate=True, **options), size)
    check_alike(first, second, atol)
    if "whole" not in case and options["optimizer"] in ("adam", "sgd"):
        assert any(0 < low < ends[-1] for ends in shares.ends.values() for low in ends), "no tensor was cut"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda d: np.dtype(d).name)
def test_weights_of_other_types(dtype):
    """Weights of 16 bits are updated in float32, of which ranks have parts; they exchange 16 bits."""
    clip = 0.5 if dtype == np.float64 else None  # a factor of 16 bits would show how the norm was rounded
    model = attach(of(dtype), loss="mse", optimizer="adam", learning_rate=0.05, accumulate=True, clip_norm=clip)
    rng = np.random.default_rng(0)
    data = [{n: rng.standard_normal((6, k)).astype(dtype) for n, k in (("x", 6), ("labels", 3))} for _ in range(4)]
    first, second, shares = both(model, 3, data=data)
    check_alike(first, second, 0 if clip is None else 1e-6)
    item = np.dtype(dtype).itemsize
    assert shares.places[1][-1] == pytest.approx(80 * item, abs=3 * 64)
    assert sum(m.optimizer_bytes for m, *_ in second) == 80 * (2 * item if item == 8 else 3 * 4)


def test_kernels_update_parts_as_they_update_all():
    """With kernels, if available; a part of a tensor is a vector, which has a named update as well."""
    model = attach(classifier(), loss="cross_entropy", optimizer="adamw", clip_value=0.1, ema=0.9, accumulate=True)
    first, second, _ = both(model, 3, how=Options(threads=1))
    check_alike(first, second)


def test_parts_of_a_batch_and_ranks_without_rows():
    model = attach(classifier(), loss="cross_entropy", optimizer="adam", learning_rate=0.05, accumulate=True)
    first, second, _ = both(model, 4, parts=2, rows=3)
    check_alike(first, second)


def test_memory_and_bytes_on_the_wire():
    """Adam's two moments are divided by the ranks, and what they send is what an all-reduce sends."""
    size, model = 4, classifier(hidden=1500)
    model = attach(model, loss="cross_entropy", optimizer="adam", learning_rate=0.01, accumulate=True)
    first, second, shares = both(model, size, steps=2)
    weights = sum(a.nbytes for n, a in first[0][2].items() if n in ("w1", "b1", "w2"))
    for rank, (machine, *_) in enumerate(second):
        kept = [n for n in machine.update.now if n.endswith(("_mean", "_square"))]
        held = sum(machine.update.now[n].nbytes for n in kept)
        assert held == machine.optimizer_bytes == shares.bytes(rank)
        assert held == pytest.approx(2 * weights / size, abs=8)
        assert sum(a.nbytes for a in machine.update.now.values()) == pytest.approx(3 * weights / size, abs=24)
    for *_, sent in (first[0], second[0]):
        np.testing.assert_allclose(sent, 2 * 2 * (size - 1) / size * weights, rtol=0.01)


@pytest.mark.complete
def test_a_hundred_ranks():
    model = attach(classifier(), loss="cross_entropy", optimizer="adam", clip_norm=0.1, accumulate=True)
    first, second, _ = both(model, 100, steps=2, rows=60)
    check_alike(first, second, 1e-6)


def test_what_cannot_be_shared_out_is_refused():
    """An update that takes the gradients of two weights together, in another way than by a norm."""
    model = attach(classifier(), loss="cross_entropy", optimizer="sgd", trainable=["b1", "w2"], accumulate=True)
    info = model.training_info[0]
    (gradient,) = [n for n in info.algorithm.node if n.op_type == "Gradient"]
    _, other = gradient.output[:2]
    info.algorithm.node.add(op_type="ReduceMax", input=[other], output=["most"], attribute=[
        onnx.helper.make_attribute("keepdims", 0)])  # fmt: skip
    binding = next(b for b in info.update_binding if b.key == "b1")
    info.algorithm.node.add(op_type="Add", input=[binding.value, "most"], output=["moved"])
    info.algorithm.output.add(name="moved")
    binding.value = "moved"
    split = split_step(model)
    with pytest.raises(BadInput, match="cannot be shared out: 'b1' is computed from several"):
        Shares(split, 2)
    for options, said in (({"sync_every": 2}, "sync_every"), ({"compress": "fp16"}, "compress")):
        with pytest.raises(BadInput, match=f"shard_optimizer does not go with {said}"):
            Trainer(classifier(), loss="cross_entropy", shard_optimizer=True, **options)
