"""A limit of memory as a promise, measured from outside; weights that train, chosen by gradient for cost."""

from __future__ import annotations

import json
import sys
import tracemalloc

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad
from onnxgrad import BadInput, subprocesses
from onnxgrad.runtime import Session
from onnxgrad.training import Trainer
from onnxgrad.training.adapters.config import ChosenOutputs
from onnxgrad.training.build.attach import attached
from onnxgrad.training.data.split import split_rows
from onnxgrad.training.graph.exported_constants import sort_out
from onnxgrad.training.loop import peak, sparse_update
from onnxgrad.training.loop.gradients import gradients
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from tests.training.models import blobs, classifier

if sys.platform != "linux":
    pytest.skip("memory is measured on Linux", allow_module_level=True)


def deep(width: int = 64, blocks: int = 6) -> onnx.ModelProto:
    """float32[N, 3, 32, 32] x → blocks of Conv, Relu → mean → Gemm → float32[N, 4] y"""
    nodes = "\n".join(f"c{i} = Conv <pads = [1, 1, 1, 1]> (r{i}, w{i})  r{i + 1} = Relu (c{i})" for i in range(blocks))
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        deep (float[N, 3, 32, 32] r0) => (float[N, 4] y) {{
            {nodes}
            p = GlobalAveragePool (r{blocks})  f = Flatten (p)  y = MatMul (f, head)
        }}""")
    rng = np.random.default_rng(0)
    shapes = {f"w{i}": (width, width if i else 3, 3, 3) for i in range(blocks)} | {"head": (width, 4)}
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


_CODE = """
import ctypes, gc, json, sys
from pathlib import Path
import numpy as np
from onnxgrad.training import Trainer
from onnxgrad.training.build.attach import attached
from onnxgrad.training.graph.exported_constants import sort_out
from onnxgrad.training.loop.peak_probe import resident
settings = json.loads(sys.argv[2])
rng = np.random.default_rng(0)
rows = {"r0": rng.standard_normal((64, 3, 32, 32)).astype(np.float32), "labels": rng.integers(0, 4, 64)}
tiny = {"x": np.ones((8, 6), np.float32), "labels": np.zeros(8, int)}
Trainer(sys.argv[1][:-9] + "tiny.onnx", loss="cross_entropy", optimizer="adam").fit(tiny)  # loads the library
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
trainer = Trainer(sys.argv[1], loss="cross_entropy", optimizer="adam", threads=1, batch_size=32, **settings)
trainer.fit(rows, epochs=2, batch_size=32, validation=rows)
trainer.save(sys.argv[1][:-9] + "out.onnx")
print(json.dumps([trainer.peak, resident("VmHWM") - before, trainer.accumulate]))
"""


@pytest.mark.complete
def test_the_promise_holds_in_another_process(tmp_path):
    path = tmp_path / "deep.onnx"
    onnx.save(deep(), path)
    onnx.save(classifier(), tmp_path / "tiny.onnx")

    def run(**settings):
        done = subprocesses.run([*subprocesses.PYTHON, "-c", _CODE, str(path), json.dumps(settings)], text=True)
        assert done.returncode == 0, done.stderr[-600:]
        return json.loads(done.stdout)

    _, plain, _ = run()
    note, bounded, _ = run(peak="60MB")
    assert bounded < 60e6 < plain
    assert "measured within 60.0 MB" in note


def _plans(*sizes):
    return [{"takes": size} for size in sizes]


#: Plans by the bytes that they take, a limit, what is chosen, and which are measured.
CHOICES = {
    "everything fits": ([_plans(9), _plans(8, 4, 2)], 10, 9, [9]),
    "the first of a group that fits": ([_plans(99), _plans(64, 32, 16, 8, 4), _plans(1)], 20, 16, [99, 1, 4, 16, 32]),
    "a later group": ([_plans(99), _plans(64, 30), _plans(28), _plans(16, 12, 8)], 20, 16, [99, 8, 30, 28, 12, 16]),
    "a plan that is none": ([_plans(99), _plans(8, None)], 20, 8, [99, None, None, 8]),
    "none": ([_plans(99), _plans(64, 32, 30), _plans(28), _plans(16, 8)], 4, 8, [99, 8]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_fastest_plan_that_fits_is_chosen(name):
    groups, most, chosen, expected = CHOICES[name]
    measured = []

    def measure(plan):
        measured.append(plan["takes"])
        if plan["takes"] is None:
            raise BadInput("no plan")
        return plan, plan["takes"]

    assert peak.choose(groups, measure, most)[1] == chosen
    assert measured == expected


def test_without_any_plan_the_reason_is_given():
    def measure(plan):
        raise BadInput("rows are fixed")

    with pytest.raises(BadInput, match="rows are fixed"):
        peak.choose([_plans(1)], measure, 10)


@pytest.mark.parametrize(
    ("target", "tightest", "budget", "taken"),
    [(100, False, None, 80), (60, False, 40, 60), (25, False, None, 80), (15, False, None, 80), (15, True, 10, 30)],
)
def test_results_get_what_the_rest_leaves(target, tightest, budget, taken):
    def measured(settings):  # 20 beside results, which take at least 10 and at most 60
        wanted = settings["memory"]
        return {"least": 10} if wanted < 10 else {"grown": 20 + min(wanted, 60), "plain": 60}

    settings, bytes_taken = peak.fit_memory({"memory": True}, measured, target, tightest)
    assert (settings.get("memory"), bytes_taken) == (budget, taken)


def test_limits_leave_room():
    for taken in (5e5, 2e7, 3e9):
        limit = peak.limit_for(taken)
        assert taken <= limit - peak.headroom(limit) + 1
        assert limit - taken >= 1 << 20


def test_adapters_come_before_fewer_layers():
    recipe, model = Recipe.of("train", {"loss": "mse"}, (*TRAINER, *FIT)), ir.from_proto(classifier())
    groups = peak.plans(recipe, 32, model)
    assert [list(group[-1])[2:] for group in groups[1:]] == [
        [], ["lora", "lora_targets", "trainable"], *[["trainable"]] * 4
    ]  # fmt: skip
    assert [plan.get("accumulate", 1) for plan in groups[2]] == [1, 2, 4, 8, 16, 32]
    assert peak.changed(recipe, groups[2][0]).adapter.build_adapter().rank == 4
    frozen = Recipe.of("train", {"loss": "mse", "trainable": ["head"]}, (*TRAINER, *FIT))
    assert len(peak.plans(frozen, 32, model)) == 2
    adapted = attached(model, **peak.changed(recipe, groups[2][0]).algorithm())
    bound = {b.key for info in adapted.infos for b in info.update_binding}
    assert "w2" in bound
    assert "w1" not in bound


def test_validation_takes_the_rows_that_memory_allows(monkeypatch):
    trainer = Trainer(classifier(), loss="cross_entropy")
    rows = blobs()
    expected = trainer.evaluate(rows)
    trainer.evaluation.most_rows = 5
    sizes = []
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda s, f, *a: (sizes.append(len(next(iter(f.values())))), run(s, f, *a))[1])
    assert trainer.evaluate(rows) == pytest.approx(expected, rel=1e-5)
    assert max(sizes) == 5


def test_choosing_weights_does_not_widen_them():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 900] x) => (float[N, 700] y) { y = MatMul (x, w) }""")
    array = np.random.default_rng(0).standard_normal((900, 700)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    source = ir.from_proto(model)
    attached(model, loss="mse")  # what is computed once
    tracemalloc.start()
    try:
        found = sort_out(dict(source.graph.initializers), list(source.graph))
        assert list(found.weights) == ["w"]
        assert tracemalloc.get_traced_memory()[1] < 2 * array.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.complete  # eight plans, each in a process of its own
def test_a_limit_that_cannot_be_met_names_the_smallest():
    with pytest.raises(BadInput, match=r"cannot be done within 100 KB: the smallest limit that can be met is \d"):
        Trainer(classifier(), loss="cross_entropy", peak="100KB", batch_size=2)


@pytest.mark.complete  # two processes
def test_peak_chooses_what_memory_does():
    trainer = Trainer(classifier(), loss="cross_entropy", peak="1GB", batch_size=8)
    assert "everything kept" in trainer.peak


def test_weights_are_chosen_within_bytes():
    model = deep(width=8)
    rng = np.random.default_rng(0)
    rows = {"r0": rng.standard_normal((64, 3, 32, 32)).astype(np.float32), "labels": rng.integers(0, 4, 64)}
    settings = {"loss": "cross_entropy", "optimizer": "adam", "epochs": 1, "batch_size": 16}
    sizes = []
    for limit in ("1.5MB", "3MB", "20MB"):
        trainer = onnxgrad.train(model, rows, update=f"auto:bytes={limit}", **settings)
        trained = {n for n, t in trainer.step.state.items() if t.kind == "parameter"}
        sizes.append(len(trained))
        unchanged = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name not in trained}
        after = {t.name: onnx.numpy_helper.to_array(t) for t in trainer.inference_model().graph.initializer}
        for name, array in unchanged.items():
            np.testing.assert_array_equal(after[name], array)
    assert sizes == sorted(sizes)
    assert sizes[0] < 7 <= sizes[-1]
    with pytest.raises(BadInput, match="no weight can train within"):
        onnxgrad.train(model, rows, update="auto:bytes=1KB", **settings)


