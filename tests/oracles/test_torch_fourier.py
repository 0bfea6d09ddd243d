"""Fourier transforms, determinants and cumulative products against PyTorch, on ONNX Runtime in float32."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnxgrad import signature, vjp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def pairs(z):
    return torch.view_as_real(z.contiguous())


def complex_(x):
    return torch.view_as_complex(x.contiguous())


def frames(x, w):
    return pairs(torch.stft(x[..., 0], 8, 3, 8, w, center=False, return_complex=True).transpose(1, 2))


def triple(a):
    """The determinant of a 3·3 matrix; the gradient of PyTorch's own is 0 at rank 2, where C is not."""
    return a[0] @ torch.linalg.cross(a[1], a[2])


def whole(n: int) -> np.ndarray:
    return np.array(n, np.int64)


SINGULAR = np.outer([1, 2, -1, 0.5], [1, 0.5, 2, 1]) + np.outer([0, 1, 1, 2], [2, 1, 0, -1])  # rank 2: C = 0
ALMOST = np.array([[1.0, 2, 3], [2, 4, 6], [0, 1, -1]])  # rank 2 of 3: C ≠ 0

#: operator, opset, attributes, operands (shapes or values; integers are constants), the same in PyTorch
OPS = {
    "fft": ("DFT", 20, {}, [(2, 7, 2)], lambda x: pairs(torch.fft.fft(complex_(x)))),
    "ifft, axis 0": (
        "DFT",
        20,
        {"inverse": 1},
        [(6, 3, 2), None, whole(0)],
        lambda x: pairs(torch.fft.ifft(complex_(x), dim=0)),
    ),
    "fft of a real signal": ("DFT", 20, {}, [(2, 16, 1)], lambda x: pairs(torch.fft.fft(x[..., 0]))),
    "rfft": ("DFT", 20, {"onesided": 1}, [(3, 15, 1)], lambda x: pairs(torch.fft.rfft(x[..., 0]))),
    "rfft, filled up": (
        "DFT",
        20,
        {"onesided": 1},
        [(3, 15, 1), whole(20)],
        lambda x: pairs(torch.fft.rfft(x[..., 0], 20)),
    ),
    "rfft, cut": ("DFT", 18, {"onesided": 1}, [(3, 15, 1), whole(10)], lambda x: pairs(torch.fft.rfft(x[..., 0], 10))),
    "irfft": ("DFT", 20, {"onesided": 1, "inverse": 1}, [(2, 9, 2)], lambda x: torch.fft.irfft(complex_(x))[..., None]),
    "stft": ("STFT", 18, {"onesided": 1}, [(2, 30, 1), whole(3), (8,)], frames),
    "det": ("Det", 22, {}, [(2, 4, 4)], torch.linalg.det),
    "det of rank n - 1": ("Det", 22, {}, [ALMOST], triple),
    "det of rank n - 2": ("Det", 22, {}, [SINGULAR], torch.linalg.det),
    "cumulative product": ("CumProd", 26, {}, [(3, 5), whole(0)], lambda x: torch.cumprod(x, 0)),
    "cumulative product of zeros": (
        "CumProd",
        26,
        {},
        [np.array([2, 0, 3, 0, 4.0]), whole(0)],
        lambda x: torch.cumprod(x, 0),
    ),
}


def model_of(op: str, opset: int, attrs: dict, operands: list[np.ndarray | None]) -> onnx.ModelProto:
    names = ["" if x is None else f"x{i}" for i, x in enumerate(operands)]
    held = {n: x for n, x in zip(names, operands) if x is not None}
    infos = [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, x.shape)
        for n, x in held.items()
        if x.dtype.kind == "f"
    ]
    constants = [numpy_helper.from_array(x, n) for n, x in held.items() if x.dtype.kind != "f"]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attrs)], "g", infos, [onnx.ValueInfoProto(name="y")], constants
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def run(model: onnx.ModelProto, feeds: dict) -> dict:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


@pytest.mark.parametrize("name", OPS)
def test_value_and_gradients(name: str) -> None:
    op, opset, attrs, given, same = OPS[name]
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(x).astype(np.float32) if isinstance(x, tuple) else x for x in given]
    operands = [x.astype(np.float32) if x is not None and x.dtype == np.float64 else x for x in operands]
    floats = {f"x{i}": x for i, x in enumerate(operands) if x is not None and x.dtype == np.float32}
    tensors = {n: torch.tensor(x.astype(np.float64), requires_grad=True) for n, x in floats.items()}
    y = same(*tensors.values())
    u = torch.tensor(rng.standard_normal(y.shape))
    primal = model_of(op, opset, attrs, operands)
    back = vjp(primal, wrt=list(floats))
    got = run(back, floats | {"y_cotangent": u.numpy().astype(np.float32)})
    np.testing.assert_allclose(got["y"], y.detach().numpy(), rtol=1e-4, atol=1e-4)
    for n, g in zip(tensors, torch.autograd.grad((u * y).sum(), list(tensors.values()))):
        np.testing.assert_allclose(got[signature(back).gradients[n]], g.numpy(), rtol=1e-4, atol=1e-4, err_msg=n)
