"""Vectors that are updated alike: the same bits, fewer operators, and only where nothing else reads them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference

from onnxgrad.runtime import Options, Session, StepRunner
from onnxgrad.training import attach, compile_step
from onnxgrad.training.optim.config import Group
from tests.runtime.passes import optimized

LAYERS = 12


def _model(dtype=np.float32):
    """Layers of different widths, so that biases have different lengths."""
    rng = np.random.default_rng(0)
    widths = [4, *(3 + i % 4 for i in range(LAYERS - 1)), 3]
    nodes, tensors, x = [], [], "x"
    for i, (a, b) in enumerate(pairwise(widths)):
        tensors += [
            numpy_helper.from_array((rng.standard_normal((a, b)) * 0.7).astype(dtype), f"w{i}"),
            numpy_helper.from_array(rng.standard_normal(b).astype(dtype), f"b{i}"),
        ]
        nodes += [
            helper.make_node("MatMul", [x, f"w{i}"], [f"m{i}"]),
            helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"]),
            helper.make_node("Tanh", [f"a{i}"], [f"x{i}"]),
        ]
        x = f"x{i}"
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, ["N", 4])],
        [helper.make_tensor_value_info(x, kind, ["N", 3])], tensors,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


CASES = {
    "adam": {"optimizer": "adam"},
    "adamw by the operator": {"optimizer": "adamw", "convention": "onnx"},
    "momentum": {"optimizer": "momentum", "spared": None},
    "rmsprop": {"optimizer": "rmsprop"},
    "lion": {"optimizer": "lion", "spared": None},
    "adam, clipped, averaged": {"optimizer": "adam", "clip_norm": 0.1, "clip_value": 0.05, "ema": 0.9},
    "two groups": {"optimizer": "adamw", "groups": [Group("b[0-5]", learning_rate=0.1)], "spared": None},
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "dtype"), [*((name, np.float32) for name in CASES), ("adam", np.float64)])
def test_the_same_bits(name, dtype):
    how = dict(CASES[name])
    counted = how.pop("spared", "most")
    step = compile_step(attach(_model(dtype), loss="mse", **how))
    # without the views that only see to it that a vector is computed when its gradient can be
    with_all = sum(not (node.name or "").startswith("soon.") for node in optimized(step.model).graph)
    if counted:
        assert with_all < optimized(step.model, ["batched_updates"]).graph.num_nodes() - 32
    rng = np.random.default_rng(1)
    label = next(n for n in step.batch if n != "x")
    batches = [
        {"x": rng.standard_normal((5, 4)).astype(dtype), label: rng.standard_normal((5, 3)).astype(dtype)}
        for _ in range(4)
    ]
    runners = [StepRunner(step, options=Options(threads=2, without=out)) for out in ((), ("batched_updates",))]
    for batch in batches:
        losses = [float(runner.step(batch)[step.loss]) for runner in runners]
        assert losses[0] == losses[1]
    found, expected = (runner.state() for runner in runners)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
        assert value.dtype.kind != "f" or np.isfinite(value).all()


def _chains(extra=(), outputs=(), length=4):
    """Forty vectors, each through eight operators."""
    names = [f"v{i}" for i in range(40)]
    nodes = [n for v in names for n in (
        helper.make_node("Mul", [v, "two"], [f"{v}_m"]), helper.make_node("Add", [f"{v}_m", v], [f"{v}_y"]),
        *(helper.make_node("Abs" if i % 2 else "Neg", [f"{v}_{a}"], [f"{v}_{b}"]) for i, (a, b) in enumerate(
            pairwise("ypqrst"))),
        helper.make_node("Sqrt", [f"{v}_t"], [f"{v}_z"]))]  # fmt: skip
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [*nodes, *extra], "g", [info(v, TensorProto.FLOAT, [length]) for v in names],
        [*(info(f"{v}_z", TensorProto.FLOAT, [length]) for v in names), *outputs],
        [numpy_helper.from_array(np.float32(2), "two")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(shape_inference.infer_shapes(model))


def test_what_something_else_reads_is_left_alone():
    info = helper.make_tensor_value_info
    joined = ["Concat", "Mul", "Add", "Neg", "Abs", "Neg", "Abs", "Neg", "Sqrt", "Split"]
    assert [n.op_type for n in optimized(_chains()).graph] == joined
    total = helper.make_node("ReduceSum", ["v3_y"], ["total"], keepdims=0)
    made = optimized(_chains([total], [info("total", TensorProto.FLOAT, [])])).graph
    assert sorted(n.op_type for n in made) == sorted([*joined, *joined[1:-1], "ReduceSum"])
    long = _chains(length=5000)
    assert optimized(long) is long


def _statistics(made_for_it):
    """Twenty running means of a batch, which is read elsewhere, too, unless it is `made_for_it`."""
    names = [f"v{i}" for i in range(20)]
    nodes = [n for v in names for n in (
        helper.make_node("ReduceSum", [f"{v}_x", "axes"], [f"{v}_b"], keepdims=0),
        helper.make_node("Mul", [f"{v}_b", "tenth"], [f"{v}_m"]), helper.make_node("Mul", [v, "rest"], [f"{v}_o"]),
        helper.make_node("Add", [f"{v}_o", f"{v}_m"], [f"{v}_z"]),
        *([] if made_for_it else [helper.make_node("Sqrt", [f"{v}_b"], [f"{v}_s"])]))]  # fmt: skip
    info = helper.make_tensor_value_info
    lengths = {v: 3 + i % 4 for i, v in enumerate(names)}
    ends = "z" if made_for_it else "zs"
    graph = helper.make_graph(
        nodes, "g",
        [info(v, TensorProto.FLOAT, [n]) for v, n in lengths.items()]
        + [info(f"{v}_x", TensorProto.FLOAT, [5, n]) for v, n in lengths.items()],
        [info(f"{v}_{end}", TensorProto.FLOAT, [n]) for v, n in lengths.items() for end in ends],
        [numpy_helper.from_array(np.float32(x), name) for name, x in (("tenth", 0.1), ("rest", 0.9))]
        + [numpy_helper.from_array(np.array([0]), "axes")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(shape_inference.infer_shapes(model))


def test_running_statistics():
    """Few operators are enough where no node computes the statistic of a batch for them alone."""
    model = _statistics(made_for_it=False)
    kinds = Counter(n.op_type for n in optimized(model).graph)
    assert kinds == {"ReduceSum": 20, "Sqrt": 20, "Concat": 2, "Mul": 2, "Add": 1, "Split": 1}
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(v.shape.numpy()).astype(np.float32) for v in model.graph.inputs}
    found, expected = (Session(model, Options(without=out)).run(feeds) for out in ((), ("batched_updates",)))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    alone = _statistics(made_for_it=True)
    assert optimized(alone) is alone
