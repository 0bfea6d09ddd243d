"""Integers that are stored, against the kernels of ONNX Runtime: the same, bit for bit."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.training.quantization.numbers import dequantize, quantize
from tests.training.quantization.models import scores

RNG = np.random.default_rng(0)
KINDS = [ir.DataType[n] for n in ("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4")]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("way", ["all", "channels", "blocks"])
@pytest.mark.parametrize("floats", [np.float32, np.float16])
def test_against_the_kernels(kind: ir.DataType, way: str, floats: type) -> None:
    shape, axis, block = {"all": ((), 1, 0), "channels": ((5,), 1, 0), "blocks": ((3, 5), 0, 4)}[way]
    x = (RNG.standard_normal((10, 5)) * 20).astype(floats)
    scale = (0.05 + RNG.random(shape)).astype(floats)
    x[:4] = np.rint(x[:4] * 2) / 2 * (scale if way != "blocks" else 1)  # ties
    if way == "blocks":
        scale = scale * RNG.choice([-1, 1], shape).astype(floats)
    point = RNG.integers(0, 8, shape).astype(kind.numpy())
    attributes = {"axis": axis} | ({"block_size": block} if block else {})
    make = onnx.helper.make_node
    nodes = [
        make("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
        make("DequantizeLinear", ["q", "s", "z"], ["y"], **attributes),
    ]
    value = onnx.helper.make_tensor_value_info
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(floats))
    graph = onnx.helper.make_graph(
        nodes, "g", [value("x", element, x.shape)], [value("y", element, x.shape)],
        [onnx.numpy_helper.from_array(scale, "s"), ir.to_proto(ir.tensor(point, dtype=kind, name="z"))],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    numbers = quantize(x, scale, point, kind, axis, block)
    assert numbers.dtype == kind.numpy()
    np.testing.assert_array_equal(dequantize(numbers, scale, point, axis, block), scores(model, {"x": x}, False))
