"""What inference may make of a few bytes: shapes of a bounded rank and size, and few elements of few tensors.

``onnx-shape-inference`` notes the elements of whole-number vectors, as shapes are computed from such. Without a bound,
a vector that is doubled thirty times, or the declared length of one, takes all memory, for a symbol per element.
The library has no setting for it, so its methods are bounded here, once, for the whole process.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import BadInput
from onnxgrad.ir.constants import MOST_ELEMENTS
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.names import described

#: Axes of a tensor: as many as numpy has.
MOST_AXES = 64
#: Characters of the formula of a size; a longer one is a size that is not known.
MOST_TEXT = 1000

_CARRIED = "onnxgrad"


def check_shape(value: ir.Value, shape: ir.Shape) -> None:
    """Refuse a shape that no tensor can have.

    Raises:
        BadInput: it has too many axes, or more elements than can be counted in 64 bits.
    """
    if len(shape) > MOST_AXES:
        raise BadInput(f"{_where(value)} has {len(shape)} axes; {MOST_AXES} are the most")
    if math.prod(d for d in shape if isinstance(d, int) and d) >= 2**63:
        held = list(map(str, shape))
        raise BadInput(f"{_where(value)} would have {held} elements, more than can be counted in 64 bits")


def _where(value: ir.Value) -> str:
    node = value.producer()
    return f"the value {value.name!r}" + (f" of {described(node)}" if node is not None else "")


def check_shapes(graph: ir.Graph) -> None:
    """`check_shape` of every value in `graph` and the graphs in it."""
    good: set[int] = set()  # values share shapes
    for g in scopes(graph):
        for value in (*g.inputs, *(v for node in g for v in node.outputs)):
            if value.shape is not None and id(value.shape) not in good:
                check_shape(value, value.shape)
                good.add(id(value.shape))


def check_asked(node: ir.Node) -> None:
    """Refuse a `node` that makes a shape of the elements of its last operand, of which there are too many.

    Raises:
        BadInput: there are more than a tensor has axes.
    """
    target = node.inputs[-1] if node.inputs else None
    length = target.shape[0] if target is not None and target.shape is not None and len(target.shape) == 1 else None
    if isinstance(length, int) and length > MOST_AXES:
        raise BadInput(f"{described(node)} makes a tensor of {length} axes; {MOST_AXES} are the most")


def concat(infer: Any) -> Any:
    """`infer` of a Concat, which makes a symbol for each element that is not known: none of long vectors."""

    def bounded(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        first = node.inputs[0] if node.inputs else None
        vectors = first is not None and first.shape is not None and len(first.shape) == 1
        lengths = [v.shape[0] for v in node.inputs if v is not None and v.shape is not None and len(v.shape) == 1]
        if not vectors or len(lengths) < len(node.inputs) or "axis" not in node.attributes:
            return infer(ctx, node)
        whole = first is not None and first.dtype is not None and not first.dtype.is_floating_point()
        sizes = [d for d in lengths if isinstance(d, int)]
        if whole and len(sizes) == len(lengths) and sum(sizes) <= MOST_ELEMENTS:
            return infer(ctx, node)
        total: int | ir.SymbolicDim = 0
        for length in lengths:
            total = total + length
        if node.attributes.get_int("axis", 0) not in (0, -1):
            return infer(ctx, node)  # which says what is wrong
        assert first is not None
        ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([total]), first.dtype)
        return None

    bounded.onnxgrad = True  # type: ignore[attr-defined]
    return bounded


def register() -> None:
    """Bound what the library notes."""
    context: Any = osi.ShapeInferenceContext
    if hasattr(context, _CARRIED):
        return
    set_shape, get_value, set_value = context.set_shape, context.get_symbolic_value, context.set_symbolic_value

    def bounded_shape(self: Any, value: ir.Value, shape: ir.Shape) -> bool:
        check_shape(value, shape)
        if any(not isinstance(d, int) and len(d.value or "") > MOST_TEXT for d in shape):
            shape = ir.Shape([d if len(str(d)) <= MOST_TEXT else self.new_symbolic_dim() for d in shape])
        return set_shape(self, value, shape)

    def bounded_get(self: Any, value: ir.Value) -> Any:
        held = value.const_value
        return None if held is not None and held.size > MOST_ELEMENTS else get_value(self, value)

    def bounded_set(self: Any, value: ir.Value, data: list[int | ir.SymbolicDim]) -> None:
        if len(data) <= MOST_ELEMENTS and all(
            -(2**63) <= d < 2**63 if isinstance(d, int) else d.value is not None and len(d.value) <= MOST_TEXT
            for d in data
        ):
            set_value(self, value, data)

    context.set_shape, context.get_symbolic_value, context.set_symbolic_value = bounded_shape, bounded_get, bounded_set
    setattr(context, _CARRIED, True)
    for since in osi.registry.version_boundaries("", "Concat"):
        infer = osi.registry.get("", "Concat", since)
        if not hasattr(infer, "onnxgrad"):
            osi.registry.register("", "Concat", since)(concat(infer))
