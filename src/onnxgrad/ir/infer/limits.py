"""Limits of inference on small inputs: ranks and sizes of shapes, and elements of vectors (`context`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import BadInput
from onnxgrad.ir.constants import MOST_ELEMENTS
from onnxgrad.ir.graph import values_in
from onnxgrad.ir.infer.formulas import sum_of
from onnxgrad.ir.match import Dim, not_none
from onnxgrad.ir.names import described

#: Axes of a tensor: as many as numpy has.
MOST_AXES = 64
#: Characters of the formula of a size; a longer one is a size that is not known.
MOST_TEXT = 1000


def check_shape(value: ir.Value, shape: ir.Shape) -> None:
    """Refuse a shape that no tensor can have.

    Raises:
        BadInput: it has too many axes, or more elements than can be counted in 64 bits.
    """
    if len(shape.dims) > MOST_AXES:
        raise BadInput(f"{_where(value)} has {len(shape)} axes; {MOST_AXES} are the most")
    if math.prod([d for d in shape.dims if isinstance(d, int) and d]) >= 2**63:
        dims = list(map(str, shape))
        raise BadInput(f"{_where(value)} would have {dims} elements, more than can be counted in 64 bits")


def is_possible(dims: Sequence[Dim]) -> bool:
    """True if a tensor can have these sizes (see `check_shape`), and every symbol among them has a name."""
    elements = 1
    for d in dims:
        if isinstance(d, int):
            if d < 0:
                return False
            elements *= d or 1
        elif d.value is None or len(d.value) > MOST_TEXT:
            return False
    return len(dims) <= MOST_AXES and elements < 2**63


def _where(value: ir.Value) -> str:
    node = value.producer()
    return f"the value {value.name!r}" + (f" of {described(node)}" if node is not None else "")


def distinct_shapes(values: Iterable[ir.Value]) -> list[ir.Shape]:
    """The shapes of `values`, of which many share one."""
    return list({id(shape): shape for v in values if (shape := v.shape) is not None}.values())


def symbols_in(shapes: Iterable[ir.Shape]) -> list[str]:
    """The names of dimensions in `shapes`, sorted."""
    return sorted({d.value for shape in shapes for d in shape.dims if not isinstance(d, int) and d.value})


def check_shapes(graph: ir.Graph) -> list[ir.Shape]:
    """Check the shapes of all values in `graph` and the graphs in it (see `check_shape`), and return them."""
    shapes = {id(shape): (v, shape) for v in values_in(graph) if (shape := v.shape) is not None}
    for value, shape in shapes.values():
        check_shape(value, shape)
    return [shape for _, shape in shapes.values()]


def check_asked(node: ir.Node) -> None:
    """Refuse a `node` that reads a shape with too many dimensions from its last operand.

    Raises:
        BadInput: there are more than a tensor has axes.
    """
    target = node.inputs[-1] if node.inputs else None
    length = target.shape[0] if target is not None and target.shape is not None and len(target.shape) == 1 else None
    if isinstance(length, int) and length > MOST_AXES:
        raise BadInput(f"{described(node)} makes a tensor of {length} axes; {MOST_AXES} are the most")


def bound_concat(infer: Any) -> Any:
    """Wrap `infer` of a Concat so that it creates no symbol per element of long vectors."""

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
        total = sum_of(lengths)
        if total is None:
            total = sum(lengths[1:], lengths[0])
        if node.attributes.get_int("axis", 0) not in (0, -1):
            return infer(ctx, node)  # whose error names the cause
        ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([total]), not_none(first).dtype)
        return None

    return bounded
