"""An empty batch: gradients are sums of nothing, which is 0, whatever the memory of ONNX Runtime holds."""

from __future__ import annotations

import ctypes

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import BadInput, grad
from onnxgrad.ir import shapes
from onnxgrad.runtime import Session

#: Inputs of which some axis (N) is empty, what is computed of them, and the weights.
MODELS = {
    "pointwise": ("float[N, 3, 9, 9] x", "y = Conv(x, w, b)", {"w": (8, 3, 1, 1), "b": (8,)}),
    "depthwise": ("float[N, 4, 9, 9] x", "y = Conv<group=4>(x, w)", {"w": (4, 1, 3, 3)}),
    "depthwise, transposed": ("float[N, 4, 9, 9] x", "y = ConvTranspose<group=4>(x, w)", {"w": (4, 1, 3, 3)}),
    "matrix": ("float[N, 30] x", "y = MatMul(x, w)", {"w": (30, 40)}),
    "vector": ("float[30, N] x", "t = Transpose(x)\n y = MatMul(t, w)", {"w": (30, 40)}),
    "batch by matrix": ("float[B, N, 30] x", "y = MatMul(x, w)", {"w": (30, 40)}),
    "batch by batch": ("float[5, N, 30] x", "y = MatMul(x, w)", {"w": (5, 30, 40)}),
    "matrix by batch": ("float[N, 30] x", "y = MatMul(x, w)", {"w": (5, 30, 40)}),
    "many columns": ("float[5, 30, 7] w, float[5, 7, N] x", "y = MatMul(w, x)", {"w": (5, 30, 7)}),
    "Gemm": ("float[N, 30] x", "y = Gemm(x, w, b)", {"w": (30, 40), "b": (40,)}),
    "Gemm, transposed": ("float[30, N] x", "y = Gemm<transA=1>(x, w, b)", {"w": (30, 40), "b": (40,)}),
    "Einsum": ("float[N, 30] x", 'y = Einsum<equation="ni,io->no">(x, w)', {"w": (30, 40)}),
    "Einsum of batches": ("float[N, 5, 30] x", 'y = Einsum<equation="nbi,bio->nbo">(x, w)', {"w": (5, 30, 40)}),
    "row": ("float[N, 30] x", "y = Add(x, b)", {"b": (30,)}),
    "column": ("float[N, 5, 30] x", "y = Mul(x, b)", {"b": (5, 1)}),
    "LayerNormalization": ("float[N, 30] x", "y = LayerNormalization(x, w, b)", {"w": (30,), "b": (30,)}),
    "BatchNormalization": ("float[N, 3, 5] x", "y = BatchNormalization(x, w, b, b, w)", {"w": (3,), "b": (3,)}),
    "InstanceNormalization": ("float[N, 3, 5] x", "y = InstanceNormalization(x, w, b)", {"w": (3,), "b": (3,)}),
    "PRelu": ("float[N, 3, 5] x", "y = PRelu(x, w)", {"w": (3, 1)}),
    "Gather": ("int64[N] x", "y = Gather(w, x)", {"w": (30, 4)}),
    "Softmax": ("float[N, 30] x", "h = MatMul(x, w)\n y = Softmax(h)", {"w": (30, 40)}),
    "self-attention": (
        "float[2, 2, N, 4] x",
        "q = MatMul(x, w)\n k = Transpose<perm=[0, 1, 3, 2]>(x)\n s = MatMul(q, k)\n p = Softmax(s)\n y = MatMul(p, x)",
        {"w": (2, 2, 4, 4)},
    ),
    "cross-attention": (
        "float[2, 2, N, 4] x",
        "k = Transpose<perm=[0, 1, 3, 2]>(w)\n s = MatMul(x, k)\n p = Softmax(s)\n y = MatMul(p, w)",
        {"w": (2, 2, 5, 4)},
    ),
}  # fmt: skip

LEVELS = [onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL]


def model(name):
    inputs, body, weights = MODELS[name]
    declared = [f"float[{', '.join(map(str, s))}] {n}" for n, s in weights.items() if f" {n}" not in inputs]
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 22]> g ({", ".join([inputs, *declared])}) => (float z) '
        f"{{ {body}\n z = ReduceSum<keepdims=0>(y) }}"
    )


