"""Pooling against PyTorch, ties included, on ONNX Runtime in float32."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import grad, jvp, signature, vjp
from onnxgrad.runtime import Session
from onnxgrad.testing import Case, node_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

#: spatial shape, kernel, stride, padding, dilation, ceil
WINDOWS = [
    ((12,), 3, 3, 0, 1, False),
    ((11,), 3, 2, 1, 2, True),
    ((8, 6), 2, 2, 0, 1, False),
    ((9, 7), 2, 2, 0, 1, False),
    ((9, 7), 2, 2, 0, 1, True),
    ((9, 8), 3, 2, 1, 1, False),
    ((9, 8), 3, 2, 1, 1, True),
    ((10, 8), 3, 1, 1, 2, False),
    ((4, 6, 4), 2, 2, 0, 1, False),
    ((5, 6, 4), 3, 2, 1, 1, True),
]


def derived(op, x, u, attrs, symbolic, wrt=("x0",), of=("y0",)):
    """Value and cotangent from ONNX Runtime."""
    primal = node_model(
        Case(op, [x], attrs, symbolic=symbolic or True),
        {"x0": x},
        symbolic=symbolic is not None,
        dtype=np.float32,
    )
    model = vjp(primal, wrt=list(wrt), of=list(of))
    sig = signature(model)
    return model, {"x0": x, sig.cotangents["y0"]: u}, ["y0", sig.gradients["x0"]]


def run(model, feeds, names):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(names, feeds)


def operands(room, ties):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, *room)).astype(np.float32)
    return (np.round(x) if ties else x), rng  # many equal values, as after a quantized or a flat image


def of_torch(pool, x, rng, *args):
    """PyTorch's pooled `x`, a cotangent of it, and the cotangent of `x`."""
    t = torch.tensor(x, requires_grad=True)
    out = getattr(torch.nn.functional, pool)(t, *args)
    u = rng.standard_normal(tuple(out.shape)).astype(np.float32)
    out.backward(torch.tensor(u))
    return out.detach().numpy(), u, t.grad.numpy()


@pytest.mark.parametrize("symbolic", [None, {0: (0,)}, {0: (0, 2, 3, 4)}], ids=["static", "batch", "space"])
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("spec", WINDOWS, ids=str)
def test_max_pool(spec, ties, symbolic):
    room, k, s, p, d, ceil = spec
    rank = len(room)
    x, rng = operands(room, ties)
    out, u, wanted = of_torch(f"max_pool{rank}d", x, rng, k, s, p, d, ceil)
    attrs = {
        "kernel_shape": [k] * rank,
        "strides": [s] * rank,
        "pads": [p] * 2 * rank,
        "dilations": [d] * rank,
    }
    y, g = run(*derived("MaxPool", x, u, attrs | {"ceil_mode": int(ceil)}, symbolic))
    np.testing.assert_array_equal(y, out)
    np.testing.assert_allclose(g, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("symbolic", [None, {0: (0,)}, {0: (0, 2, 3, 4)}], ids=["static", "batch", "space"])
@pytest.mark.parametrize("included", [False, True], ids=["", "padding counts"])
@pytest.mark.parametrize("spec", [s for s in WINDOWS if s[4] == 1], ids=str)
def test_average_pool(spec, included, symbolic):
    room, k, s, p, _, ceil = spec
    rank = len(room)
    x, rng = operands(room, False)
    out, u, wanted = of_torch(f"avg_pool{rank}d", x, rng, k, s, p, ceil, included)
    attrs = {"kernel_shape": [k] * rank, "strides": [s] * rank, "pads": [p] * 2 * rank}
    attrs |= {"ceil_mode": int(ceil), "count_include_pad": int(included)}
    y, g = run(*derived("AveragePool", x, u, attrs, symbolic))
    np.testing.assert_allclose(y, out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(g, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("room", [(5,), (4, 3), (2, 3, 2)], ids=str)
def test_global_max_pool_gives_ties_to_the_first(room):
    x, rng = operands(room, True)
    _, u, wanted = of_torch(f"adaptive_max_pool{len(room)}d", x, rng, 1)
    _, g = run(*derived("GlobalMaxPool", x, u, {}, None))
    np.testing.assert_array_equal(g, wanted)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("room", [(6,), (4, 6), (2, 4, 6)], ids=str)
def test_second_order_of_tiles(op, room):
    """Tiles have a lowering of their own in float32: its derivative in x and in the cotangent."""
    rank = len(room)
    x, rng = operands(room, True)
    t = torch.tensor(x, requires_grad=True)
    pool = getattr(torch.nn.functional, f"{'max' if op == 'MaxPool' else 'avg'}_pool{rank}d")
    out = pool(t, 2, 2)
    u = rng.standard_normal(tuple(out.shape)).astype(np.float32)
    tu = torch.tensor(u, requires_grad=True)
    (gradient,) = torch.autograd.grad(out, t, tu, create_graph=True)
    v = rng.standard_normal(x.shape).astype(np.float32)
    wanted = torch.autograd.grad(gradient, tu, torch.tensor(v))[0]

    model, feeds, (_, grad) = derived(op, x, u, {"kernel_shape": [2] * rank, "strides": [2] * rank}, {0: (0,)})
    cotangent = next(n for n in feeds if n != "x0")
    second = vjp(model, wrt=["x0", cotangent], of=[grad])
    sig = signature(second)
    names = [sig.gradients["x0"], sig.gradients[cotangent]]
    dx, du = run(second, feeds | {sig.cotangents[grad]: v}, names)
    np.testing.assert_array_equal(dx, np.zeros_like(x))
    np.testing.assert_allclose(du, wanted.numpy(), rtol=0, atol=1e-6)


INF = np.inf
TILES = [[1, INF, 3, 4], [INF, INF, INF, 2], [-INF] * 4, [-INF, 1, 2, -INF], [INF, -INF, 1, INF], [5, 5, 4, 5]]


@pytest.mark.parametrize("relu", [False, True])
def test_infinities_in_tiles_go_to_the_first_of_the_largest(relu):
    """Their difference is NaN; and where x comes from a Relu, only those above are seen to."""
    x = np.stack([np.array(t, np.float32).reshape(2, 2) for t in TILES])[None]
    body = "h = Relu(x) y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (h)"
    body = body if relu else body.replace("h = Relu(x)", "").replace("(h)", "(x)")
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[1, 6, 2, 2] x) => (float[1, 6, 1, 1] y) {{ {body} }}'
    )
    derived = grad(model, wrt="x")
    tensor = torch.tensor(x, requires_grad=True)
    torch.nn.functional.max_pool2d(tensor.relu() if relu else tensor, 2).sum().backward()
    (plain,) = onnxruntime.InferenceSession(derived.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(plain, tensor.grad.numpy())
    rewritten = Session(ir.from_proto(derived)).run({"x": x})["x_grad"]
    np.testing.assert_array_equal(rewritten, tensor.grad.numpy())
    moved = jvp(model, wrt="x")
    session = onnxruntime.InferenceSession(moved.SerializeToString())
    t = np.arange(24, dtype=np.float32).reshape(x.shape)
    want = (tensor.grad.numpy() * t).sum((2, 3), keepdims=True)
    np.testing.assert_array_equal(session.run(["y_tangent"], {"x": x, "x_tangent": t})[0], want)
