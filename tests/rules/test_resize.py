"""Resize up the ladder: every mode, every transformation of coordinates, scales and sizes."""

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import jvp, signature, vjp
from onnxgrad.errors import NoDerivative
from onnxgrad.testing import Case, node_model, numeric_gradient
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder

COORDINATES = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]
ROUNDINGS = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]


def case(x, *, scales=None, sizes=None, roi=None, note="", order=1, symbolic=True, runtime=True, **attrs):
    """Resize with constant scales, sizes and region."""
    operands = [x, roi, scales, sizes]
    operands = [
        None if o is None else np.array(o, t) if i else o
        for i, (o, t) in enumerate(zip(operands, [None, np.float32, np.float32, np.int64]))
    ]
    while operands[-1] is None:
        operands.pop()
    parts = [attrs.get("mode", "nearest"), attrs.get("coordinate_transformation_mode", ""), note]
    rest = {"order": order, "symbolic": symbolic, "runtime": runtime, "constants": (1, 2)}
    return Case("Resize", operands, attrs, wrt=[0], note=" ".join(filter(None, parts)), **rest)


def modes():
    """Up and down by a fraction, where ONNX Runtime and the reference evaluator agree."""
    for mode, form in itertools.product(["nearest", "linear", "cubic"], COORDINATES):
        attrs = {"mode": mode, "coordinate_transformation_mode": form}
        # the sizes are those that come out: elsewhere align_corners takes the fraction into account or not
        yield case((1, 2, 4, 3), scales=[1, 1, 1.75, 2], **attrs, note="scales", runtime=form != "align_corners")
        yield case((1, 1, 5, 4), sizes=[1, 1, 7, 2], **attrs, note="sizes", order=1 + (form == "half_pixel"))
    for form, rounding in itertools.product(["half_pixel", "asymmetric"], ROUNDINGS):
        attrs = {"coordinate_transformation_mode": form, "nearest_mode": rounding}
        yield case((1, 1, 5, 4), scales=[1, 1, 0.65, 1.5], **attrs, note=rounding)
    for mode in ["nearest", "linear", "cubic"]:
        attrs = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 3.0}
        yield case((1, 2, 4, 4), roi=[0, 0, 0.1, 0.3, 1, 1, 0.9, 1.2], sizes=[1, 2, 5, 3], **attrs)
        yield case((4, 4), roi=[0.3, 0.2, 1.2, 0.7], axes=[1, 0], sizes=[5, 3], **attrs, note="axes")
    for mode in ["linear", "cubic"]:
        yield case((1, 1, 6, 5), sizes=[1, 1, 3, 2], mode=mode, antialias=1, note="antialias")
        yield case((1, 1, 6, 5), scales=[1, 1, 0.4, 1.6], mode=mode, antialias=1, note="antialias, up and down")
    for policy in ["not_larger", "not_smaller"]:
        attrs = {"axes": [2, 3], "sizes": [7, 5], "keep_aspect_ratio_policy": policy}
        yield case((1, 2, 4, 5), mode="linear", **attrs, note=policy)
        yield case((1, 1, 4, 5), mode="nearest", **attrs, note=policy, coordinate_transformation_mode="asymmetric")
        yield case((1, 1, 4, 5), mode="cubic", exclude_outside=1, **attrs, note=policy)


def regions():
    """With respect to the region, whose places lie between elements."""
    form = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 3.0, "mode": "linear"}
    for region in ([0.13, 0.21, 1.17, 0.74], [0.13, 0.74, 0.87, 0.21]):
        operands = [(4, 4), np.array(region), None, np.array([5, 3])]
        yield Case("Resize", operands, {**form, "axes": [1, 0]}, note=f"region {region[1]}")
    yield Case("Resize", [(2, 1, 4), np.array([0.13, 0.87]), None, np.array([3])], {**form, "axes": [2]}, note="region")


