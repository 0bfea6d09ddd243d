"""Expected gradients, DeepLIFT, occlusion and attention rollout: against their definitions, Captum and SHAP."""

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from tests.models import assert_sound

NET = """<ir_version: 10, opset_import: ["": 21]>
g (float[N, 1, 6, 6] x) => (float[N, 2] y) <int64[2] axes = {2, 3}> {
    c = Conv(x, w)
    h = Tanh(c)
    y = ReduceMean<keepdims=0>(h, axes)
}"""
RNG = np.random.default_rng(0)


def net():
    model = onnx.parser.parse_model(NET)
    kernel = RNG.standard_normal((2, 1, 3, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(kernel, "w"))
    return model


def test_expected_gradients_are_the_mean_over_the_background():
    model = net()
    x = RNG.standard_normal((3, 1, 6, 6)).astype(np.float32)
    background = RNG.standard_normal((5, 1, 6, 6)).astype(np.float32)
    explained = onnxgrad.expected_gradients(model, wrt="x", of="y[:, 1]")
    assert_sound(explained)
    found = onnxgrad.Function(explained)(x=x, x_background=background)
    slope = onnxgrad.Function(model).vjp(wrt="x", of="y")
    wanted = np.zeros_like(x)
    for m, b in enumerate(background):
        point = b + (m + 0.5) / 5 * (x - b)
        wanted += (x - b) * slope(point, np.float32([[0, 1]] * 3)) / 5
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_they_add_up_to_what_the_output_gains_over_the_background():
    model, f = net(), None
    f = onnxgrad.Function(model)
    x = RNG.standard_normal((2, 1, 6, 6)).astype(np.float32)
    background = 0.3 * RNG.standard_normal((4000, 1, 6, 6)).astype(np.float32)
    found = onnxgrad.Function(onnxgrad.expected_gradients(model, wrt="x", of="y[:, 0]"))(x=x, x_background=background)
    gain = f(x)[:, 0] - f(background)[:, 0].mean()
    np.testing.assert_allclose(found.sum((1, 2, 3)), gain, atol=0.01)


@pytest.mark.parametrize(("window", "stride"), [(2, None), ((3, 2), 1), ((6, 4), (1, 2))])
def test_occlusion_by_its_definition(window, stride):
    model = net()
    f = onnxgrad.Function(model)
    x = RNG.standard_normal((2, 1, 6, 6)).astype(np.float32)
    explained = onnxgrad.occlusion(model, wrt="x", of="y[:, 1]", window=window, stride=stride, baseline=0.25)
    assert_sound(explained)
    found = onnxgrad.Function(explained)(x)
    h, w = (window, window) if isinstance(window, int) else window
    s, t = (h, w) if stride is None else (stride, stride) if isinstance(stride, int) else stride
    total, count = np.zeros_like(x), np.zeros((6, 6))
    for i in range(0, -(-(6 - h) // s) * s + 1, s):
        for j in range(0, -(-(6 - w) // t) * t + 1, t):
            covered = x.copy()
            covered[..., i : i + h, j : j + w] = 0.25
            total[..., i : i + h, j : j + w] += (f(x) - f(covered))[:, 1][:, None, None, None]
            count[i : i + h, j : j + w] += 1
    np.testing.assert_allclose(found, total / np.maximum(count, 1), rtol=1e-3, atol=1e-6)


@pytest.mark.torch
def test_captum_takes_the_model_and_agrees():
    torch = pytest.importorskip("torch")
    attr = pytest.importorskip("captum.attr", reason="no captum")
    from onnxgrad.interop.torch import Module

    model = net()
    x = RNG.standard_normal((2, 1, 6, 6)).astype(np.float32)
    module = Module(model, trainable=False)
    ours = onnxgrad.Function(onnxgrad.occlusion(model, wrt="x", of="y[:, 1]", window=3, stride=1))(x)
    theirs = attr.Occlusion(module).attribute(torch.tensor(x), (1, 3, 3), strides=(1, 1, 1), target=1)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-3, atol=1e-6)
    explained = onnxgrad.integrated_gradients(model, wrt="x", of="y[:, 1]", steps=200)
    ours = onnxgrad.Function(explained)(x=x, x_baseline=0 * x)
    theirs = attr.IntegratedGradients(module).attribute(torch.tensor(x), target=1, n_steps=200)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-3, atol=1e-5)
    figure, _ = attr.visualization.visualize_image_attr(
        ours[0].transpose(1, 2, 0), x[0].transpose(1, 2, 0), method="heat_map", sign="all", use_pyplot=False
    ) if hasattr(attr, "visualization") else (None, None)  # fmt: skip
    if figure is not None:
        assert figure.axes


LIFTED = {
    "a network": """(float[N, 5] x) => (float[N, 3] y) {
        h = Gemm (x, w1, b1)
        r = Relu (h)
        t = PRelu (r, slope)
        y = Gemm (t, w2)
    }""",
    "gates and products": """(float[N, 5] x) => (float[N, 3] y) {
        h = Gemm (x, w1, b1)
        s = Sigmoid (h)
        swish = Mul (h, s)
        e = Erf (h)
        g = Mul (swish, e)
        square = Pow (g, two)
        y = Gemm (square, w2)
    }""",
    "maxima": """(float[N, 5] x) => (float[N, 3] y) {
        h = Gemm (x, w1, b1)
        c = Unsqueeze (h, axis)
        p = MaxPool <kernel_shape = [3], strides = [1], pads = [1, 1]> (c)
        low = ReduceMin <keepdims = 0> (p, axis)
        t = Tanh (low)
        y = Gemm (t, w2)
    }""",
}


@pytest.mark.parametrize("text", LIFTED.values(), ids=LIFTED)
def test_deep_lift_adds_up_to_the_gain(text):
    """Also for one row, and where nothing changes."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    draw = np.random.default_rng(1)
    arrays = {n: draw.standard_normal(s) for n, s in {"w1": (5, 8), "b1": 8, "slope": 8, "w2": (8, 3)}.items()}
    for name, array in {**arrays, "two": np.float32(2)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(array), name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    explained, f = onnxgrad.deep_lift(model, wrt="x", of="y[:, 1]"), onnxgrad.Function(model)
    assert_sound(explained)
    for rows in (1, 6):
        x, base = draw.standard_normal((2, rows, 5)).astype(np.float32)
        base[0, 2] = x[0, 2]
        found = onnxgrad.Function(explained)(x=x, x_baseline=base)
        np.testing.assert_allclose(found.sum(1), (f(x) - f(base))[:, 1], rtol=1e-4, atol=1e-5)
        assert found[0, 2] == 0
        np.testing.assert_array_equal(onnxgrad.Function(explained)(x=x, x_baseline=x), 0 * x)


@pytest.mark.torch
@pytest.mark.parametrize("net", ["dense", "convolutions", "pooled"])
def test_deep_lift_is_that_of_captum_and_shap(net, tmp_path):
    """With max pooling that of SHAP: the sums of Captum's do not reach the gain there."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    torch.manual_seed(0)
    pool = nn.MaxPool2d(2) if net == "pooled" else nn.AvgPool2d(2)
    layers = [nn.Conv2d(2, 4, 3), nn.ReLU(), pool, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.LeakyReLU(), nn.Flatten()]
    if net == "dense":
        layers = [nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 12), nn.ELU(), nn.Linear(12, 24), nn.Softplus()]
    module = nn.Sequential(*layers, nn.Linear(24, 3)).eval()
    x, base = torch.randn(2, 3, *((5,) if net == "dense" else (2, 10, 10)))
    torch.onnx.export(module, (x,), tmp_path / "m.onnx", dynamo=False, input_names=["x"], output_names=["y"])
    explained = onnxgrad.deep_lift(onnx.load(tmp_path / "m.onnx"), wrt="x", of="y[:, 1]")
    if net == "pooled":
        shap = pytest.importorskip("shap", reason="no shap")
        from tests.zoo.architectures import stub_torchvision  # it imports torch

        stub_torchvision()  # transformers imports it, and shap transformers
        base = base[:1].repeat(3, 1, 1, 1)
        theirs = shap.DeepExplainer(module, base[:1]).shap_values(x)[..., 1]
    else:
        attr = pytest.importorskip("captum.attr", reason="no captum")
        theirs = attr.DeepLift(module).attribute(x, base, target=1).detach().numpy()
    ours = onnxgrad.Function(explained)(x=x.numpy(), x_baseline=base.numpy())
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_attention_rollout_is_the_product_of_layers():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 2, T, 4] q, float[N, 2, T, 4] v) => (float[N, 2, T, 4] y) {
            k = Transpose <perm = [0, 1, 3, 2]> (q)
            s = MatMul (q, k)
            a = Softmax (s)
            h = MatMul (a, v)
            kk = Transpose <perm = [0, 1, 3, 2]> (h)
            ss = MatMul (h, kk)
            aa = Softmax (ss)
            y = MatMul (aa, h)
        }""")
    q, v = RNG.standard_normal((2, 3, 2, 5, 4)).astype(np.float32)
    layers = onnxgrad.Function(model, outputs=["a", "aa"])(q, v)
    mixed = [(layers[n].mean(1) + np.eye(5)) / 2 for n in ("a", "aa")]
    rollout = onnxgrad.attention_rollout(model)
    assert_sound(rollout)
    found = onnxgrad.Function(rollout)(q, v)
    np.testing.assert_allclose(found, mixed[1] @ mixed[0], rtol=1e-5)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: onnxgrad.occlusion(net(), wrt="x"), r'one number for each row; write of="y\[:, 3\]"'),
        (lambda: onnxgrad.occlusion(net(), wrt="x", of="y[:, 0]", window=7), "larger than the input"),
        (lambda: onnxgrad.occlusion(net(), wrt="x", of="y[:, 0]", window=0), "at least 1"),
        (lambda: onnxgrad.occlusion(net(), wrt="h", of="y[:, 0]"), "is no input"),
        (lambda: onnxgrad.deep_lift(net(), wrt="h", of="y[:, 0]"), "is no input"),
        (lambda: onnxgrad.attention_rollout(net()), "no attention written as Softmax"),
    ],
)
def test_what_does_not_fit(make, message):
    with pytest.raises(BadInput, match=message):
        make()