def fed(proto):
    feeds, rng = {}, np.random.default_rng(0)
    for value in proto.graph.input:
        held = value.type.tensor_type
        shape = [0 if d.dim_param == "N" else 2 if d.dim_param else d.dim_value for d in held.shape.dim]
        feeds[value.name] = (rng.random(shape) + 0.5).astype(onnx.helper.tensor_dtype_to_np_dtype(held.elem_type))
    return feeds


@pytest.fixture
def dirty_memory():
    """Memory that malloc hands out is full of junk, which the C library of GNU does when it is asked to."""
    mallopt, m_perturb = getattr(ctypes.CDLL(None), "mallopt", None), -6
    if mallopt is None or not mallopt(m_perturb, 0x55):
        pytest.skip("the C library here cannot fill memory with junk")
    yield
    mallopt(m_perturb, 0)


def results(proto, feeds, level):
    """The results of several runs, in memory that was not cleared."""
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    held = {i.name: feeds[i.name] for i in session.get_inputs()}
    for _ in range(5):
        junk = [np.full(size, 7, np.float32) for size in (36, 64, 100, 160, 900, 1050, 1200, 6000) for _ in range(9)]
        del junk
        yield dict(zip([o.name for o in session.get_outputs()], session.run(None, held)))


@pytest.mark.parametrize("level", LEVELS, ids=["plain", "optimized"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_an_empty_batch_have_gradient_0(name, level):
    proto, weights = model(name), MODELS[name][2]
    feeds = fed(proto)
    next(results(proto, feeds, level))
    derived = grad(proto, wrt=list(weights), of="z")
    for got in results(derived, feeds, level):
        for weight, shape in weights.items():
            np.testing.assert_array_equal(got[f"{weight}_grad"], np.zeros(shape, np.float32))


@pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32),
    reason="ONNX Runtime clears products over nothing itself from 1.32 on",
)
def test_without_the_guard_memory_shows(monkeypatch, dirty_memory):
    """The test can fail: it does for products that are left to ONNX Runtime."""
    proto = model("batch by batch")
    monkeypatch.setattr(shapes, "unless_empty", lambda z, x, axis: z)
    derived = grad(proto, wrt="w", of="z")
    assert any(r["w_grad"].any() for r in results(derived, fed(proto), LEVELS[1]))


def test_sizes_that_are_known_are_not_guarded():
    proto = model("batch by batch")
    for d in proto.graph.input[0].type.tensor_type.shape.dim:
        d.dim_value = d.dim_value or 3
    for derived in (grad(proto, wrt="w", of="z"), grad(model("self-attention"), wrt="x", of="z")):
        assert not any(n.op_type == "Where" for n in derived.graph.node)


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [((3, 9, 9), (8, 3, 3, 3), ""), ((4, 9, 9), (8, 2, 3, 3), "<group=2>"), ((4, 99), (16, 4, 5), "<strides=[2]>")],
)
def test_a_convolution_stops_where_it_would_never_end(x, w, attributes):
    """Of an empty batch, over no channels: ONNX Runtime goes on for ever, or gives what the memory holds."""
    text = f"""<ir_version: 10, opset_import: ["": 22]> g (float[N, {", ".join(map(str, x))}] x,
        float[{", ".join(map(str, w))}] w) => (float z) {{
            y = Conv{attributes}(x, w)
            z = ReduceSum<keepdims=0>(y)
        }}"""
    proto = onnx.parser.parse_model(text)
    derived = grad(proto, wrt="w")
    feeds = {"x": np.zeros((0, *x), np.float32), "w": np.zeros(w, np.float32)}
    with pytest.raises(Exception, match="no_weight_gradient_of_an_empty_batch"):
        next(results(derived, feeds, LEVELS[1]))
    with pytest.raises(
        BadInput, match=r"^ONNX Runtime failed: Conv node 'y': the batch is empty.*leave such a batch out$"
    ):
        Session(derived).run(feeds)
    feeds["x"] = np.ones((1, *x), np.float32)
    assert next(results(derived, feeds, LEVELS[1]))["w_grad"].any()
