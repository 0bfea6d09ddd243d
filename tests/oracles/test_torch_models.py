"""Whole models, exported by PyTorch: gradients with respect to the input and every weight, against autograd."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxgrad

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


def cnn():
    """Batch norm, dropout (a no-op at inference), strided and dilated convolutions, both poolings."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, stride=2, padding=2, dilation=2), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Dropout(0.5),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 5), nn.LogSoftmax(-1),
    ), (2, 8, 8)  # fmt: skip


def residual():
    return nn.Sequential(nn.Conv2d(2, 4, 7, 2, 3), Residual(4), nn.MaxPool2d(3, 2, 1), Residual(4),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), (2, 16, 16)  # fmt: skip


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 1, 1, groups=3), nn.Hardswish(), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.ReLU6(), nn.Conv2d(8, 4, 1), nn.GELU(), nn.Flatten(), nn.Linear(64, 3),
    ), (3, 8, 8)  # fmt: skip


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu", norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)), (5, 8)


def autoencoder():
    return nn.Sequential(
        nn.Conv1d(2, 4, 4, 2, 1), nn.ELU(), nn.ConvTranspose1d(4, 2, 4, 2, 1), nn.InstanceNorm1d(2, affine=True),
        nn.Upsample(scale_factor=2), nn.Tanh(),
    ), (2, 8)  # fmt: skip


class GroupedAttention(nn.Module):
    """Hand-written: einsum, gather, masks, RMS-style norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(2, 6, 4) / 2) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        q, k, v = (torch.einsum("nld,hde->nhle", x, w) for w in (self.q, self.k, self.v))
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -1e4), diagonal=1)
        a = torch.softmax(q @ k.transpose(-1, -2) / 2 + mask, -1)
        return (a @ v).sum(1)[:, ::2].clamp(-0.5, 0.5)


MODELS = [cnn, residual, depthwise, transformer, autoencoder, lambda: (GroupedAttention(), (5, 6))]
NAMES = ["cnn", "residual", "depthwise", "transformer", "autoencoder", "attention"]


def exported(make, dynamic: bool):
    torch.manual_seed(0)
    model, shape = make()
    model.eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:  # the exporter merges equal tensors
            if tensor.dtype.is_floating_point:
                tensor.add_(torch.rand_like(tensor) * 0.3)
    x = torch.randn(3, *shape)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (x,), file, dynamo=False, opset_version=18, input_names=["x"], output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}} if dynamic else None,
            do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE,
        )  # fmt: skip
    return model, x, onnx.load_from_string(file.getvalue())


def run(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


def plain_attention():
    """PyTorch's fused attention has neither forward mode nor second order."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def close(got, want, what):
    want = want.detach().numpy()
    scale = max(np.abs(want).max(), 0.1)  # the bias before a normalization has the gradient 0
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=3e-5, err_msg=what)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", MODELS, ids=NAMES)
def test_gradients_of_exported_models(make, dynamic):
    model, x, exported_model = exported(make, dynamic)
    held = {i.name for i in exported_model.graph.initializer}
    weights = {n: p for n, p in model.named_parameters() if n in held}
    assert len(weights) == len(list(model.parameters())), "the exporter renamed a weight"
    wrt = ["x", *weights]
    x.requires_grad_()
    y = model(x)
    u = torch.randn_like(y)
    want = torch.autograd.grad(y, [x, *weights.values()], u)

    derived = onnxgrad.vjp(exported_model, wrt=wrt, of="y")
    onnx.checker.check_model(derived, full_check=True)
    names = onnxgrad.signature(derived)
    feeds = {"x": x.detach().numpy(), names.cotangents["y"]: u.numpy()}
    got = run(derived, feeds)
    close(got["y"], y, "y")
    for name, gradient in zip(wrt, want):
        close(got[names.gradients[name]], gradient, name)

    tangent = torch.randn_like(x)
    pushed = onnxgrad.jvp(exported_model, wrt="x", of="y")
    with plain_attention():
        _, moved = torch.func.jvp(model, (x.detach(),), (tangent,))
    got = run(pushed, {"x": x.detach().numpy(), onnxgrad.signature(pushed).tangents["x"]: tangent.numpy()})
    close(got[onnxgrad.signature(pushed).tangents["y"]], moved, "tangent of y")


@pytest.mark.parametrize("make", [transformer, depthwise], ids=["transformer", "depthwise"])
def test_hessian_vector_product(make):
    model, x, exported_model = exported(make, True)
    v = torch.randn_like(x)
    with plain_attention():
        want = torch.autograd.functional.hvp(lambda x: model(x).sum(), x, v)[1]
    product = onnxgrad.jvp(onnxgrad.grad(exported_model, wrt="x"), wrt="x", of="x_grad")
    names = onnxgrad.signature(product)
    got = run(product, {"x": x.numpy(), names.input_tangents["x"]: v.numpy()})
    close(got[names.output_tangents["x_grad"]], want, "Hessian-vector product")
