"""DeformConv against PyTorch, on ONNX Runtime in float32: as sampled columns, and as a convolution."""

import numpy as np
import onnxruntime
import pytest

from onnxgrad import signature, vjp
from onnxgrad.testing import Case, node_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

#: image, weights, group, parts with offsets of their own, stride, padding, dilation
FORMS = [
    ((2, 4, 6, 5), (6, 4, 3, 3), 1, 1, (1, 1), (1, 1), (1, 1)),
    ((2, 4, 6, 5), (6, 2, 3, 2), 2, 1, (2, 1), (1, 0), (1, 2)),
    ((1, 4, 7, 6), (4, 1, 2, 3), 4, 2, (1, 2), (2, 1), (2, 1)),
]


def columns(x, offset, mask, kernel, parts, stride, padding, dilation):
    """The sampled columns, [N, C, taps, O], by grid_sample."""
    n, c, h, w = x.shape
    out = offset.shape[2:]
    offset = offset.reshape(n, parts, *kernel, 2, *out)
    mask = mask.reshape(n, parts, *kernel, *out)
    rows = torch.arange(out[0]) * stride[0] - padding[0]
    cols = torch.arange(out[1]) * stride[1] - padding[1]
    found = []
    for part in range(parts):
        held = x[:, part * c // parts : (part + 1) * c // parts]
        for i in range(kernel[0]):
            for j in range(kernel[1]):
                at = offset[:, part, i, j]
                y = rows[:, None] + i * dilation[0] + at[:, 0]
                z = cols[None, :] + j * dilation[1] + at[:, 1]
                grid = torch.stack([z * 2 / (w - 1) - 1, y * 2 / (h - 1) - 1], -1)
                value = torch.nn.functional.grid_sample(held, grid, align_corners=True)
                found.append((value * mask[:, part, i, j][:, None]).flatten(2))
    taps = kernel[0] * kernel[1]
    return torch.cat([torch.stack(found[p * taps : (p + 1) * taps], 2) for p in range(parts)], 1)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "batch"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_deform_conv(form, symbolic):
    image, weights, group, parts, stride, padding, dilation = form
    rng = np.random.default_rng(0)
    kernel = weights[2:]
    out = [(image[2 + i] + 2 * padding[i] - (kernel[i] - 1) * dilation[i] - 1) // stride[i] + 1 for i in range(2)]
    taps = kernel[0] * kernel[1]
    shapes = [image, weights, (image[0], parts * taps * 2, *out), (weights[0],), (image[0], parts * taps, *out)]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    x, w, offset, bias, mask = (torch.tensor(a, requires_grad=True) for a in arrays)
    sampled = columns(x, offset, mask, kernel, parts, stride, padding, dilation)
    sampled = sampled.reshape(image[0], group, -1, sampled.shape[-1])
    y = torch.einsum("gmk,ngkl->ngml", w.reshape(group, weights[0] // group, -1), sampled)
    y = y.reshape(image[0], weights[0], *out) + bias[:, None, None]
    u = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(u))
    attrs = {"group": group, "offset_group": parts, "strides": stride, "pads": padding * 2, "dilations": dilation}
    free = dict.fromkeys((0, 2, 4), (0,))
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    case = Case("DeformConv", arrays, attrs, opset=19, symbolic=free)
    names = list(feeds)
    model = vjp(node_model(case, feeds, symbolic=symbolic, dtype=np.float32), wrt=names, of="y0")
    sig = signature(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    value, *grads = session.run(["y0", *(sig.gradients[n] for n in names)], feeds | {sig.cotangents["y0"]: u})
    np.testing.assert_allclose(value, y.detach().numpy(), rtol=0, atol=1e-4)
    for got, t in zip(grads, (x, w, offset, bias, mask)):
        np.testing.assert_allclose(got, t.grad.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_convolution_where_nothing_is_offset(form):
    image, weights, group, parts, stride, padding, dilation = form
    rng = np.random.default_rng(1)
    x, w = (torch.tensor(rng.standard_normal(s).astype(np.float32), requires_grad=True) for s in (image, weights))
    y = torch.nn.functional.conv2d(x, w, None, stride, padding, dilation, group)
    u = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(u))
    nothing = np.zeros((image[0], parts * weights[2] * weights[3] * 2, *y.shape[2:]), np.float32)
    feeds = {"x0": x.detach().numpy(), "x1": w.detach().numpy(), "x2": nothing}
    attrs = {"group": group, "offset_group": parts, "strides": stride, "pads": padding * 2, "dilations": dilation}
    case = Case("DeformConv", list(feeds.values()), attrs, opset=19)
    model = vjp(node_model(case, feeds, dtype=np.float32), wrt=["x0", "x1"], of="y0")
    sig = signature(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [sig.gradients["x0"], sig.gradients["x1"]]
    dx, dw = session.run(names, feeds | {sig.cotangents["y0"]: u})
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(dw, w.grad.numpy(), rtol=0, atol=1e-4)
