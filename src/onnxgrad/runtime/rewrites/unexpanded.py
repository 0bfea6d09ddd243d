"""Remove an Expand before an elementwise operator that broadcasts anyway.

The cotangent of a mean is expanded to the shape of its operand (a rule does not know its readers), and mostly it is
then added to another cotangent, or multiplied by a mask, of that shape, or by weights that are broadcast along other
axes. Those operators broadcast on all threads, whereas Expand is a separate pass over memory on one. A scalar between
them, as in the cotangent of a square, is combined with the operand before it is expanded.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.builder import Builder
from onnxgrad.ir.match import is_op, only_reader, producer, rank
from onnxgrad.ir.shapes import same_dim, same_dims
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite

_BROADCASTING = frozenset({"Add", "Div", "Max", "Min", "Mul", "Sub"})


def _spread(node: ir.Node) -> tuple[int, ir.Value] | None:
    """An operand of `node` that need not be expanded: its index and source. Both operands give the shape without it."""
    if not is_op(node, _BROADCASTING) or len(node.inputs) != 2:
        return None
    for i, (x, other) in enumerate(zip(node.inputs, reversed(node.inputs))):
        expand = producer(x, "Expand")
        source = None if expand is None else expand.inputs[0]
        if source is None or x is None or other is None or x is other or x.shape is None or other.shape is None:
            continue
        if same_dims(x.shape.dims, other.shape.dims) or _give(node.outputs[0].shape, source.shape, other.shape):
            return i, source
    return None


def _give(result: ir.Shape | None, one: ir.Shape | None, other: ir.Shape) -> bool:
    """True if each size of `result` is provably that of a shape that is broadcast to it."""
    if result is None or one is None:
        return False
    return all(
        any(place <= len(shape) and same_dim(shape[-place], result[-place]) for shape in (one, other))
        for place in range(1, len(result) + 1)
    )


def _scaled(node: ir.Node) -> tuple[int, ir.Node] | None:
    """The operand of `node` that is expanded for it alone, if the other one is a scalar: its index, and the Expand."""
    if not is_op(node, _BROADCASTING) or len(node.inputs) != 2:
        return None
    for i, (x, other) in enumerate(zip(node.inputs, reversed(node.inputs))):
        expand = None if x is None or only_reader(x, _BROADCASTING) is not node else producer(x, "Expand")
        if expand is not None and rank(other) == 0:
            return i, expand
    return None


def _write(b: Builder) -> int:
    places = 0
    for node in list(b.graph):
        if (scaled := _scaled(node)) is not None:
            (i, expand), b.before = scaled, node
            operands = [*node.inputs]
            operands[i] = expand.inputs[0]
            replace_value(b.Expand(b.emit(node.op_type, *operands), expand.inputs[1]), node.outputs[0])
            places += 1
        elif (spread := _spread(node)) is not None:
            node.replace_input_with(*spread)
            places += 1
    return places


UNEXPANDED = rewrite(
    "unexpanded",
    "an operand is broadcast, not expanded",
    "elementwise operators with an Expand, whose operands have the shape without it",
    lambda graph: any(_spread(node) is not None or _scaled(node) is not None for node in graph),
    _write,
)