def test_weights_are_chosen_within_milliseconds(monkeypatch):
    costs = {"head": 2.0, "w0": 5.0, "w1": 3.0}
    times = []

    def measured(step, rows, recipe):
        assert (rows, recipe.runtime.threads) == (16, 1)
        times.append(sum(costs[n] for n, t in step.state.items() if t.kind == "parameter"))
        return times[-1]

    monkeypatch.setattr(sparse_update, "_milliseconds", measured)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 6] x) => (float[N, 3] y) {
            a = MatMul (x, w0)  b = Relu (a)  c = MatMul (b, w1)  d = Relu (c)  y = MatMul (d, head) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w0": (6, 8), "w1": (8, 8), "head": (8, 3)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f"), name))
    rows = {"x": rng.standard_normal((64, 6)).astype(np.float32), "labels": rng.integers(0, 3, 64)}
    settings = {"loss": "cross_entropy", "epochs": 1, "batch_size": 16, "threads": 1}
    chosen = []
    for limit in (2, 10):
        trainer = onnxgrad.train(model, rows, update=f"auto:milliseconds={limit}", **settings)
        chosen.append({n for n, t in trainer.step.state.items() if t.kind == "parameter"})
        assert sum(costs[n] for n in chosen[-1]) <= limit
    assert chosen == [{"head"}, set(costs)]
    monkeypatch.undo()
    with pytest.raises(BadInput, match=r"alone takes .* milliseconds"):
        onnxgrad.train(model, rows, update="auto:milliseconds=0.0001", **settings)