CASES = [
    *modes(),
    *regions(),
    case((1, 1, 4, 5), scales=[1, 1, 1.5, 0.8], mode="cubic", exclude_outside=1, note="exclude outside"),
    case((1, 1, 4, 5), scales=[1, 1, 1.5, 0.8], mode="cubic", cubic_coeff_a=-0.5, note="a", order=2),
    case((1, 1, 4, 5), scales=[1.5, 0.8], mode="linear", axes=[3, 2], note="axes backwards"),
    case((1, 2, 3, 4), scales=[1, 1, 2, 3], note="copies", order=2),
    case((1, 2, 3, 4), scales=[1, 1, 2, 3], note="copies", nearest_mode="floor",
         coordinate_transformation_mode="asymmetric"),
    case((1, 2, 3, 4), sizes=[1, 2, 6, 4], note="copies by sizes"),
    case((2, 1, 3), scales=[1, 1, 4], note="copies"),
    case((2, 3, 4), scales=[2, 1, 1.5], note="three axes"),
    case((1, 1, 2, 3, 2), scales=[1, 1, 2, 1.5, 1.5], mode="linear", note="trilinear"),
    case((5,), scales=[1.5], note="one axis"),
    case((4, 3), sizes=[6, 3], mode="linear", note="two axes"),
    case((1, 2, 4, 3), scales=[1, 1, 1.05, 2], mode="linear", note="the same size, moved"),
    case((1, 1, 4, 3), scales=[1, 1, 1.1, 1.5], mode="cubic", exclude_outside=1, note="the same size, moved"),
    case((1, 2, 4, 3), scales=[1, 1, 1.05, 1], mode="linear", note="nothing but moved", runtime=False),
    case((4, 3), roi=[0.1, 0, 0.8, 1], sizes=[4, 5], mode="linear", note="the same size",
         coordinate_transformation_mode="tf_crop_and_resize", runtime=False),
    case((1, 2, 4, 3), sizes=[1, 2, 7, 4], mode="linear", symbolic={0: (0,)}, note="batch"),
    case((1, 1, 2, 3), scales=[1, 1, 0.4, 1.5], mode="linear", note="to none", symbolic={0: (0,)}),
    case((1, 2, 4, 3), sizes=[1, 2, 7, 1], mode="linear", note="to one",
         coordinate_transformation_mode="align_corners"),
]  # fmt: skip
test_rule = ladder("resize", CASES)
test_dtype = dtypes([c for c in CASES if "sizes" in c.note or "copies" in c.note][:12] + list(regions()))


