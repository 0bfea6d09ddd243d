"""Sizes of axes that do not depend on the batch, found by inference with two batches of numbers.

Exporters write ``view(batch, length, -1, size)``; symbolic inference then knows the number of heads at best by name.
With numbers in place of the names of the inputs' dimensions, every size is a number. A size that is the same for both
sets of numbers belongs to the model; another one gets a name made of the two.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.errors import OnnxGradError
from onnxgrad.ir.fold import infer_and_fold
from onnxgrad.model_io.local_functions import Functions

#: Numbers for the first axis of inputs, for axes of pictures, and for others.
_NUMBERS = {"rows": (2, 3), "pictures": (64, 96), "others": (8, 16)}

#: Where an output of the model has its shape in numbers.
SIZES = "settled_sizes"


def settle_sizes(model: ir.Model) -> None:
    """Set the shape of every value that a node of `model` computes, in place, to what two inferences agree on."""
    open_dims = [
        (value, axis)
        for value in model.graph.inputs
        for axis, dim in enumerate(value.shape or ())
        if not isinstance(dim, int)
    ]
    if not open_dims:
        return
    try:
        first, second = (_inferred(model, which) for which in (0, 1))
    except OnnxGradError:  # sizes that the model does not take: what is known by name stays
        return
    for node in model.graph:
        for value in node.outputs:
            one, two = first.get(value.name or ""), second.get(value.name or "")
            if one is None or two is None or len(one) != len(two):
                continue
            found = ir.Shape([_dim(a, b) for a, b in zip(one, two)])
            if value.is_graph_output():  # whose names of dimensions stay
                value.meta[SIZES] = found
            else:
                value.shape = found


def numbers_of(dim: int | ir.SymbolicDim) -> tuple[int, int] | None:
    """The numbers that a size stands for; None if it is unknown."""
    if isinstance(dim, int):
        return dim, dim
    text = (dim.value or "").removeprefix("size_").split("_or_")
    return (int(text[0]), int(text[1])) if len(text) == 2 and all(t.isdigit() for t in text) else None


def in_a_row(dim: int | ir.SymbolicDim) -> int | None:
    """The size of an axis; of one that joins the rows with another axis, the size of that; None if it is unknown."""
    numbers = numbers_of(dim)
    if numbers is None or isinstance(dim, int):
        return dim if isinstance(dim, int) else None
    (one, rest), (other, left) = (divmod(n, rows) for n, rows in zip(numbers, _NUMBERS["rows"]))
    return one if one == other > 1 and not (rest or left) else None


def _dim(one: int | ir.SymbolicDim, two: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    known = [int(d.value) if isinstance(d, ir.SymbolicDim) and (d.value or "").isdigit() else d for d in (one, two)]  # type: ignore[arg-type]
    left, right = known
    if isinstance(left, int) and isinstance(right, int):
        return left if left == right else ir.SymbolicDim(f"size_{left}_or_{right}")
    return ir.SymbolicDim(None)


def _inferred(model: ir.Model, which: int) -> dict[str, ir.Shape]:
    """The inferred shapes by value name, for input sizes of the set `which`."""
    copy = model.clone()
    taken: dict[str, int] = {}
    for value in copy.graph.inputs:
        if value.shape is None:
            continue
        dims = []
        for axis, dim in enumerate(value.shape):
            kind = "rows" if axis == 0 else "pictures" if len(value.shape) == 4 else "others"
            name = "" if isinstance(dim, int) else dim.value or ""
            number = _NUMBERS[kind][which]
            dims.append(dim if isinstance(dim, int) else taken.setdefault(name, number) if name else number)
        value.shape = ir.Shape(dims)
    for node in copy.graph:
        for value in node.outputs:
            value.shape = None
    unknown = -1
    while (before := unknown) != 0:  # a size that is computed by way of shapes makes others known
        infer_and_fold(copy, Functions(copy) if copy.functions else None)
        shapes = {v.name or "": v.shape for v in _values(copy.graph) if v.shape is not None}
        unknown = sum(not isinstance(d, int) for shape in shapes.values() for d in shape)
        if unknown == before:
            break
    return shapes


def _values(graph: ir.Graph) -> list[ir.Value]:
    """The values that nodes of `graph` compute, and those that were folded."""
    return [*(v for n in graph for v in n.outputs), *graph.initializers.values()]
