"""No derivative of any rule's cases, of first or second order, holds what ONNX Runtime computes wrongly."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

import tests.rules
from onnxgrad import Function, jvp, signature, vjp
from onnxgrad.runtime import Options, Session, Slot, StepRunner
from onnxgrad.testing import Case, _array, node_model
from onnxgrad.training import attach, compile_step
from tests.models import assert_no_traps
from tests.runtime.fed import Fed

FAMILIES = sorted(m.name for m in pkgutil.iter_modules(tests.rules.__path__) if m.name.startswith("test_"))


def _cases(family: str) -> list[Case]:
    return list(getattr(importlib.import_module(f"tests.rules.{family}"), "CASES", []))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_traps(family):
    for case in _cases(family):
        rng = np.random.default_rng(0)
        feeds = {f"x{i}": _array(x, rng) for i, x in enumerate(case.inputs) if x is not None}
        primal = node_model(case, feeds)
        floats = [i for i, x in enumerate(case.inputs) if x is not None and feeds[f"x{i}"].dtype.kind == "f"]
        wrt = [f"x{i}" for i in (floats if case.wrt is None else case.wrt)]
        of = None if case.of is None else [f"y{i}" for i in case.of]
        pulled, pushed = vjp(primal, wrt=wrt, of=of), jvp(primal, wrt=wrt, of=of)
        derived = [pulled, pushed]
        if case.order > 1:
            names = signature(pulled)
            through = [*wrt, *names.cotangents.values()]
            gradients = list(names.gradients.values())
            derived += [mode(pulled, wrt=through, of=gradients) for mode in (vjp, jvp)]
        for model in derived:
            assert_no_traps(model, primal)


def test_there_are_cases():
    assert sum(len(_cases(family)) for family in FAMILIES) > 50


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("op_type", ["Gather", "GatherND", "GatherElements"])
def test_sums_over_repeated_indices_are_right_on_several_threads(op_type, threads):
    """Many cotangents go to few rows; a racy sum was wrong in every sixth run of this size."""
    rng = np.random.default_rng(0)
    rows, width, count = 100, 64, 1024
    ids = rng.integers(0, rows, count)
    shape = [rows, width]
    index = {"Gather": ids, "GatherND": ids[:, None], "GatherElements": np.repeat(ids[:, None], width, 1)}[op_type]
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node(op_type, ["x", "i"], ["y"])],
            "repeated",
            [
                helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
                helper.make_tensor_value_info("i", TensorProto.INT64, index.shape),
            ],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [count, width])],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    derived = vjp(model, wrt="x")
    assert_no_traps(derived, model)
    session = Session(derived.SerializeToString(), Options(threads=threads))
    cotangent = rng.integers(-8, 8, (count, width)).astype(np.float32)  # whose sums are exact in any order
    expected = np.zeros(shape, np.float32)
    np.add.at(expected, ids, cotangent)
    feeds = {"x": np.zeros(shape, np.float32), "i": index, signature(derived).cotangents["y"]: cotangent}
    for _ in range(40):
        (found,) = session.run(feeds, list(signature(derived).gradients.values())).values()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_a_training_step_holds_no_traps(optimizer):
    """Convolutions, pooling, a norm with running statistics and an embedding, forward to optimizer."""
    step = compile_step(attach(_everything(), loss="cross_entropy", optimizer=optimizer))
    proto = ir.to_proto(step.model)
    assert_no_traps(proto)
    entering = {v.name for v in proto.graph.input} | {t.name for t in proto.graph.initializer}
    made = {o: n for n in proto.graph.node for o in n.output}
    norms = [n for n in proto.graph.node if n.op_type == "BatchNormalization"]
    assert norms
    for node in norms:
        if any(a.name == "training_mode" and a.i for a in node.attribute):
            statistics = list(node.input[3:5])
            assert not entering & set(statistics), f"{node.name} writes into what enters the graph"
            assert all(made[s].op_type != "Constant" for s in statistics)
            assert len(set(statistics)) == 2
    ends = [(t.input, t.output) for t in step.state.values()]
    assert all(a != b for a, b in ends)
    assert not {o for _, o in ends} & {v.name for v in proto.graph.input}


@pytest.mark.parametrize("threads", [2, 4])
def test_a_training_step_is_the_same_on_several_threads(threads):
    """Twenty steps of everything at once, resident, are those of one thread with everything fed and fetched."""
    step = compile_step(attach(_everything(), loss="cross_entropy", optimizer="momentum", momentum=0.9))
    rng = np.random.default_rng(0)
    (label,) = [n for n in step.batch if n not in ("x", "ids")]
    batches = [
        {
            "x": rng.standard_normal((4, 3, 8, 8)).astype(np.float32),
            "ids": rng.integers(0, 5, (4, 6)),
            label: rng.integers(0, 4, 4),
        }
        for _ in range(20)
    ]
    runner = StepRunner(step, threads=threads)
    slots = {n: Slot(t.input, t.output, t.initial.numpy()) for n, t in step.state.items()}
    plain = Session(step.model, Options(threads=1, layout="plain"))
    rates = {n: t.numpy() for n, t in step.rates.items()}
    fed = Fed(plain, step.model, slots, step.results)
    for batch in batches:
        expected = fed.step(batch | rates)[step.loss]
        np.testing.assert_allclose(runner.step(batch)[step.loss], expected, rtol=2e-4)


def _everything() -> onnx.ModelProto:
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) * 0.3, name)

    channels = 16
    tensors = [weight("w", channels, 3, 3, 3), weight("v", channels, channels, 3, 3), weight("table", 5, channels)]
    tensors += [weight("head", channels, 4)]
    tensors += [onnx.numpy_helper.from_array(np.ones(channels, np.float32), n) for n in ("scale", "variance")]
    tensors += [onnx.numpy_helper.from_array(np.zeros(channels, np.float32), n) for n in ("shift", "mean")]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4),
        helper.make_node("BatchNormalization", ["a", "scale", "shift", "mean", "variance"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MaxPool", ["c"], ["d"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["d", "v"], ["e"], pads=[1] * 4),
        helper.make_node("MaxPool", ["e"], ["f"], kernel_shape=[3, 3], strides=[1, 1]),
        helper.make_node("GlobalAveragePool", ["f"], ["g"]),
        helper.make_node("Flatten", ["g"], ["h"]),
        helper.make_node("Gather", ["table", "ids"], ["i"]),
        helper.make_node("ReduceMean", ["i", "one"], ["j"], keepdims=0),
        helper.make_node("Add", ["h", "j"], ["k"]),
        helper.make_node("MatMul", ["k", "head"], ["y"]),
    ]
    tensors.append(onnx.numpy_helper.from_array(np.array([1], np.int64), "one"))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", 6]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])]
    graph = helper.make_graph(nodes, "everything", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


# --- a transposed matrix and a vector ---------------------------------------------------------------

_W = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
_V = np.float32([1, -2, 3, 4])
_TRANSPOSED = {
    "known": "g (float[4] v, float[4, 4] w, bool c) => (float[4] y) { s = Transpose (w) y = MatMul (s, v) }",
    "open": "g (float[K] v, float[K, M] w, bool c) => (float[M] y) { s = Transpose (w) y = MatMul (s, v) }",
    "behind Identity": """g (float[4] v, float[4, 4] w, bool c) => (float[4] y) {
        s = Transpose (w) t = Identity (s) y = MatMul (t, v) }""",
    "of no known rank": """g (float[4] v, float[4, 4] w, bool c) => (float[4] y) {
        s = Transpose (w) p = Shape (v) u = Reshape (v, p) y = MatMul (s, u) }""",
    "in a branch": """g (float[4] v, float[4, 4] w, bool c) => (float[4] y) {
        y = If (c) <
            then_branch = a () => (float[4] r) { s = Transpose (w) r = MatMul (s, v) },
            else_branch = b () => (float[4] r) { s = Constant <value = float {2.0}> () r = Mul (v, s) }> }""",
    "in a function": """g (float[4] v, float[4, 4] w, bool c) => (float[4] y) { y = f.pull (w, v) }
        <domain: "f", opset_import: ["": 21]> pull (w, v) => (y) { s = Transpose (w) y = MatMul (s, v) }""",
}


def _transposed(kind: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21, "f": 1]> ' + _TRANSPOSED[kind])


@pytest.mark.parametrize("kind", _TRANSPOSED)
@pytest.mark.parametrize("given", ["proto", "ir", "bytes", "path", "Function"])
def test_a_transposed_matrix_times_a_vector(kind, given, tmp_path):
    """ONNX Runtime 1.31 and 1.32, level "extended" and up, forget the transposition."""
    model, feeds = _transposed(kind), {"v": _V, "w": _W, "c": np.array(True)}
    onnx.save(model, tmp_path / "m.onnx")
    if given == "Function":
        found = Function(model)(**feeds)
    else:
        kinds = {"proto": model, "ir": ir.from_proto(model), "bytes": model.SerializeToString()}
        found = Session(kinds.get(given, tmp_path / "m.onnx")).run(feeds)["y"]
    np.testing.assert_allclose(found, _W.T @ _V, rtol=1e-5)


@pytest.mark.parametrize("kind", [k for k in _TRANSPOSED if k != "of no known rank"])
@pytest.mark.parametrize("derive", [vjp, jvp])
def test_derived_models_multiply_no_transposed_matrix_by_a_vector(kind, derive):
    """The stock runtime, with its defaults, computes a derived model right: values and derivatives."""
    derived = derive(_transposed(kind), wrt=["v", "w"])
    names, rng = signature(derived), np.random.default_rng(1)
    feeds = {"v": _V, "w": _W, "c": np.array(True)}
    g, t, dw = (rng.standard_normal(s).astype(np.float32) for s in (4, 4, (4, 4)))
    feeds |= {names.cotangents["y"]: g} if derive is vjp else dict(zip(names.input_tangents.values(), (t, dw)))
    session = onnxruntime.InferenceSession(derived.SerializeToString())
    feeds = {v.name: feeds[v.name] for v in session.get_inputs()}
    found = dict(zip((v.name for v in session.get_outputs()), session.run(None, feeds)))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(found["y"], _W.T @ _V)
    if derive is vjp:
        close(found[names.gradients["v"]], _W @ g)
        close(found[names.gradients["w"]], np.outer(_V, g))
    else:
        close(found[names.output_tangents["y"]], _W.T @ t + dw.T @ _V)


def test_a_trained_model_multiplies_no_transposed_matrix_by_a_vector():
    """The stock runtime, with its defaults, is right about the file that training leaves."""
    text = "g (float[4] v, float[4, 4] m) => (float[4] y) { u = Mul (w, m) s = Transpose (u) y = MatMul (s, v) }"
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> ' + text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(_W, "w"))
    attached = attach(model, loss="mse", optimizer="sgd", learning_rate=0.0)
    (found,) = onnxruntime.InferenceSession(attached.SerializeToString()).run(["y"], {"v": _V, "m": _W})
    np.testing.assert_allclose(found, (_W * _W).T @ _V, rtol=1e-5)


def test_the_gradient_of_a_vector_times_a_transposed_matrix():
    """The cotangent of the vector is itself a transposed matrix times a vector."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[4] v, float[4, 4] w) => (float[4] y) { s = Transpose (w) y = MatMul (v, s) }""")
    derived, g = vjp(model, wrt="v"), np.float32([1, 2, 3, 5])
    session = onnxruntime.InferenceSession(derived.SerializeToString())
    (found,) = session.run(["v_grad"], {"v": _V, "w": _W, "y_cotangent": g})
    np.testing.assert_allclose(found, g @ _W, rtol=1e-5)
