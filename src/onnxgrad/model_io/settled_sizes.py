"""Sizes that a Reshape leaves open, and that a later operator settles.

Exporters leave the first axis open, also of a model that is for one graph of 1000 nodes. Its ``reshape(1000, 4, -1)``
of [N, 64] has floor(2*N/125) numbers along the last axis then, of which nothing is known: a gradient is summed over
axes that are found at run time, and few operators are joined. The next layer has a matrix of 64 rows for the four
heads, so that only 16 fits, whatever N is. So it is if they meet 16 numbers elsewhere: 1 could be broadcast, but no
whole N makes it 2·N/125. The Reshape says so then. Any other N was an error before, in that operator.
"""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.infer.corrections import BROADCASTING
from onnxgrad.ir.infer.formulas import factors
from onnxgrad.ir.match import Dim, constant, is_op, not_none
from onnxgrad.ir.names import Names

#: A quotient of a multiple, in lowest terms: it is not 1.
_MULTIPLE = re.compile(r"floor\(\d+\*")


def settle_sizes(graph: ir.Graph) -> bool:
    """Write into the Reshapes of the inferred `graph` what fits alone, in place; forget the shapes that follow.

    Returns True if there was any.
    """
    if all(isinstance(d, int) for v in graph.inputs if v.shape is not None for d in v.shape):
        return False  # none is open
    reshapes = [node for node in graph if node.op_type == "Reshape"]
    opened = {node: name for node in reshapes if (name := _open_size(node)) is not None}
    settled = _sizes_that_fit(graph) if opened else {}
    found = {node: settled[name] for node, name in opened.items() if name in settled}
    if not found:
        return False
    names = Names.of_graph(graph)
    for node, number in found.items():
        target = not_none(constant(node.inputs[1]))
        sizes = ir.tensor(np.where(target == -1, number, target), name=names.fresh("settled_size"))
        value = ir.Value(
            name=sizes.name, type=ir.TensorType(sizes.dtype), shape=ir.Shape(target.shape), const_value=sizes
        )
        graph.register_initializer(value)
        node.replace_input_with(1, value)
    texts = {opened[node] for node in found}
    for value in (v for node in graph for v in node.outputs):
        dims = () if value.shape is None else value.shape.dims
        if any(text in str(d.value) for d in dims if not isinstance(d, int) for text in texts):
            value.shape = None
    return True


def _open_size(node: ir.Node) -> str | None:
    """The formula of the size that a Reshape leaves open, if it is a rounded quotient."""
    if not is_op(node, "Reshape") or (shape := node.outputs[0].shape) is None:
        return None
    target = constant(node.inputs[1])
    if target is None or len(target) != len(shape) or list(target).count(-1) != 1:
        return None
    return _quotient(shape[list(target).index(-1)], 1)


def _quotient(size: Dim, number: int | None = None) -> str | None:
    """The rounded quotient of which `size` is a multiple (that of `number`)."""
    found = None if isinstance(size, int) else factors([size])
    if found is None or len(found[1]) != 1 or number not in (None, found[0]):
        return None
    return found[1][0] if found[1][0].startswith("floor(") else None


def _sizes_that_fit(graph: ir.Graph) -> dict[str, int]:
    """The numbers for rounded quotients that alone fit the operators of `graph`."""
    settled: dict[str, int] = {}
    for node in graph:
        pairs = list(zip(*(v.shape.dims[::-1] for v in node.inputs if v is not None and v.shape is not None)))
        broadcast = [pair for pair in pairs if len(pair) == 2] if is_op(node, BROADCASTING) else []
        for pair, is_exact in [(_summed(node), True), *((pair, False) for pair in broadcast)]:
            for size, other in (pair, pair[::-1]):
                name = _quotient(size) if isinstance(other, int) and other > 1 else None
                if name is None or not (is_exact or _MULTIPLE.match(name)):
                    continue
                times, rest = divmod(other, (factors([size]) or (0,))[0])
                if times and not rest:
                    settled.setdefault(name, times)
    return settled


def _summed(node: ir.Node) -> tuple[Dim, Dim]:
    """The sizes of both operands along the axis that a product sums over; 1 for other operators."""
    if not is_op(node, ("MatMul", "Gemm")):
        return 1, 1
    a, b = (() if v is None or v.shape is None else v.shape.dims for v in node.inputs[:2])
    if len(a) < 2 or len(b) < 2:
        return 1, 1
    left, right = (bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB"))
    return a[-2 if left else -1], b[-1 if right else -2]
