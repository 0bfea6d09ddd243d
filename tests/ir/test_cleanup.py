"""Products with vectors at the end of a derivation: ONNX Runtime computes them a row at a time."""

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.ir.match import producer

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (double[ROWS, 5] a, double[5] x) => (double y) {
    BEFORE p = MatMul(LEFT, x)  s = Mul(p, p)  y = ReduceSum<keepdims = 0>(s)
}"""


@pytest.mark.parametrize(
    ("rows", "before", "is_column"),
    [
        ("9", "", True),
        ("N", "", True),
        ("2,3", "", False),
        ("2,4", "", True),
        ("3", "", False),
        ("3", "transposed", True),
    ],
)
def test_a_vector_becomes_a_column_beside_many_rows(rows, before, is_column):
    left = "a"
    if before:
        before, left = "t = Transpose(a) u = Transpose(t)", "u"
    text = MODEL.replace("ROWS", rows).replace("BEFORE", before).replace("LEFT", left)
    gradient = onnxgrad.Function(onnx.parser.parse_model(text)).grad(wrt=["a", "x"])
    rights = [n.inputs[1] for n in gradient.model.graph if n.op_type == "MatMul"]
    assert (any(producer(v, "Unsqueeze") is not None and len(v.shape) == 2 for v in rights)) == is_column
    sizes = [7 if n == "N" else int(n) for n in rows.split(",")]
    rng = np.random.default_rng(0)
    a, x = rng.standard_normal((*sizes, 5)), rng.standard_normal(5)
    p = a @ x
    for found, expected in zip(
        gradient(a, x).values(), (2 * p[..., None] * x, np.tensordot(2 * p, a, p.ndim)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_trained_file_keeps_its_products_and_its_step_has_columns():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N, 5] x) => (float[N] y)
        <float[5] w = {1, 2, 3, 4, 5}, float one = {1}> { p = MatMul(x, w)  y = Add(p, one) }"""
    )
    attached = onnxgrad.attach(model, loss="mse", trainable=["w"])
    assert [n.op_type for n in attached.graph.node] == ["MatMul", "Add"]
    step = onnxgrad.compile_step(attached).model
    assert "Unsqueeze" in [n.op_type for n in step.graph]
