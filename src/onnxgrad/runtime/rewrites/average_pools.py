"""Means over windows in blocks of channels.

ONNX Runtime's AveragePool visits the elements of each window one by one; in the blocked layout, all channels of a block
at once. That takes .03 of the time for windows of 3×3 side by side, .15 for tiles of 2×2, reordering included (6 % of
the step of a PoolFormer), and .1 for the trend of a series, whose one axis is the second of two. MaxPool has a fast
kernel in either layout. Channels are filled up to whole blocks.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_op, not_none
from onnxgrad.runtime.rewrites.blocked_layout import DOMAIN, block_size, emit_blocked, run
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results

#: The kernel that reorders channels moves as many at a time.
_CHANNELS = 4


def _match(node: ir.Node) -> ir.Node | None:
    """`node` if it is an AveragePool of float32 over one axis or two, with a known number of channels."""
    if not is_op(node, "AveragePool") or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT or x.shape is None or len(x.shape) not in (3, 4):
        return None
    channels = x.shape[1]
    if not isinstance(channels, int) or not channels or channels % _CHANNELS:
        return None
    is_plain = not node.attributes.get_int("ceil_mode", 0) and max(node.attributes.get_ints("dilations", [1])) == 1
    return node if is_plain and _works() else None


def _write(b: Builder, node: ir.Node) -> Var:
    x = b.var(not_none(node.inputs[0]))
    b.graph.opset_imports[DOMAIN] = 1
    axes, channels = x.rank - 2, x.dims[1]
    missing = 2 - axes
    pads = node.attributes.get_ints("pads", [0] * 2 * axes)
    attributes = {
        "kernel_shape": [1] * missing + list(not_none(node.attributes.get_ints("kernel_shape"))),
        "strides": [1] * missing + list(node.attributes.get_ints("strides", [1] * axes)),
        "pads": [v for half in (pads[:axes], pads[axes:]) for v in (*[0] * missing, *half)],
        "count_include_pad": node.attributes.get_int("count_include_pad", 0),
    }
    blocks = emit_blocked(b, "ReorderInput", (b.Unsqueeze(x, [2]) if missing else x).value)
    y = emit_blocked(b, "ReorderOutput", emit_blocked(b, "AveragePool", blocks, **attributes), channels=channels)
    return b.Squeeze(y, [2]) if missing else y


@functools.cache
def _works() -> bool:
    """True if the pools in blocks return the means of the plain ones."""
    if not block_size():
        return False
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None, 12, 7, 6]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18, DOMAIN: 1}, name="trial")
    b = Builder(graph, noting=False)
    for include in (0, 1):
        plain = b.AveragePool(x, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 2, 1], count_include_pad=include)
        graph.outputs.extend([plain.value, _write(b, not_none(plain.value.producer())).value])
    image = np.random.default_rng(0).standard_normal((2, 12, 7, 6)).astype(np.float32)
    try:
        found = run(ir.Model(graph, ir_version=9), {"x": image})
        return all(np.allclose(a, c, rtol=1e-5, atol=1e-5) for a, c in zip(found[::2], found[1::2], strict=True))
    except Exception:  # of any kind: blocks are not used
        return False


AVERAGE_POOLS = rewrite_results(
    "average_pools",
    "means over windows in blocks of channels",
    "AveragePool of float32 over one axis or two, a multiple of 4 channels",
    NodeRule(_match, _write),
)
