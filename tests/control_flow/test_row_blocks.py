"""Functions of rows, some rows at a time: values and derivatives to the second order are those of all rows at once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from onnxgrad import grad, hvp
from onnxgrad.control_flow.row_blocks import by_row_blocks
from onnxgrad.ir import Builder
from onnxgrad.model_io import open_model
from tests.models import run

TEXT = """<ir_version: 10, opset_import: ["": 21]> f (double[{n}, 3] x, double[3, 4] w) => (double s) {{
  z = MatMul(x, w)  y = Softmax<axis = 1>(z)  s = ReduceSumSquare<keepdims = 0>(y) }}"""


def in_blocks(n, most, axis=0):
    """f with the product and the softmax for at most `most` rows at a time, which lie along `axis`."""
    model = open_model(parser.parse_model(TEXT.format(n=n))).model
    b = Builder(model.graph)
    x, w = (b.var(v) for v in model.graph.inputs)
    y = next(node.outputs[0] for node in model.graph if node.op_type == "Softmax")
    last = next(iter(y.consumers()))

    def turned(builder, v):
        return builder.Transpose(v, perm=[1, 0]) if axis else v

    def write(inner, parts):
        return [(turned(inner, inner.Softmax(turned(inner, parts[0]) @ inner.var(w.value), axis=1)), axis)]

    (found,) = by_row_blocks(b, [(turned(b, x), axis)], most, write)
    last.replace_input_with(0, turned(b, found).value)
    model.graph.sort()
    return ir.to_proto(model)


@pytest.mark.parametrize(
    ("n", "most", "axis"), [(6, 3, 0), (7, 3, 0), (7, 3, 1), ("N", 1, 0), ("N", 3, 1), ("N", 20, 0), (1, 3, 0)]
)
def test_values_and_derivatives(n, most, axis):
    rng = np.random.default_rng(1)
    rows = n if isinstance(n, int) else 5
    feeds = {"x": rng.standard_normal((rows, 3)), "w": rng.standard_normal((3, 4))}
    v = {"x_tangent": rng.standard_normal((rows, 3)), "w_tangent": rng.standard_normal((3, 4))}
    plain, blocks = parser.parse_model(TEXT.format(n=n)), in_blocks(n, most, axis)
    assert any(node.op_type == "Scan" for node in blocks.graph.node)
    for derive, more in ((lambda m, wrt: m, {}), (grad, {}), (hvp, v)):
        expected, found = (run(derive(m, wrt=["x", "w"]), feeds | more) for m in (plain, blocks))
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-13, err_msg=name)


def test_no_rows_at_all():
    feeds = {"x": np.zeros((0, 3)), "w": np.ones((3, 4))}
    found = run(grad(in_blocks("N", 3), wrt=["x", "w"]), feeds)
    assert found["x_grad"].shape == (0, 3)
    assert not found["w_grad"].any()
