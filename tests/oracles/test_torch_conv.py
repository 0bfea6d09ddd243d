"""Convolutions against PyTorch: values, cotangents of input, weights and bias, on ONNX Runtime in float32."""

import numpy as np
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.testing import Case, node_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

#: rank, groups, channels in, channels out, kernel, stride, dilation, padding
CONVOLUTIONS = [
    (1, 1, 5, 7, 3, 1, 1, 1),
    (1, 2, 4, 6, 5, 2, 1, 2),
    (1, 4, 4, 4, 3, 3, 2, 2),
    (2, 1, 3, 8, 3, 1, 1, 1),
    (2, 1, 8, 8, 3, 2, 1, 1),
    (2, 1, 8, 4, 1, 1, 1, 0),
    (2, 1, 8, 4, 1, 2, 1, 0),
    (2, 1, 4, 4, 5, 1, 2, 4),
    (2, 1, 4, 4, 3, 2, 3, 1),
    (2, 2, 4, 6, 3, 1, 1, 1),
    (2, 2, 4, 6, 3, 2, 2, 2),
    (2, 8, 8, 8, 3, 1, 1, 1),
    (2, 8, 8, 8, 3, 2, 1, 1),
    (2, 8, 8, 8, 5, 1, 2, 4),
    (2, 4, 4, 8, 3, 2, 1, 1),
    (3, 1, 3, 4, 3, 2, 1, 1),
    (3, 3, 3, 3, 2, 1, 1, 0),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("symbolic", [None, {0: (0,)}, {0: (0, 2, 3, 4)}], ids=["static", "batch", "space"])
@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
@pytest.mark.parametrize("spec", CONVOLUTIONS, ids=str)
def test_convolution(spec, transposed, symbolic):
    rank, group, inner, outer, k, s, d, p = spec
    rng = np.random.default_rng(0)
    room = (13, 10, 9)[:rank]
    x = rng.standard_normal((2, inner, *room)).astype(np.float32)
    w_shape = (inner, outer // group) if transposed else (outer, inner // group)
    w = rng.standard_normal((*w_shape, *[k] * rank)).astype(np.float32)
    b = rng.standard_normal(outer).astype(np.float32)
    attrs = {"strides": [s] * rank, "dilations": [d] * rank, "pads": [p] * 2 * rank, "group": group}
    extra = min(1, s - 1)
    if transposed:
        attrs["output_padding"] = [extra] * rank

    tensors = [torch.tensor(a, requires_grad=True) for a in (x, w, b)]
    name = f"conv{'_transpose' if transposed else ''}{rank}d"
    options = {"output_padding": extra} if transposed else {}
    out = getattr(torch.nn.functional, name)(*tensors, stride=s, padding=p, dilation=d, groups=group, **options)
    u = rng.standard_normal(tuple(out.shape)).astype(np.float32)
    out.backward(torch.tensor(u))

    case = Case("ConvTranspose" if transposed else "Conv", [x, w, b], attrs, symbolic=symbolic or True)
    feeds = {"x0": x, "x1": w, "x2": b}
    model = vjp(node_model(case, feeds, symbolic=symbolic is not None, dtype=np.float32), wrt=list(feeds))
    sig = signature(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = ["y0", *(sig.gradients[n] for n in feeds)]
    got = session.run(names, feeds | {sig.cotangents["y0"]: u})
    for name, have, want in zip(names, got, [out.detach(), *(t.grad for t in tensors)]):
        scale = float(want.abs().max())
        np.testing.assert_allclose(have / scale, want.numpy() / scale, rtol=0, atol=2e-5, err_msg=name)