@pytest.mark.parametrize("text", ["all", "auto", "auto:bytes=1MB,milliseconds=2", "auto:kb=3"])
def test_bad_spellings_of_updates(text):
    with pytest.raises(BadInput, match=r"update"):
        onnxgrad.train(classifier(), blobs(), loss="cross_entropy", update=text)


def test_peak_excludes_what_it_chooses():
    with pytest.raises(BadInput, match="peak chooses memory and accumulate"):
        Trainer(classifier(), loss="cross_entropy", peak="1GB", memory="1MB")


def test_rows_that_are_held_out_choose_no_weights():
    recipe = Recipe.of("train", {"loss": "cross_entropy", "validation_split": 0.3}, (*TRAINER, *FIT))
    source, data = attached(classifier(), **recipe.algorithm()), blobs()
    _, held = split_rows(Trainer(source.model).data(data), *recipe.held_out)
    expected = list(gradients(source, data, 64, recipe.held_out))
    data["x"][held] = 9
    for found, wanted in zip(gradients(source, data, 64, recipe.held_out), expected, strict=True):
        np.testing.assert_equal(found, wanted)


def test_updates_need_data():
    with pytest.raises(BadInput, match="update needs data"):
        Trainer(classifier(), loss="cross_entropy", update="auto:bytes=1MB")


def test_outputs_of_weights_train_as_in_the_whole_weight():
    model, data = deep(width=8, blocks=2), {}
    rng = np.random.default_rng(0)
    data = {"r0": rng.standard_normal((16, 3, 32, 32)).astype(np.float32), "labels": rng.integers(0, 4, 16)}
    settings = {"loss": "cross_entropy", "optimizer": "sgd", "learning_rate": 0.5, "batch_size": 16, "shuffle": False}
    chosen = {"w0": [6, 1], "head": [0, 3]}
    trained, whole = (
        onnxgrad.train(model, data, adapter=adapter, **settings).inference_model()
        for adapter in (ChosenOutputs(chosen), None)
    )
    assert [n.op_type for n in trained.graph.node] == [n.op_type for n in whole.graph.node]
    before, found, full = (
        {t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in (model, trained, whole)
    )
    for name, axis in (("w0", 0), ("head", 1), ("w1", 0)):
        trains = np.isin(np.arange(before[name].shape[axis]), chosen.get(name, []))
        expected = np.where(trains.reshape([-1 if a == axis else 1 for a in range(before[name].ndim)]),
                            full[name], before[name])  # fmt: skip
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-7)
        assert np.abs(full[name] - before[name]).max() > 1e-5


def test_outputs_are_chosen_where_whole_weights_do_not_fit():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 40] x) => (float[N, 3] y) { a = MatMul (x, w)  b = Relu (a)  y = MatMul (b, head) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w": (40, 200), "head": (200, 3)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f") / 9, name))
    rows = {"x": rng.standard_normal((64, 40)).astype(np.float32), "labels": rng.integers(0, 3, 64)}
    settings = {"loss": "cross_entropy", "optimizer": "adam", "batch_size": 8, "epochs": 1}
    steps = {
        pieces: onnxgrad.train(model, rows, update=f"auto:bytes=90KB,channels={pieces}", **settings).step
        for pieces in (1, 8)
    }
    sizes = {k: sum(t.initial.size for t in s.state.values() if t.kind == "parameter") for k, s in steps.items()}
    assert sizes[1] == 600  # the head
    assert 600 < sizes[8] < 8000
    assert sparse_update.step_bytes(steps[8], 8, None) <= 90e3
    gradients = [n for n in steps[8].model.graph if n.op_type in ("MatMul", "Gemm")]
    assert not any(v.shape is not None and list(v.shape) == [40, 200] for n in gradients for v in n.outputs)
