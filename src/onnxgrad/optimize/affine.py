"""A·g + B·x + C for each channel (the way back through batch normalization), in two passes over memory.

Written as two products and two sums it takes four. A convolution of one tap and one channel per group is B·x + C in
one pass, and ONNX Runtime's convolution that adds a tensor to its result (FusedConv of domain ``com.microsoft``, which
its own optimizer writes where weights are constant) is the rest: three quarters of the time. Each plane is a call,
so small planes are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.optimize.rewrite import Rewrite, Writer, is_op, made, put, sizes

DOMAIN = "com.microsoft"

#: Elements of a plane, below which its calls take longer than four passes.
SMALLEST = 256


@dataclass(frozen=True)
class _Affine:
    """A·g + B·x + C, all A, B and C of shape [channels, 1, 1]."""

    g: ir.Value
    a: ir.Value
    x: ir.Value
    b: ir.Value
    c: ir.Value
    channels: int

    @classmethod
    def ending_in(cls, node: ir.Node) -> _Affine | None:
        """What `node` is the last Add of; None if it is that of something else."""
        if not is_op(node, "Add"):
            return None
        for i in (0, 1):
            c, total = node.inputs[1 - i], made(node.inputs[i], "Add")
            channels = _channels(c)
            if c is None or channels is None or total is None or not _alone(total):
                continue
            products = [made(v, "Mul") for v in total.inputs]
            terms = [_term(p, channels) for p in products if p is not None and _alone(p)]
            known = [term for term in terms if term is not None]
            if len(known) == 2:
                (g, a), (x, b) = known
                return cls(g, a, x, b, c, channels)
        return None


def _alone(node: ir.Node) -> bool:
    return len(list(node.outputs[0].uses())) == 1 and not node.outputs[0].is_graph_output()


def _channels(value: ir.Value | None) -> int | None:
    """How many channels a value [channels, 1, 1] has."""
    dims = sizes(value)
    return dims[0] if dims is not None and len(dims) == 3 and dims[1:] == (1, 1) else None


def _term(node: ir.Node, channels: int) -> tuple[ir.Value, ir.Value] | None:
    """An operand [N, channels, …] of float32 and what each of its channels is multiplied by."""
    for i in (0, 1):
        x, factor = node.inputs[i], node.inputs[1 - i]
        if x is None or factor is None or x.dtype != ir.DataType.FLOAT or x.shape is None or len(x.shape) != 4:
            continue
        height, width = x.shape[2], x.shape[3]
        if not isinstance(height, int) or not isinstance(width, int) or height * width < SMALLEST:
            continue
        if x.shape[1] == channels and _channels(factor) == channels:
            return x, factor
    return None


def _write(graph: ir.Graph) -> None:
    writer = Writer(graph, "affine")
    for node in list(graph):
        found = _Affine.ending_in(node)
        if found is not None:
            graph.opset_imports[DOMAIN] = 1
            writer.at = node
            n = found.channels
            a, b, c = writer.view(found.a, n, 1, 1, 1), writer.view(found.b, n, 1, 1, 1), writer.view(found.c, n)
            part = writer.emit("Conv", found.x, b, c, kernel_shape=[1, 1], group=n)
            y = writer.emit("FusedConv", found.g, a, None, part, domain=DOMAIN, kernel_shape=[1, 1], group=n)
            put(y, node.outputs[0])


AFFINE = Rewrite(
    "affine",
    "the way back through batch normalization in two passes",
    "float32, planes of at least 256 elements",
    lambda graph: any(_Affine.ending_in(node) is not None for node in graph),
    _write,
)
