"""Col2Im and MaxUnpool against PyTorch, on ONNX Runtime in float32."""

import numpy as np
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.testing import Case, node_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def pulled(case, feeds, u, symbolic):
    """Value and cotangent of the first operand from ONNX Runtime."""
    model = vjp(node_model(case, feeds, symbolic=symbolic, dtype=np.float32), wrt=["x0"], of=["y0"])
    sig = signature(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {i.name: feeds.get(i.name, u) for i in session.get_inputs()}
    return session.run(["y0", sig.gradients["x0"]], given)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation"),
    [((7, 6), 3, 1, 1, 1), ((8, 6), 2, 2, 0, 1), ((9, 8), (3, 2), (2, 3), (2, 1), (2, 1))],
    ids=str,
)
def test_fold(size, kernel, stride, padding, dilation, symbolic):
    rng = np.random.default_rng(0)
    torch_fold = torch.nn.Fold(size, kernel, dilation, padding, stride)
    columns = torch.nn.Unfold(kernel, dilation, padding, stride)(torch.zeros(2, 3, *size)).shape
    x = rng.standard_normal(tuple(columns)).astype(np.float32)
    t = torch.tensor(x, requires_grad=True)
    out = torch_fold(t)
    u = rng.standard_normal(tuple(out.shape)).astype(np.float32)
    out.backward(torch.tensor(u))
    k, s, p, d = ([v] * 2 if isinstance(v, int) else list(v) for v in (kernel, stride, padding, dilation))
    attrs = {"strides": s, "pads": p * 2, "dilations": d}
    case = Case("Col2Im", [x, np.array(size), np.array(k)], attrs)
    y, g = pulled(case, {"x0": x, "x1": np.array(size), "x2": np.array(k)}, u, symbolic)
    np.testing.assert_allclose(y, out.detach().numpy(), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(g, t.grad.numpy())


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("room", [(8,), (4, 6), (2, 4, 6)], ids=str)
def test_max_unpool(room, symbolic):
    rank = len(room)
    rng = np.random.default_rng(0)
    full = torch.tensor(rng.standard_normal((1, 1, *room)).astype(np.float32))
    pooled, index = getattr(torch.nn.functional, f"max_pool{rank}d")(full, 2, 2, return_indices=True)
    t = pooled.clone().requires_grad_()
    out = getattr(torch.nn.functional, f"max_unpool{rank}d")(t, index, 2, 2)
    u = rng.standard_normal(tuple(out.shape)).astype(np.float32)
    out.backward(torch.tensor(u))
    feeds = {"x0": pooled.numpy(), "x1": index.numpy()}
    case = Case("MaxUnpool", list(feeds.values()), {"kernel_shape": [2] * rank, "strides": [2] * rank})
    y, g = pulled(case, feeds, u, symbolic)
    np.testing.assert_array_equal(y, out.detach().numpy())
    np.testing.assert_array_equal(g, t.grad.numpy())