def run(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


DISAGREE = [
    ({"scales": [1, 1, 1.7, 2.3]}, "align_corners"),
    ({"sizes": [1, 1, 2, 1]}, "pytorch_half_pixel"),
    ({"scales": [1, 1, 1.05, 1.05]}, "half_pixel"),
    ({"sizes": [9, 5], "axes": [-2, -1], "keep_aspect_ratio_policy": "not_larger"}, "half_pixel"),
    ({"sizes": [7], "axes": [2], "keep_aspect_ratio_policy": "not_smaller"}, "asymmetric"),
    ({"sizes": [1], "axes": [-1], "keep_aspect_ratio_policy": "not_larger"}, "align_corners"),
    ({"sizes": [1, 1, 5, 7], "roi": [0, 0, 0.1, 0.3, 1, 1, 0.9, 1.2]}, "tf_crop_and_resize"),
    ({"sizes": [1, 1, 5, 4], "roi": [0, 0, 0.1, 0.3, 1, 1, 0.9, 1.2]}, "tf_crop_and_resize"),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(("how", "form"), DISAGREE, ids=lambda p: str(p))
def test_the_gradient_is_that_of_the_runtime_at_hand(how, form, symbolic):
    """ONNX Runtime departs from the reference evaluator here; the derivative goes with what computes y."""
    if not symbolic and min(how.get("axes", [0])) < 0:
        pytest.skip("the shape of y that the onnx package infers is not what ONNX Runtime gives")
    held = case((1, 1, 5, 4), **how, mode="linear", coordinate_transformation_mode=form)
    x, rng = np.zeros((1, 1, 5, 4), np.float32), np.random.default_rng(0)
    feeds = {f"x{i}": v for i, v in enumerate([x, *held.inputs[1:]]) if v is not None}
    primal = node_model(held, feeds, symbolic=symbolic, dtype=np.float32)
    model = vjp(primal, wrt=["x0"], of=["y0"])
    seed = signature(model).cotangents["y0"]
    u = rng.standard_normal(run(primal, {"x0": x})["y0"].shape).astype(np.float32)
    numeric = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        unit = x.copy()
        unit[at] = 1
        numeric[at] = np.vdot(run(model, {"x0": unit, seed: u})["y0"], u)
    got = run(model, {"x0": x, seed: u})[signature(model).gradients["x0"]]
    np.testing.assert_allclose(got, numeric, rtol=0, atol=1e-5)


@pytest.mark.parametrize("opset", [7, 9])
def test_upsample(opset):
    """Upsample is raised to Resize."""
    held = [onnx.numpy_helper.from_array(np.array([1, 1, 2, 1.5], np.float32), "s")]
    attrs = {"scales": [1, 1, 2, 1.5]} if opset == 7 else {}
    node = onnx.helper.make_node("Upsample", ["x"] if opset == 7 else ["x", "s"], ["y"], mode="linear", **attrs)
    x = onnx.helper.make_tensor_value_info("x", 1, [1, 2, 3, 4])
    y = onnx.helper.make_tensor_value_info("y", 1, [1, 2, 6, 6])
    graph = onnx.helper.make_graph([node], "g", [x], [y], held if opset == 9 else [])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=4)
    derived = vjp(model, wrt=["x"], of=["y"])
    rng = np.random.default_rng(0)
    u = rng.standard_normal((1, 2, 6, 6)).astype(np.float32)
    zero = np.zeros((1, 2, 3, 4), np.float32)
    got = run(derived, {"x": zero, signature(derived).cotangents["y"]: u})[signature(derived).gradients["x"]]
    for at in np.ndindex(zero.shape):
        unit = zero.copy()
        unit[at] = 1
        np.testing.assert_allclose(got[at], np.vdot(run(model, {"x": unit})["y"], u), rtol=0, atol=1e-5)


@pytest.mark.parametrize("opset", [11, 13])
def test_empty_operands_are_none(opset):
    """As PyTorch's older exporter writes a Resize to sizes that are computed."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 7, opset_import: ["": {opset}]>
        g (float[N, 1, 3, 4] x) => (float[M, 1, 5, 6] y) {{
            none = Constant <value = float[0] {{}}> ()  high = Constant <value = int64[3] {{1, 5, 6}}> ()
            zero = Constant <value = int64[1] {{0}}> ()  one = Constant <value = int64[1] {{1}}> ()
            all = Shape (x)  rows = Slice (all, zero, one)  sizes = Concat <axis = 0> (rows, high)
            y = Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (x, none, none, sizes) }}""")
    derived = vjp(model, wrt=["x"], of=["y"])
    u = np.random.default_rng(0).standard_normal((1, 1, 5, 6)).astype(np.float32)
    zero = np.zeros((1, 1, 3, 4), np.float32)
    got = run(derived, {"x": zero, signature(derived).cotangents["y"]: u})[signature(derived).gradients["x"]]
    for at in np.ndindex(zero.shape):
        unit = zero.copy()
        unit[at] = 1
        np.testing.assert_allclose(got[at], np.vdot(run(model, {"x": unit})["y"], u), rtol=0, atol=1e-5)


