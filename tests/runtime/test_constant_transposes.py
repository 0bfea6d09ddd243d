"""Products that read a frozen matrix in both directions: the runtime keeps one copy of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import vjp
from onnxgrad.ir.passes import run_passes
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.constant_transposes import CONSTANT_TRANSPOSES
from onnxgrad.runtime.setting import Setting

W = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)


def model(body, ends="float[N, T, 96] x", w=W):
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g ({ends}) => (y) {{ {body} }}')
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return onnx.shape_inference.infer_shapes(proto)


def passed(proto, **setting):
    derived = ir.from_proto(proto)
    return run_passes(derived, [CONSTANT_TRANSPOSES], lambda: Setting(derived.graph, **{"packs": False, **setting}), ())


def kept_by_the_runtime(proto, path):
    """The number of copies of the matrix that the runtime stores after loading the graph."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return sum(np.prod(t.dims) == W.size for t in onnx.load(path).graph.initializer)


@pytest.mark.parametrize(
    ("body", "feeds"),
    [
        ("y = MatMul (x, w)", {"x": (2, 5, 96), "y_cotangent": (2, 5, 64)}),
        ("wt = Transpose <perm = [1, 0]> (w) h = MatMul (x, w) y = MatMul (h, wt)",
         {"x": (2, 5, 96), "y_cotangent": (2, 5, 96)}),
    ],
    ids=["one product", "two products"],
)  # fmt: skip
def test_the_runtime_keeps_one_copy(body, feeds, tmp_path):
    derived = vjp(model(body), wrt=["x"])
    found = passed(derived)
    assert found.model.graph.num_nodes() < ir.from_proto(derived).graph.num_nodes()
    assert kept_by_the_runtime(derived, tmp_path / "a.onnx") == 2
    assert kept_by_the_runtime(ir.to_proto(found.model), tmp_path / "b.onnx") == 1
    rng = np.random.default_rng(1)
    arrays = {k: rng.standard_normal(shape).astype(np.float32) for k, shape in feeds.items()}
    expected = Session(derived, Options(layout="plain", target="portable")).run(arrays)
    for name, array in Session(derived, Options(packed=False)).run(arrays).items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("operands", ["(x, wt)", "(wt, x)", "(wt, wt)"])
def test_either_operand(operands):
    square = np.random.default_rng(2).standard_normal((6, 6)).astype(np.float32)
    body = f"wt = Transpose <perm = [1, 0]> (w) z = MatMul {operands} y = Add (z, x)"
    proto = model(body, "float[6, 6] x", square)
    found = passed(proto)
    assert [n.op_type for n in found.model.graph] == ["FusedMatMul", "Add"]
    x = np.random.default_rng(3).standard_normal((6, 6)).astype(np.float32)
    (y,) = Session(found.model).run({"x": x}).values()
    a, b = (x if name == "x" else square.T for name in operands.strip("()").split(", "))
    np.testing.assert_allclose(y, a @ b + x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "w"),
    [
        ("wt = Transpose <perm = [1, 0]> (w) y = MatMul (wt, w)", W.astype(np.float64)),
        ("wt = Transpose <perm = [1, 0]> (w) y = Mul (wt, wt)", W),
        ("wt = Transpose <perm = [0, 1]> (w) v = Transpose <perm = [1, 0]> (x) y = MatMul (wt, v)", W),
    ],
    ids=["float64", "no product", "not exchanged"],
)
def test_what_it_leaves(body, w):
    found = passed(model(body, "float[N, 64] x", w))
    assert not found.applied


def test_only_where_the_session_packs_nothing():
    proto = vjp(model("y = MatMul (x, w)"), wrt=["x"])
    (report,) = passed(proto, packs=True).reports
    assert report.reason == "the session packs constants"
    assert passed(proto).applied
