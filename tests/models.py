"""Small models, and what every derived model must fulfil."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxgrad.runtime.wrong_fusions import wrong_fusions

onnxruntime.set_default_logger_severity(4)


_rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    """Random float32 numbers; others at every call."""
    return _rng.standard_normal(shape).astype(np.float32)


def value(name: str, shape: Any, dtype: int = onnx.TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(nodes, inputs, outputs, weights=None, *, opset: int = 21, ir_version: int = 10, functions=(), **more):
    """A model; `weights` is a dict of arrays."""
    held = [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, held)
    imports = [
        helper.make_opsetid("", opset),
        *(helper.make_opsetid(d, 1) for d in {f.domain for f in functions}),
    ]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=functions, **more)


def mlp(opset: int = 21) -> onnx.ModelProto:
    """loss = Σ tanh(x·w + b)², with weights."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["a"]),
        helper.make_node("Tanh", ["a"], ["t"]),
        helper.make_node("Mul", ["t", "t"], ["y"]),
    ]
    weights = {"w": rng.standard_normal((3, 2)).astype(np.float32), "b": np.array([0.1, -0.2], np.float32)}
    return model(nodes, [value("x", ["N", 3])], [value("y", ["N", 2])], weights, opset=opset)


def chain(count: int) -> onnx.ModelProto:
    """`count` nodes, one after the other."""
    nodes, last = [], "x"
    for i in range(count):
        op, more = [("Sin", []), ("Mul", ["w"]), ("Tanh", []), ("Add", ["w"])][i % 4]
        nodes.append(helper.make_node(op, [last, *more], [f"v{i}"]))
        last = f"v{i}"
    return model(nodes, [value("x", ["N", 4])], [value(last, ["N", 4])], {"w": np.ones(4, np.float32)})


def stock(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """ONNX Runtime as it is, but for fusions that would lose digits of float64 (see `wrong_fusions`)."""
    content = proto.SerializeToString()
    without = {"disabled_optimizers": wrong} if (wrong := wrong_fusions(content)) else {}
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"], **without)


def run(proto: onnx.ModelProto | ir.Model, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    """On ONNX Runtime; on the reference evaluator where that cannot (old forms, missing kernels)."""
    if isinstance(proto, ir.Model):
        proto = ir.to_proto(proto)
    outputs = [o.name for o in proto.graph.output]
    try:
        session = stock(proto)
    except Exception:
        return dict(zip(outputs, ReferenceEvaluator(proto).run(None, feeds)))
    return dict(zip(outputs, session.run(None, feeds)))


def assert_sound(proto: onnx.ModelProto | ir.Model) -> None:
    """The full checker passes, every name is unique in its scope, and no known trap was emitted."""
    if isinstance(proto, ir.Model):
        proto = ir.to_proto(proto)
    onnx.checker.check_model(proto, full_check=True)
    assert_no_traps(proto)


def assert_no_traps(proto: onnx.ModelProto, primal: onnx.ModelProto | None = None) -> None:
    """Nothing that ONNX Runtime computes wrongly, in silence, was added to `primal`.

    ScatterND with a reduction races on repeated indices: wrong sums with two threads. A Pad that names its axes is
    misread next to a Transpose. A reduction of an empty tensor along an axis that is counted from the back keeps
    the shape of its operand, which only broadcasting can forgive.
    """
    own = {t.name for t in primal.graph.initializer} if primal is not None else set()
    known = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer if t.name not in own}
    had = {n.output[0] for n in nodes_of(primal.graph)} if primal is not None else set()
    for node in nodes_of(proto.graph):
        reduction = next((a.s.decode() for a in node.attribute if a.name == "reduction"), "none")
        racy = node.op_type == "ScatterND" and reduction != "none" and node.output[0] not in had
        assert not racy, f"{node.name} is a racy ScatterND"
        assert node.op_type != "Pad" or len(node.input) < 4 or not node.input[3], f"{node.name} names its axes"
        dropped = node.op_type.startswith("Reduce") and any(a.name == "keepdims" and not a.i for a in node.attribute)
        axes = known.get(node.input[1]) if dropped and len(node.input) > 1 and node.output[0] not in had else None
        assert axes is None or (axes >= 0).all(), f"{node.name} drops axes that are counted from the back"


def nodes_of(graph: onnx.GraphProto):
    for node in graph.node:
        yield node
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(a.g)
            for inner in a.graphs:
                yield from nodes_of(inner)
