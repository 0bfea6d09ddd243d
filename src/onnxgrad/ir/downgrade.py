"""Lower a model to an opset that runtimes load, where all of its nodes mean the same there.

An operator of a newer opset can often be expanded into older ones; and a new version of an operator often only allows
more types.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onnxgrad.ir.match import FLOATS, is_standard
from onnxgrad.ir.schemas import schema_of

#: The newest opset that stock ONNX Runtime loads, and IR version.
NEWEST_LOADED, NEWEST_IR_LOADED = 26, 13


def settle_opset(model: ir.Model, newest: int = NEWEST_LOADED) -> ir.Node | None:
    """Have `model`, whose types are inferred, ask for no newer opset than `newest`, if it can; in place.

    The first node whose meaning differs there, if there is one; then the model is unchanged.
    """
    parts: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for held in parts:
        opset = held.opset_imports.get("", 0)
        for node in _nodes(held) if opset > newest else ():
            if not _is_same(node, opset, newest):
                return node
    for held in parts:
        if held.opset_imports.get("", 0) > newest:
            for node in _nodes(held):
                _forget_new(node, held.opset_imports[""], newest)
            held.opset_imports[""] = newest
    model.ir_version = min(model.ir_version or NEWEST_IR_LOADED, NEWEST_IR_LOADED)
    return None


def is_too_new(model: ir.Model) -> bool:
    """True if the opset or IR version of `model` is newer than those that runtimes load."""
    opsets = [model.graph.opset_imports.get("", 0), *(f.opset_imports.get("", 0) for f in model.functions.values())]
    return max(opsets) > NEWEST_LOADED or (model.ir_version or 0) > NEWEST_IR_LOADED


def _nodes(held: ir.Graph | ir.Function) -> Iterable[ir.Node]:
    return (n for n in held.all_nodes() if is_standard(n))


def _is_same(node: ir.Node, opset: int, newest: int) -> bool:
    """True if `node`, written for `opset`, means the same in `newest`."""
    new, old = schema_of("", node.op_type, opset), schema_of("", node.op_type, newest)
    if new is None or old is None:
        return False
    if new.since_version == old.since_version:
        return True
    if node.op_type == "Mod" and _is_float_remainder(node):
        return False
    if len(node.inputs) > old.max_input or not all(_is_known(a, old, new) for a in node.attributes.values()):
        return False
    for name, spec in old.attributes.items():  # every missing attribute has the same default
        if name not in node.attributes and (
            name not in new.attributes or new.attributes[name].default_value != spec.default_value
        ):
            return False
    operands = zip(node.inputs, [*old.inputs, *[old.inputs[-1]] * len(node.inputs)] if old.inputs else [])
    results = zip(node.outputs, [*old.outputs, *[old.outputs[-1]] * len(node.outputs)])
    return all(_is_allowed(v, p) for v, p in (*operands, *results) if v is not None)


def _forget_new(node: ir.Node, opset: int, newest: int) -> None:
    """Drop attributes of `node` that `newest` does not have, if they have their default there."""
    new, old = schema_of("", node.op_type, opset), schema_of("", node.op_type, newest)
    if new is not None and old is not None and new.since_version != old.since_version:
        for name in node.attributes.keys() - old.attributes.keys():
            del node.attributes[name]


def _is_known(a: ir.Attr, old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> bool:
    """True if `old` has attribute `a` too, or `a` has the default value of `new`."""
    if a.name in old.attributes:
        return True
    spec = new.attributes[a.name].default_value if a.name in new.attributes else None
    return spec is not None and bool(spec.name) and not a.is_ref() and ir.to_proto(a) == spec


def _is_allowed(value: ir.Value, parameter: onnx.defs.OpSchema.FormalParameter) -> bool:
    """True if the older schema allows the type of `value`; False for an unknown type."""
    if value.type is None:
        return not value.name
    return _spell_type(value.type) in parameter.types


def _spell_type(held: ir.TypeProtocol) -> str:
    """A type as schemas write it."""
    if isinstance(held, ir.SequenceType):
        return f"seq({_spell_type(held.elem_type)})"
    if isinstance(held, ir.OptionalType):
        return f"optional({_spell_type(held.elem_type)})"
    return f"tensor({onnx.helper.tensor_dtype_to_string(int(held.dtype)).partition('.')[2].lower()})"


def _is_float_remainder(node: ir.Node) -> bool:
    """True if `node` is a Mod of floats like Python's ``%``, which only opset 28 has."""
    x = node.inputs[0]
    return (x is None or x.dtype is None or x.dtype in FLOATS) and not node.attributes.get_int("fmod", 0)
