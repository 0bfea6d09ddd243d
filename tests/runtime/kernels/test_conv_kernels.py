"""The cotangent of the weights of a convolution in C: against the operators, PyTorch and the bare sum."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper, parser, shape_inference

from onnxgrad import vjp
from onnxgrad.errors import OnnxGradError
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels import conv_kernels, convolutions
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.kernels.pulled import Pulled
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import optimized, with_kernels

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def however_few_pixels(monkeypatch):
    """Small cases have the kernel, too, and it is alone (test_convolutions.py, test_depthwise.py have the others)."""
    monkeypatch.setattr(conv_kernels, "FEWEST_PIXELS", 0)
    monkeypatch.setattr(convolutions, "gains", lambda *_: False)
    monkeypatch.setattr(convolutions, "FEWEST_GROUPS", 1 << 40)


#: N, C, M, groups, (H, W), kernel, strides, dilations, pads
GEOMETRIES = {
    "3×3": (2, 16, 16, 1, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "Winograd": (4, 32, 40, 1, (13, 18), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "Winograd, no padding": (3, 37, 64, 1, (16, 16), (3, 3), (1, 1), (1, 1), (0, 0, 0, 0)),
    "Winograd, uneven padding": (2, 48, 32, 1, (12, 19), (3, 3), (1, 1), (1, 1), (2, 0, 1, 2)),
    "Winograd, parts of rows": (1, 40, 64, 1, (6, 403), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "Winograd, many images": (33, 32, 32, 1, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "one channel": (3, 1, 1, 1, (5, 7), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "three to odd": (2, 3, 7, 1, (17, 33), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "whole vectors": (4, 64, 64, 1, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "1×1": (3, 5, 6, 1, (4, 4), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    "1×1, ragged": (3, 8, 20, 1, (3, 5), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    "1×1, whole vectors": (3, 8, 20, 1, (4, 8), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    "1×1, bands": (2, 3, 5, 1, (96, 80), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    "1×1, groups": (5, 6, 8, 2, (4, 4), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    "1×1, strided": (2, 8, 9, 1, (8, 9), (1, 1), (2, 2), (1, 1), (0, 0, 0, 0)),
    "1×1, padded": (2, 8, 9, 1, (8, 8), (1, 1), (1, 1), (1, 1), (1, 0, 0, 1)),
    "3×3, strided": (2, 6, 5, 1, (16, 16), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    "long stride": (2, 6, 5, 1, (19, 23), (2, 3), (3, 5), (1, 1), (0, 1, 2, 0)),
    "asymmetric": (2, 6, 5, 1, (9, 12), (3, 2), (1, 2), (1, 1), (0, 2, 1, 0)),
    "padding at the end": (2, 3, 4, 1, (8, 8), (3, 3), (1, 1), (1, 1), (0, 0, 2, 2)),
    "padding at the start": (2, 3, 4, 1, (8, 8), (3, 3), (1, 1), (1, 1), (2, 2, 0, 0)),
    "dilated": (2, 6, 5, 1, (13, 11), (3, 3), (1, 1), (2, 3), (2, 3, 2, 3)),
    "dilated and strided": (2, 6, 5, 1, (13, 15), (3, 2), (2, 3), (3, 2), (3, 1, 0, 2)),
    "rows left over": (2, 3, 4, 1, (10, 11), (3, 3), (3, 3), (1, 1), (0, 0, 0, 0)),
    "larger than the input": (2, 3, 4, 1, (4, 3), (6, 5), (1, 1), (1, 1), (2, 2, 1, 1)),
    "the whole input": (5, 4, 9, 1, (6, 7), (6, 7), (1, 1), (1, 1), (0, 0, 0, 0)),
    "rank of one tap": (2, 4, 4, 1, (5, 5), (1, 5), (1, 1), (1, 1), (0, 2, 0, 2)),
    "much padding": (1, 2, 3, 1, (3, 3), (2, 2), (1, 1), (1, 1), (5, 6, 4, 7)),
    "bands": (1, 3, 4, 1, (90, 70), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "strided bands": (1, 2, 3, 1, (151, 141), (5, 3), (2, 2), (1, 1), (2, 1, 2, 1)),
    "groups": (2, 6, 8, 2, (7, 9), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "groups of one output": (2, 6, 3, 3, (7, 9), (3, 3), (2, 1), (1, 1), (1, 1, 1, 1)),
    "depthwise": (3, 19, 19, 19, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "depthwise, strided": (3, 32, 32, 32, (9, 16), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    "depthwise, 5×5": (2, 4, 4, 4, (9, 9), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
    "depthwise, more outputs": (2, 5, 15, 5, (8, 9), (3, 2), (1, 1), (1, 2), (1, 0, 1, 1)),
    "wider padding than vectors": (2, 2, 3, 1, (3, 30), (1, 41), (1, 1), (1, 1), (0, 20, 0, 20)),
    "far padding, far taps": (2, 2, 3, 1, (9, 50), (1, 3), (1, 1), (1, 20), (0, 20, 0, 20)),
    "windows that reach far": (2, 2, 3, 1, (4, 5), (2, 2), (1, 1), (90, 80), (90, 80, 90, 80)),
    "long rows": (1, 3, 20, 1, (2, 9001), (2, 3), (1, 2), (1, 1), (1, 1, 0, 1)),
    "long rows of groups": (1, 18, 18, 18, (2, 401), (2, 3), (1, 1), (1, 1), (1, 1, 0, 1)),
    "groups of some": (2, 40, 60, 20, (9, 8), (3, 3), (2, 1), (1, 1), (1, 1, 1, 1)),
    "many images": (67, 2, 3, 1, (3, 3), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
}


def pulled(geometry, symbolic=False, dtype=np.float32, **changed):
    n, c, m, group, size, kernel, strides, dilations, pads = geometry
    attributes = {"group": group, "strides": strides, "dilations": dilations, "pads": pads, **changed}
    node = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=kernel, **attributes)
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((n, c, *size)), np.zeros((m, c // group, *kernel))
    out = [
        (h + a + b - d * (k - 1) - 1) // s + 1
        for h, a, b, d, k, s in zip(size, pads[: len(size)], pads[len(size) :], dilations, kernel, strides)
    ]
    seed = rng.standard_normal((n, m, *out)).astype(dtype)
    return Pulled([node], {"x": x.astype(dtype), "w": w.astype(dtype)}, ["w"], symbolic), seed


def tolerance(seed):
    """The tolerance of a sum over so many products."""
    return {"rtol": 1e-4, "atol": 5e-6 * max(1.0, seed[:, 0].size) ** 0.5 + 1e-5}


def the_sum(x, seed, geometry):
    """The sum itself, in float64, without a zero of padding."""
    _, c, m, group, size, kernel, strides, dilations, pads = geometry
    w = np.zeros((m, c // group, *kernel))
    for i, j, p, q in np.ndindex(*kernel, *seed.shape[2:]):
        row, column = p * strides[0] + i * dilations[0] - pads[0], q * strides[1] + j * dilations[1] - pads[1]
        if 0 <= row < size[0] and 0 <= column < size[1]:
            here = x[:, :, row, column].astype(np.float64).reshape(len(x), group, -1)
            there = seed[:, :, p, q].astype(np.float64).reshape(len(x), group, -1)
            with np.errstate(all="ignore"):
                w[:, :, i, j] += sum(there[n][:, :, None] * here[n][:, None, :] for n in range(len(x))).reshape(m, -1)
    return w


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_weights(name):
    operators, seed = pulled(GEOMETRIES[name])
    (w,) = operators.compare(seed, ["ConvWeightGrad"], **tolerance(seed))
    if seed[0].size < 2000:
        np.testing.assert_allclose(w, the_sum(operators.arrays["x"], seed, GEOMETRIES[name]), **tolerance(seed))


@pytest.mark.parametrize("name", ["3×3", "3×3, strided", "dilated and strided", "depthwise", "1×1"])
def test_sizes_that_only_a_run_tells(name):
    operators, seed = pulled(GEOMETRIES[name], symbolic=True)
    operators.compare(seed, ["ConvWeightGrad"], **tolerance(seed))


def test_no_image():
    operators, seed = pulled((0, *GEOMETRIES["3×3"][1:]), symbolic=True)
    (w,) = operators.native(seed)  # not the operators: ONNX Runtime's Conv never ends without channels
    assert w.shape == (16, 16, 3, 3)
    assert not w.any()


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_padding_that_the_node_finds(mode):
    geometry = (2, 3, 4, 1, (9, 10), (3, 2), (2, 1), (1, 1), (1, 0, 1, 1) if mode != "VALID" else (0, 0, 0, 0))
    operators, seed = pulled(geometry, auto_pad=mode, pads=None)
    operators.compare(seed, ["ConvWeightGrad"], **tolerance(seed))


def test_transposed_convolution():
    rng = np.random.default_rng(3)
    arrays = {"x": rng.standard_normal((2, 5, 6, 7)), "w": rng.standard_normal((5, 3, 3, 2))}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 3], pads=[1, 0, 0, 1])
    operators = Pulled([node], {k: v.astype(np.float32) for k, v in arrays.items()}, ["w"])
    seed = rng.standard_normal((2, 3, 12, 19)).astype(np.float32)
    operators.compare(seed, ["ConvWeightGrad"], rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "name",
    ["3×3", "padding at the end", "3×3, strided", "dilated", "depthwise", "1×1", "bands", "Winograd, uneven padding"],
)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_where_it_belongs(name, value):
    operators, seed = pulled(GEOMETRIES[name])
    x = operators.arrays["x"]
    x[0, 0, 0, 0] = x[-1, -1, -1, -1] = value
    seed[-1, -1, 0, -1] = value
    expected = the_sum(x, seed, GEOMETRIES[name])
    (w,) = operators.native(seed)
    np.testing.assert_allclose(w, expected, **tolerance(seed))
    assert not np.isfinite(w).all()


def test_other_types_and_ranks_stay_operators():
    assert pulled(GEOMETRIES["3×3"], dtype=np.float64)[0].kernels == []
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    four = {"x": np.zeros((1, 2, 5, 4, 3, 3), np.float32), "w": np.zeros((3, 2, 2, 2, 2, 2), np.float32)}
    assert Pulled([node], four, ["w"]).kernels == []


#: N, C, M, groups, (D, H, W), kernel, strides, dilations, pads
SOLIDS = {
    "3×3×3": (2, 3, 18, 1, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1, 1, 1, 1)),
    "strided": (2, 4, 5, 1, (7, 9, 8), (3, 2, 3), (2, 3, 2), (1, 1, 1), (1, 0, 1, 0, 1, 1)),
    "dilated": (1, 3, 4, 1, (9, 7, 8), (2, 3, 2), (1, 1, 2), (3, 1, 2), (0, 1, 1, 2, 1, 0)),
    "no padding": (2, 3, 4, 1, (5, 6, 7), (2, 3, 4), (1, 1, 1), (1, 1, 1), (0, 0, 0, 0, 0, 0)),
    "1×1×1": (3, 5, 6, 1, (3, 4, 5), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0, 0, 0, 0)),
    "depthwise": (2, 6, 6, 6, (4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1, 1, 1, 1)),
    "groups": (2, 4, 40, 2, (3, 5, 6), (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1, 0, 1, 1)),
    "boxes": (1, 2, 17, 1, (3, 50, 110), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("name", SOLIDS)
def test_weights_over_three_axes(name):
    operators, seed = pulled(SOLIDS[name])
    operators.compare(seed, ["ConvWeightGrad"], **tolerance(seed))


@pytest.mark.parametrize("group", [1, 16])
def test_pictures_with_channels_last(group):
    """What is turned before and after is a Transpose of its own, not one with that of the cotangent's operators."""
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[N,9,8,16] x, float[16,{16 // group},3,3] w)
        => (float[N,9,8,16] y) {{
        t = Transpose <perm = [0, 3, 1, 2]> (x) c = Conv <pads = [1, 1, 1, 1], group = {group}> (t, w)
        u = Transpose <perm = [0, 2, 3, 1]> (c) y = Sin (u) }}"""
    model = vjp(ir.from_proto(shape_inference.infer_shapes(parser.parse_model(text))), wrt=["w"])
    assert [n.op_type for n in with_kernels(model).graph if n.domain == DOMAIN] == ["ConvWeightGrad"]
    if group > 1:
        assert not {"MatMul", "Gemm"} & {n.op_type for n in optimized(model).graph}  # one convolution in blocks
    rng = np.random.default_rng(0)
    feeds = {
        v.name: rng.standard_normal([d if isinstance(d, int) else 3 for d in v.shape]).astype(np.float32)
        for v in model.graph.inputs
    }
    options = [Options(target="portable", layout="plain"), Options(target="portable"), Options(target="native")]
    expected, *found = (Session(model, o).run(feeds, ["w_grad"])["w_grad"] for o in options)
    for weights in found:
        np.testing.assert_allclose(weights, expected, atol=1e-4, rtol=1e-4)


def test_cotangent_of_another_batch_is_refused():
    operators, seed = pulled(GEOMETRIES["3×3"], symbolic=True)
    with pytest.raises(OnnxGradError, match="do not belong together"):
        operators.run(seed[:1], "native")


@pytest.mark.torch
@pytest.mark.parametrize("name", GEOMETRIES)
def test_torch(name):
    torch = pytest.importorskip("torch")
    geometry = GEOMETRIES[name]
    _, _, _, group, _, _, strides, dilations, pads = geometry
    operators, seed = pulled(geometry)
    x = torch.nn.functional.pad(torch.tensor(operators.arrays["x"]).double(), (pads[1], pads[3], pads[0], pads[2]))
    w = torch.zeros(operators.arrays["w"].shape, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, None, strides, 0, dilations, group)
    (expected,) = torch.autograd.grad(y, w, torch.tensor(seed).double())
    np.testing.assert_allclose(operators.native(seed)[0], expected.numpy(), **tolerance(seed))


def test_few_pixels_stay_operators(monkeypatch):
    monkeypatch.undo()
    for side, kernels in ((7, []), (8, ["ConvWeightGrad"])):
        few, seed = pulled((2, 16, 16, 1, (side, side), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)))
        few.compare(seed, kernels, **tolerance(seed))


#: N, C, M, groups, W, kernel, stride, dilation, pads
ROWS = {
    "two far taps": (4, 8, 6, 1, 300, 2, 1, 64, (64, 0)),
    "one tap": (3, 8, 6, 1, 40, 1, 1, 1, (0, 0)),
    "one tap, ragged": (2, 3, 5, 1, 37, 1, 1, 1, (0, 0)),
    "strided": (3, 5, 7, 1, 101, 5, 3, 2, (4, 1)),
    "groups": (2, 6, 8, 2, 33, 3, 1, 1, (1, 1)),
    "depthwise": (2, 7, 7, 7, 65, 4, 1, 1, (3, 0)),
    "one number": (2, 3, 4, 1, 1, 1, 1, 1, (0, 0)),
    "longer than the row": (2, 3, 4, 1, 3, 7, 1, 1, (4, 4)),
}


@pytest.mark.parametrize("name", ROWS)
def test_weights_over_one_axis(name):
    n, c, m, group, width, kernel, stride, dilation, pads = ROWS[name]
    settings = {"group": group, "strides": [stride], "dilations": [dilation], "pads": pads}
    node = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[kernel], **settings)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, c, width)).astype(np.float32)
    operators = Pulled([node], {"x": x, "w": np.zeros((m, c // group, kernel), np.float32)}, ["w"])
    out = (width + sum(pads) - dilation * (kernel - 1) - 1) // stride + 1
    seed = rng.standard_normal((n, m, out)).astype(np.float32)
    (found,) = operators.compare(seed, ["ConvWeightGrad"], rtol=1e-4, atol=1e-4)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), pads)).reshape(n, group, c // group, -1)
    g = seed.astype(np.float64).reshape(n, group, m // group, out)
    for k in range(kernel):
        taken = padded[..., k * dilation :][..., : (out - 1) * stride + 1 : stride]
        expected = np.einsum("ngmt,ngct->gmc", g, taken).reshape(m, c // group)
        np.testing.assert_allclose(found[..., k], expected, rtol=1e-4, atol=1e-4)
