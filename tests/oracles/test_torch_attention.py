"""Attention against PyTorch's scaled_dot_product_attention, on ONNX Runtime in float32."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnxgrad import signature, vjp
from tests.oracles.test_torch_fourier import run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

RNG = np.random.default_rng(0)
MASK = RNG.random((2, 1, 5, 7)) > 0.4
MASK[..., 0] = True
Q, K = (2, 4, 5, 6), (2, 4, 7, 6)

#: shapes of Q, K, V; mask (bool: constant, shape: an operand); attributes; options of PyTorch
WAYS = {
    "plain": ([Q, K, (2, 4, 7, 3)], None, {}, {}),
    "causal": ([Q, (2, 4, 5, 6), (2, 4, 5, 6)], None, {"is_causal": 1}, {"is_causal": True}),
    "mask": ([Q, K, K], MASK, {"scale": 0.25}, {"scale": 0.25}),
    "bias": ([Q, K, K], (4, 5, 7), {}, {}),
    "grouped queries": ([(2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)], None, {}, {"enable_gqa": True}),
    "grouped queries, mask": ([(2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)], MASK, {}, {"enable_gqa": True}),
}


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("way", WAYS)
def test_attention(way: str, opset: int) -> None:
    shapes, mask, attrs, options = WAYS[way]
    shapes = [*shapes, mask] if isinstance(mask, tuple) else shapes
    arrays = {f"x{i}": RNG.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    held = [] if mask is None or isinstance(mask, tuple) else [numpy_helper.from_array(mask, "mask")]
    node = helper.make_node("Attention", [*arrays, *(h.name for h in held)], ["y"], **attrs)
    infos = [
        helper.make_tensor_value_info(n, 1, ["B", *a.shape[1:]] if a.ndim == 4 else a.shape) for n, a in arrays.items()
    ]
    out = [helper.make_tensor_value_info("y", 1, ["B", *shapes[0][1:3], shapes[2][3]])]
    graph = helper.make_graph([node], "g", infos, out, held)
    back = vjp(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), wrt=list(arrays)
    )

    tensors = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays.values()]
    bias = tensors[3] if len(tensors) > 3 else None if mask is None else torch.tensor(mask)
    y = torch.nn.functional.scaled_dot_product_attention(*tensors[:3], attn_mask=bias, **options)
    u = torch.tensor(RNG.standard_normal(y.shape))
    got = run(back, arrays | {"y_cotangent": u.numpy().astype(np.float32)})
    np.testing.assert_allclose(got["y"], y.detach().numpy(), atol=1e-5)
    for n, g in zip(arrays, torch.autograd.grad((u * y).sum(), tensors)):
        np.testing.assert_allclose(got[signature(back).gradients[n]], g.numpy(), atol=2e-5, err_msg=n)
