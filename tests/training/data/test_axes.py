"""Inputs without a batch axis are fed whole, to every batch."""

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer
from onnxgrad.training.data import Data, Field
from tests.training.loop.test_trainer import ONE, bits
from tests.training.models import blobs
from tests.training.spec.test_proposal import picture, today

RNG = np.random.default_rng(0)
F32 = np.dtype(np.float32)
Z = RNG.standard_normal((8, 2)).astype(np.float32)


def rows(count):
    draw = np.random.default_rng(1).standard_normal
    return {"X": draw((count, 1, 3, 3)).astype(np.float32), "C": draw((count, 2)).astype(np.float32)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("count", [3, 8, 12, 13])
@pytest.mark.parametrize("model", [today, picture])
def test_the_picture_of_the_proposal(model, count):
    """X and C have batches of three rows, Z has eight rows that are no batch."""
    suffix = "_1" if model is picture else ""
    data = rows(count)
    trainer, by_hand = Trainer(model(), options=ONE), Trainer(model(), options=ONE)
    given = {f"X{suffix}": data["X"], "C": data["C"], f"Z{suffix}": Z}
    history = trainer.fit(given, epochs=2, shuffle=False)
    losses = []
    for _ in range(2):
        for low in range(0, count // 3 * 3, 3):
            batch = {n: a if n[0] == "Z" else a[low : low + 3] for n, a in given.items()}
            losses.append(float(by_hand.machine.step(batch)["O"]))
    assert bits(trainer.state()) == bits(by_hand.state())
    np.testing.assert_allclose([e["loss"] for e in history.epochs], np.reshape(losses, (2, -1)).mean(1))


def test_the_picture_measures(tmp_path):
    np.savez(tmp_path / "d.npz", **rows(12), Z=Z)
    trainer = Trainer(today(), options=ONE)
    history = trainer.fit(tmp_path / "d.npz", validation=tmp_path / "d.npz")
    assert np.isfinite(history.epochs[-1]["validation_loss"])


def mixed(first):
    """float[N, 6] x, float[first, 3] table → float[N, 3]: a whole table beside a batch."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        mixed (float[N, 6] x, float[{first}, 3] table) => (float[N, 3] y) {{
            offset = ReduceSum <keepdims = 0> (table, axis)
            z = MatMul (x, w)
            y = Add (z, offset)
        }}""")
    for name, array in (("w", np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3)), ("axis", np.array([0]))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("first", ["M", 8])
def test_by_names_of_axes(tmp_path, first):
    table = RNG.standard_normal((8, 3)).astype(np.float32)
    trainer = Trainer(mixed(first), loss="cross_entropy", options=ONE)
    trainer.fit(blobs() | {"table": table}, epochs=2, batch_size=20)
    np.save(tmp_path / "x.npy", blobs()["x"])
    np.save(tmp_path / "labels.npy", blobs()["labels"])
    np.save(tmp_path / "table.npy", table)
    again = Trainer(mixed(first), loss="cross_entropy", options=ONE)
    again.fit(tmp_path, epochs=2, batch_size=20)
    assert again.step_count == 10
    assert bits(again.state()) == bits(trainer.state())
    assert again.evaluate(tmp_path) == trainer.evaluate(blobs() | {"table": table})


@pytest.mark.parametrize(
    ("first", "size", "count", "words"),
    [
        (8, 8, 8, "'table' takes 8 rows, and the other arrays .* have 8 as well"),
        (8, 9, 90, "differ in their number of rows: .*'table' has 9"),
        ("N", 8, 90, "differ in their number of rows: .*'table' has 8"),
    ],
)
def test_what_may_be_either_is_refused(first, size, count, words):
    trainer = Trainer(mixed(first), loss="cross_entropy", options=ONE)
    with pytest.raises(BadInput, match=words):
        trainer.fit(blobs(count) | {"table": np.zeros((size, 3), np.float32)})


def test_batches_of_two_sizes_are_refused():
    data = rows(24) | {"Z": np.zeros((24, 2), np.float32)}
    with pytest.raises(BadInput, match="batches of different sizes: 'X' of 3, 'Z' of 8"):
        Trainer(today(), options=ONE).fit(data)


def test_a_whole_input_is_not_cut():
    trainer = Trainer(mixed("M"), loss="cross_entropy", accumulate=2, options=ONE)
    with pytest.raises(BadInput, match="'table' has no batch axis"):
        trainer.fit(blobs() | {"table": np.zeros((8, 3), np.float32)})


def test_nothing_is_whole_where_nothing_says_so():
    fields = [Field("a", F32, ()), Field("b", F32, (), batch=4)]
    with pytest.raises(BadInput, match="differ in their number of rows"):
        Data({"a": np.zeros(10), "b": np.zeros(4)}, fields)