def floats(form, mode):
    """A model whose region and scales are computed from inputs."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Resize", ["x", "r", "s"], ["y"], mode=mode, coordinate_transformation_mode=form)],
        "g",
        [onnx.helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [2, 4]), ("r", [4]), ("s", [2]))],
        [onnx.helper.make_tensor_value_info("y", 1, [None, None])],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=10)


REFUSED = [({"coordinate_transformation_mode": "align_corners"}, "not settled"), ({"antialias": 1}, "antialiasing")]


@pytest.mark.parametrize("derive", [vjp, jvp])
@pytest.mark.parametrize(("attrs", "says"), REFUSED)
def test_scales_that_mean_more_are_refused(derive, attrs, says):
    model = floats("half_pixel", "linear")
    kept = [a for a in model.graph.node[0].attribute if a.name not in attrs]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend([*kept, *(onnx.helper.make_attribute(k, v) for k, v in attrs.items())])
    with pytest.raises(NoDerivative, match=says):
        derive(model, wrt=["s"], of=["y"])


def place(form, i, n, o, s, start, end):
    """The coordinate among n at which element i of o is read, by the specification."""
    if form == "tf_crop_and_resize":
        return (start + i * (end - start) / (o - 1) if o > 1 else (start + end) / 2) * (n - 1)
    if form == "asymmetric":
        return i / s
    if form == "half_pixel_symmetric":
        return n / 2 * (1 - o / (n * s)) + (i + 0.5) / s - 0.5
    return 0.0 if form == "pytorch_half_pixel" and o == 1 else (i + 0.5) / s - 0.5


def interpolated(x, o, s, region, mode, form, excluding):
    """Resize of a matrix to the sizes `o`, by the specification, in float64; beyond the region 0."""
    a = -0.75
    for k in (0, 1):
        n = x.shape[k]
        m = np.zeros((o[k], n))
        for i in range(o[k]):
            c = place(form, i, n, o[k], s[k], region[k], region[k + 2])
            if form == "tf_crop_and_resize" and not 0 <= c <= n - 1:
                continue
            for j in range(-3, n + 3):
                t = abs(c - j)
                w = max(0, 1 - t) if mode == "linear" else 0
                if mode == "cubic" and t < 2:
                    w = ((a + 2) * t - (a + 3)) * t * t + 1 if t <= 1 else ((t - 5) * t + 8) * a * t - 4 * a
                m[i, min(max(j, 0), n - 1)] += w if not excluding or 0 <= j < n else 0
            m[i] /= m[i].sum()
        x = np.moveaxis(np.tensordot(m, x, (1, k)), 0, k)
    return x


MOVES = [
    *itertools.product(["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric"], "s"),
    ("tf_crop_and_resize", "r"),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scales", [(1.7, 2.3), (0.85, 1.3)], ids=str)
@pytest.mark.parametrize(("form", "wrt"), MOVES)
@pytest.mark.parametrize(("mode", "excluding"), [("linear", 0), ("cubic", 0), ("cubic", 1)])
def test_what_moves_the_places(mode, form, wrt, scales, excluding):
    """Scales and region, against differences of the formulas of the specification, on ONNX Runtime.

    The reference evaluator takes the resized length for a fraction.
    """
    model, rng = floats(form, mode), np.random.default_rng(0)
    if excluding:
        model.graph.node[0].attribute.append(onnx.helper.make_attribute("exclude_outside", 1))
    feeds = {"x": rng.standard_normal((2, 4)), "r": np.array([0.13, 0.31, 1.24, 0.83]), "s": np.array(scales)}
    o = [int(n * s) for n, s in zip((2, 4), scales)]

    def f(v):
        given = feeds | {wrt: v}
        return interpolated(feeds["x"], o, given["s"], given["r"], mode, form, excluding)

    u = rng.standard_normal(o)
    numeric = numeric_gradient(lambda v: np.vdot(u, f(v)), feeds[wrt])
    back, push = vjp(model, wrt=["x", wrt], of=["y"]), jvp(model, wrt=["x", wrt], of=["y"])
    pulled = run(back, single(feeds | {signature(back).cotangents["y"]: u}))
    np.testing.assert_allclose(pulled[signature(back).gradients[wrt]], numeric, rtol=1e-4, atol=1e-4)
    t = {"x": np.zeros((2, 4)), wrt: rng.standard_normal(len(feeds[wrt]))}
    moved = run(push, single(feeds | {signature(push).input_tangents[k]: v for k, v in t.items()}))
    got = moved[signature(push).output_tangents["y"]]
    np.testing.assert_allclose(np.vdot(got, u), t[wrt] @ numeric, rtol=1e-4, atol=1e-4)


def single(feeds):
    return {k: np.asarray(v, np.float32) for k, v in feeds.items()}


FLAT = [("half_pixel", "linear", "r"), ("tf_crop_and_resize", "nearest", "s"), ("half_pixel", "nearest", "s")]


@pytest.mark.parametrize(("form", "mode", "wrt"), FLAT)
def test_what_moves_nothing_has_derivative_zero(form, mode, wrt):
    model = vjp(floats(form, mode), wrt=["x", wrt], of=["y"])
    feeds = {"x": np.ones((2, 4)), "r": np.array([0, 0, 1, 1]), "s": np.array([2, 1.5])}
    feeds[signature(model).cotangents["y"]] = np.ones((4, 6))
    got = run(model, {k: v.astype(np.float32) for k, v in feeds.items()})
    assert not got[signature(model).gradients[wrt]].any()
    np.testing.assert_allclose(got[signature(model).gradients["x"]].sum(), 24, rtol=1e-5)
