"""Products in 16 bits of batches in parts and on ranks, and by the command: run on the CPU, which casts float16."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach
from onnxgrad.training.graph.mixed_precision import Precision
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.parallel.local_steps import LocalSteps
from onnxgrad.training.parallel.ranks import Ranks
from onnxgrad.training.parallel.strategy import choose_strategy
from onnxgrad.training.step import precision as of_step
from onnxgrad.training.step.accumulate import Accumulating, split_step
from tests.cli.said import said
from tests.distributed.simulated import World
from tests.training.graph.test_training_mode import norm_net
from tests.training.models import blobs, classifier
from tests.training.nets import mlp

ONE = Options(threads=1, target="portable")
HALF = Precision(ir.DataType.FLOAT16, lambda node: True, 2.0**12, 3)
OWN = {"loss_scale", "good_steps"}


def split(precision=HALF, net=mlp, loss="mse", **options):
    training = attach(net(), loss=loss, optimizer="adam", learning_rate=0.05, accumulate=True, **options)
    return split_step(training, precision=precision)


def batch(rows=12, bad=None, columns=3):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 4)).astype(np.float32)
    if bad is not None:
        x[bad, 2] = np.inf
    return {"x": x, "labels": rng.standard_normal((rows, columns)).astype(np.float32)}


def same(one, other, besides=()):
    return all(array.tobytes() == other[name].tobytes() for name, array in one.items() if name not in besides)


@pytest.mark.parametrize("loss", ["mse", "mse:reduction=sum"])
def test_parts_add_up_as_in_float32(loss):
    curves = []
    for precision in (None, HALF):
        machine = Accumulating(split(precision, loss=loss), 3, options=ONE)
        curves.append([float(machine.step(batch())["loss"]) for _ in range(8)])
    assert curves[1][-1] < 0.9 * curves[1][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.02)
    gradient = split().gradient.model.graph
    assert any(n.op_type == "MatMul" and n.inputs[0].dtype == ir.DataType.FLOAT16 for n in gradient)


@pytest.mark.parametrize("bad", [0, 5, 11])
def test_one_part_that_is_not_finite_skips_the_whole_batch_and_no_other(bad):
    halves = split(ema=0.9)
    machine, twin = (Accumulating(halves, 3, options=ONE) for _ in range(2))
    for _ in range(2):
        machine.step(batch())
        twin.step(batch())
    before = machine.state()
    machine.step(batch(bad=bad))
    after = machine.state()
    assert same(before, after, OWN)
    assert after["loss_scale"] == before["loss_scale"] / 2
    machine.load_state(after | {n: before[n] for n in OWN})
    machine.step(batch())
    twin.step(batch())
    assert same(twin.state(), machine.state())


def test_running_statistics_move_with_parts_that_are_finite():
    machine = Accumulating(split(net=norm_net), 3, options=ONE)
    machine.step(batch(columns=2))
    before = machine.state()
    machine.step(batch(bad=5, columns=2))  # in the second of three parts
    after = machine.state()
    assert not same(before, after, {*OWN, "w1"})
    for name in before.keys() - OWN:
        assert np.isfinite(after[name]).all(), name
        assert (after[name].tobytes() == before[name].tobytes()) == (name not in ("mean", "var")), name


@pytest.mark.parametrize(
    "exchange", [Exchanges(), Exchanges(compress="fp16"), Exchanges(shard_optimizer=True)], ids=str
)
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(exchange):
    halves = split()

    def work(collective):
        strategy = choose_strategy(Ranks(collective), exchange)
        strategy.use(machine := strategy.machine_of(halves, 1, ONE))
        found = []
        for bad in (None, 5, None):  # row 5 is the second rank's
            rows = slice(4 * collective.rank, 4 * collective.rank + 4)
            machine.step({name: array[rows] for name, array in batch(bad=bad).items()})
            found.append(strategy.whole_state())
        return found

    found = World(3).run(work)
    for ranks in zip(*found):
        assert all(same(ranks[0], other) for other in ranks[1:])
    first, skipped, last = found[0]
    assert same(first, skipped, OWN)
    assert skipped["loss_scale"] == first["loss_scale"] / 2
    assert all(np.isfinite(array).all() for array in last.values())
    assert not same(skipped, last, OWN)


def test_ranks_with_parts_of_the_state_skip_the_same_step(monkeypatch):
    """Only the part of one rank has a gradient that is not finite."""
    monkeypatch.setattr(of_step, "has_kernel", lambda *asked: True)
    options = Options(threads=1, target="portable", providers=("AzureExecutionProvider", "CPUExecutionProvider"))
    how = {"loss": "mse", "optimizer": "adam", "learning_rate": 0.05, "precision": "fp16", "options": options}

    def work(collective):
        trainer = Trainer(mlp(), distributed=collective, shard_optimizer=True, **how)
        found = []
        for bad in (None, 5, None):
            rows = slice(4 * collective.rank, 4 * collective.rank + 4)
            trainer.machine.step({name: array[rows] for name, array in batch(bad=bad).items()})
            found.append({n: trainer.machine.state()[n] for n in ("w1", "b1", "w2", "b2", *OWN)})
        return found

    found = World(3).run(work)
    for ranks in zip(*found):
        assert all(same(ranks[0], other) for other in ranks[1:])
    first, skipped, last = found[0]
    assert same(first, skipped, OWN)
    assert skipped["loss_scale"] == first["loss_scale"] / 2
    assert not same(skipped, last, OWN)


def test_ranks_that_exchange_seldom_skip_on_their_own():
    halves = split(Precision(ir.DataType.FLOAT16, lambda node: True, 2.0**125, 3))  # too large for a start

    def work(collective):
        machine = LocalSteps(halves, 1, collective, Exchanges(sync_every=2), options=ONE)
        for _ in range(8):
            rows = slice(6 * collective.rank, 6 * collective.rank + 6)
            machine.step({name: 1000 * array[rows] for name, array in batch().items()})
        machine.settle()
        return machine.state()

    one, other = World(2).run(work)
    assert same(one, other)
    assert one["loss_scale"] < 2.0**125
    assert all(np.isfinite(array).all() for array in one.values())


@pytest.fixture
def place(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs())
    return tmp_path


TRAIN = "train PLACE/m.onnx --data PLACE/d.npz --loss cross_entropy --optimizer adam --epochs 2 -o PLACE/out.onnx"


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_command_refuses_what_the_cpu_does_not_have(place, name):
    output = said(place, f"{TRAIN} --precision {name}", code=2)
    assert f"precision {name!r} is not for the CPU provider of ONNX Runtime, which has no products in 16 bits" in output
    assert "Traceback" not in output
    assert sorted(p.name for p in place.iterdir()) == ["d.npz", "m.onnx"]


def test_the_command_refuses_a_precision_that_there_is_not(place):
    assert "precision is fp32, fp16 or bf16, not 'fp8'" in said(place, f"{TRAIN} --precision fp8", code=2)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("more", ["", " --accumulate 2"])
def test_the_command_trains_in_16_bits_where_a_provider_has_them(place, monkeypatch, more):
    """A provider that is in every ONNX Runtime, and leaves all nodes to the CPU, is declared to have them."""
    monkeypatch.setattr(of_step, "has_kernel", lambda *asked: True)
    losses = []
    for precision in ("fp32", "fp16"):
        line = f"{TRAIN} --provider azure --precision {precision} --history PLACE/h.json{more}"
        said(place, line.replace("out.onnx", f"{precision}.onnx"))
        losses.append([epoch["loss"] for epoch in json.loads((place / "h.json").read_text())["epochs"]])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.01)
    assert Checkpoint.load(place / "fp16.checkpoint" / FILE).state["loss_scale"] == 2.0**16
    made = onnx.load(place / "fp16.onnx")
    assert {t.data_type for t in made.graph.initializer} == {onnx.TensorProto.FLOAT}
