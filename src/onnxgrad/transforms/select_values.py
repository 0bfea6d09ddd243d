"""The values that `wrt` and `of` name: float tensors, and parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.index_expressions import with_parts

Names = str | Sequence[str]


def float_values(
    names: Names, values: Mapping[str, ir.Value], role: str, containers: bool = False
) -> dict[str, ir.Value]:
    """The values of `names` (each once), which must be float tensors; with `containers`, also of floats."""
    if not isinstance(names, Iterable):
        raise BadInput(f"`{role}` takes names of values, not {names!r}")
    listed = [names] if isinstance(names, str) else list(names)
    if not listed:
        raise BadInput(f"`{role}` names no value")
    selected = {}
    for name in listed:
        if not isinstance(name, str):
            raise BadInput(f"`{role}` takes names of values, not {name!r}")
        if name not in values:
            raise UnknownName(name, values, "value")
        value = selected[name] = values[name]
        if value.type is None:
            raise BadInput(f"the type of `{role}` {name!r} is not known\n  hint: declare it in the model's value_info")
        if not is_float(value, containers):
            raise BadInput(f"`{role}` {name!r} is a {_describe_value(value.type)}; only float tensors have derivatives")
    return selected


def of_values(
    of: Names, values: Mapping[str, ir.Value], builder: Builder, containers: bool = False
) -> dict[str, ir.Value]:
    """The float values named `of`, or parts of them such as ``y[:, 3]`` (numpy's basic indexing).

    A value whose name has brackets takes precedence over a part.
    """
    named = [of] if isinstance(of, str) or not isinstance(of, Iterable) else of
    return float_values(of, with_parts(builder, named, values), "of", containers)


def default_of(graph: ir.Graph, containers: bool = False) -> dict[str, ir.Value]:
    """All float outputs; with `containers`, also sequences and optionals of floats."""
    outputs = {v.name or "": v for v in graph.outputs if is_float(v, containers)}
    if not outputs:
        raise BadInput("the model has no float output to differentiate; name a value with `of`")
    return outputs


def is_float(value: ir.Value, containers: bool = False) -> bool:
    """True if `value` is a float tensor, or with `containers` a sequence or optional of them."""
    kind = value.type
    while containers and not isinstance(kind, ir.TensorType) and isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        kind = kind.elem_type
    return isinstance(kind, ir.TensorType) and kind.dtype in FLOATS


def _describe_value(held: ir.TypeProtocol) -> str:
    if isinstance(held, ir.TensorType):
        return f"tensor of {held.dtype.name.lower()}"
    return type(held).__name__.removesuffix("Type").lower()
