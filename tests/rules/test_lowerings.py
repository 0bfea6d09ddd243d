"""Every lowering that a rule chooses has a switch, and both sides of it give the same gradients."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import numpy_helper, parser

from onnxgrad import UnknownName, vjp, without_lowerings
from onnxgrad.ir.lowerings import LOWERINGS
from tests.models import run

RESIZE = 'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'
#: For each lowering, a model in which it is chosen: shape of x, shape of w, body, shape of y.
MODELS = {
    "leading_products": ("4,3,5", "3,5", "y = Add (x, w)", "4,3,5"),
    "joined_gates": ("4,3", "4,3", "z = Mul (x, w) s = Sigmoid (z) y = Mul (z, s)", "4,3"),
    "steep_steps": ("4,3", "4,3", "z = Mul (x, w) y = Relu (z)", "4,3"),
    "mirrored_weights": ("2,3,6,5", "4,3,3,2", "y = Conv <pads = [1, 0, 1, 1]> (x, w)", "2,4,6,5"),
    "gemm_of_rows": ("2,4,3", "3,5", "y = MatMul (x, w)", "2,4,5"),
    "pointwise_weight": ("2,3,6,5", "4,3,1,1", "y = Conv <strides = [2, 1]> (x, w)", "2,4,3,5"),
    "image_products": ("2,3,6,5", "4,3,1,1", "y = Conv <strides = [2, 1]> (x, w)", "2,4,3,5"),
    "interleaved_weight": (
        "2,4,7,6",
        "6,2,3,2",
        "y = Conv <group = 2, strides = [2, 1], dilations = [1, 2]> (x, w)",
        "2,6,3,4",
    ),
    "wider_kernel": (
        "2,6,7,6",
        "4,3,3,2",
        "y = Conv <group = 2, pads = [2, 0, 1, 1], dilations = [1, 2]> (x, w)",
        "2,4,8,5",
    ),
    "depthwise_rows": ("2,3,6,5", "3,1,3,2", "y = Conv <group = 3, strides = [1, 2]> (x, w)", "2,3,4,2"),
    "band_products": ("2,3,6,5", "2,3,6,5", "z = Mul (x, w) y = AveragePool <kernel_shape = [3, 2]> (z)", "2,3,4,4"),
    "compared_tiles": (
        "2,3,6,4",
        "2,3,6,4",
        "z = Mul (x, w) y = MaxPool <kernel_shape = [3, 2], strides = [3, 2]> (z)",
        "2,3,2,2",
    ),
    "planes_first": (
        "2,3,4,6,2",
        "2,3,4,6,2",
        "z = Mul (x, w) y = MaxPool <kernel_shape = [2, 3, 2], strides = [2, 3, 2]> (z)",
        "2,3,2,2,1",
    ),
    "repeated_tiles": (
        "2,3,6,4",
        "2,3,6,4",
        "z = Mul (x, w) y = AveragePool <kernel_shape = [3, 2], strides = [3, 2]> (z)",
        "2,3,2,2",
    ),
    "copied_planes": (
        "2,3,4,6,2",
        "2,3,4,6,2",
        "z = Mul (x, w) y = AveragePool <kernel_shape = [2, 3, 2], strides = [2, 3, 2]> (z)",
        "2,3,2,2,1",
    ),
    "averaged_copies": (
        "2,3,3,2",
        "2,3,3,2",
        f'z = Mul (x, w) s = Constant <value = float[4] {{1, 1, 2, 3}}> () y = Resize <{RESIZE}> (z, "", s)',
        "2,3,6,6",
    ),
}


@pytest.mark.parametrize("name", LOWERINGS)
def test_both_sides_give_the_same(name):
    shapes = dict(zip("xwy", (MODELS[name][0], MODELS[name][1], MODELS[name][3])))
    source = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[{shapes["x"]}] x, float[{shapes["w"]}] w) '
        f"=> (float[{shapes['y']}] y) {{ {MODELS[name][2]} }}"
    )
    chosen = vjp(source, wrt=["x", "w"])
    with without_lowerings(name):
        other = vjp(source, wrt=["x", "w"])
    assert _said(chosen) != _said(other), "the switch changes nothing"
    assert _said(vjp(source, wrt=["x", "w"])) == _said(chosen), "the switch stays where it was"
    rng = np.random.default_rng(0)
    feeds = {
        n: rng.standard_normal(tuple(map(int, s.split(",")))).astype(np.float32)
        for n, s in zip(("x", "w", "y_cotangent"), shapes.values())
    }
    got, wanted = run(chosen, feeds), run(other, feeds)
    for output in ("x_grad", "w_grad"):
        assert wanted[output].any()
        np.testing.assert_allclose(got[output], wanted[output], rtol=2e-5, atol=2e-5)


def _said(model):
    """The operators of a model with their attributes, and its constants."""
    nodes = Counter((n.op_type, str(n.attribute)) for n in model.graph.node)
    return nodes, [numpy_helper.to_array(t).tolist() for t in model.graph.initializer]


def test_a_name_that_no_lowering_has():
    with pytest.raises(UnknownName, match="did you mean 'steep_steps'"), without_lowerings("steep_step"):
        pass
