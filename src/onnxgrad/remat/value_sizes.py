"""The bytes of each value of a graph, for given sizes of its symbolic dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.copies import copy_model
from onnxgrad.ir.fold import infer_and_fold
from onnxgrad.ir.graph import into_input, named_values
from onnxgrad.ir.infer.formulas import factors
from onnxgrad.ir.match import not_none
from onnxgrad.ir.match import sizes as sizes_of

#: Shapes are computed from small constants only; larger ones are weights, which need not be copied.
_LARGEST_SHAPE = 1024


def sizes(model: ir.Model, dims: Mapping[str, int], others: int | None = None) -> dict[ir.Value, int]:
    """The bytes of every result of nodes in the graph of `model`; 0 for unknown sizes.

    Args:
        model: it is not changed.
        dims: sizes of symbolic dimensions of its inputs; one without a name is called ``x[0]``.
        others: the size of every dimension that is not in `dims`.

    Raises:
        BadInput: nothing says how large a dimension of an input is.
    """
    declared = None if others is None else _declared_sizes(model, dims, others)
    if declared is not None:
        return declared
    light = _fix_sizes(model, dims, others)
    infer_and_fold(light)
    known = named_values(light.graph)
    return {v: _bytes(known.get(v.name or "")) for node in model.graph for v in node.outputs}


def _declared_sizes(model: ir.Model, dims: Mapping[str, int], others: int) -> dict[ir.Value, int] | None:
    """`sizes` by the shapes of values as they are; None if one is not made of dimensions of the inputs."""
    names = {d.value for v in model.graph.inputs for d in v.shape or () if not isinstance(d, int)}
    found: dict[ir.Value, int] = {}
    for value in (v for node in model.graph for v in node.outputs):
        product = None if value.shape is None else factors(value.shape.dims)
        if product is None or not names.issuperset(product[1]) or not isinstance(value.type, ir.TensorType):
            return None
        count = product[0] * math.prod(dims.get(name, others) for name in product[1])
        found[value] = 0 if value.dtype == ir.DataType.STRING else count * value.type.dtype.bitwidth // 8
    return found


def _fix_sizes(model: ir.Model, dims: Mapping[str, int], others: int | None) -> ir.Model:
    """The model with fixed input sizes, without large weights and without declarations of other values."""
    light = copy_model(model)
    graph = light.graph
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None and value.const_value.size > _LARGEST_SHAPE:
            into_input(graph, name)
    for v in graph.inputs:
        sizes: list[int] = []
        for axis, d in enumerate(v.shape or ()):
            if isinstance(d, int):
                sizes.append(d)
                continue
            name = d.value or f"{v.name}[{axis}]"
            if name not in dims and others is None:
                raise BadInput(
                    f"the memory of a run depends on the dimension {name!r} of {v.name!r}\n"
                    f"  hint: say how large it is, as in dims={{{name!r}: 64}}"
                )
            sizes.append(dims.get(name, others or 0))
        if v.shape is not None:
            v.shape = ir.Shape(sizes)
    for v in (v for g in light.graphs() for node in g for v in node.outputs):
        if not (v.is_graph_output() and sizes_of(v)):
            v.shape = None
    return light


def _bytes(value: ir.Value | None) -> int:
    """The bytes of a tensor of known shape; 0 for another value."""
    shape = sizes_of(value)
    if value is None or shape is None or value.dtype in (None, ir.DataType.UNDEFINED, ir.DataType.STRING):
        return 0
    if not isinstance(value.type, ir.TensorType):
        return 0
    return math.prod(shape) * not_none(value.dtype).bitwidth // 8
