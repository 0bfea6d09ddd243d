"""Upgrade every node of a model to an opset that the rules are written for (18), where that is exact.

Node by node, so that weights, metadata, docs and symbols of the rest are never touched and an error
can name its node: an operator whose definition did not change stays as it is, one whose form changed
goes alone through ``onnx.version_converter``. Where that converter is wrong (it forgets that the old
Resize was asymmetric, clips float64 with a float32 bound, keeps the axis of a Hardmax although it
changed its meaning, …) a correction of its own replaces it (see `upgrade_forms`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.graph import scopes, subgraphs
from onnxgrad.ir.infer.inference import WithoutTypes, infer_model, is_unversioned
from onnxgrad.ir.names import Names, described
from onnxgrad.ir.schemas import schema_of
from onnxgrad.model_io.symbolic_dims import keep_dims, named_dims
from onnxgrad.model_io.upgrade_forms import FIXES, CannotRaiseError, UpgradedNode

LOWEST_READ, LOWEST_RULES = 7, 18

#: Operators whose newer versions only allow more types.
_SAME_FORM = frozenset({"If", "Loop", "Constant"})


def _since(op_type: str, opset: int) -> int | None:
    schema = schema_of("", op_type, opset)
    return None if schema is None else schema.since_version


def changes(op_type: str, source: int, target: int) -> bool:
    """True unless a standard operator has one definition in both opsets."""
    since = _since(op_type, source)
    return since is None or since != _since(op_type, target)


def raised_functions(model: ir.Model, wanted: Collection[ir.OperatorIdentifier]) -> set[ir.OperatorIdentifier]:
    """Raise those of the `wanted` functions that mean the same at the opset of `raise_opset`; return them.

    The others must be inlined: the replacement of a node may depend on types and attributes, which differ from call to
    call.
    """
    opset = model.graph.opset_imports.get("", LOWEST_RULES)
    target = max(LOWEST_RULES, opset)
    if not wanted or any(f.opset_imports.get("", 0) > target for f in model.functions.values()):
        return set()
    same = set()
    for name in wanted:
        function = model.functions[name]
        source = function.opset_imports.get("", opset)
        inner = [n for n in function.all_nodes() if n.domain == ""]
        if source >= LOWEST_READ and not any(
            n.op_type not in _SAME_FORM and changes(n.op_type, source, target) for n in inner
        ):
            function.opset_imports[""] = target
            same.add(name)
    return same


def raise_opset(model: ir.Model) -> None:
    """Bring `model` to opset 18 or the newest that any of its nodes has, in place.

    A node whose ``version`` is set was written for that opset (an inlined function's), the others for
    the model's. Raises BadInput, naming the node, where one cannot be raised; the model is then spoiled.
    """
    imports = model.graph.opset_imports
    nodes = [n for g in scopes(model.graph) for n in g if n.domain == ""]
    opset = imports.get("", LOWEST_RULES)
    known = onnx.defs.onnx_opset_version()
    if opset > known:
        raise BadInput(
            f"the model has opset {opset}; the installed onnx package knows up to {known}\n  hint: pip install -U onnx"
        )
    if opset < LOWEST_READ:
        raise BadInput(
            f"the model has opset {opset}; models from opset {LOWEST_READ} on can be read\n"
            f"  hint: export it again with opset {LOWEST_RULES} or newer"
        )
    target = max(LOWEST_RULES, opset, *(n.version or 0 for n in nodes), 0)
    stale = [n for n in nodes if (n.version or opset) < target and changes(n.op_type, n.version or opset, target)]
    if stale:
        _infer(model)
    names = Names.of(model) if stale else Names()
    same: set[object] = set()  # nodes that the converter is known to leave unchanged
    for node in stale:
        source = node.version or opset
        try:
            key = source, _form(node)
            if key not in same and _raise_node(node, source, target, names):
                same.add(key)
        except CannotRaiseError as e:
            raise BadInput(
                f"cannot raise {described(node)} from opset {source} "
                f"to {target}: {e}\n  hint: export the model again with opset {LOWEST_RULES} or newer"
            ) from e
    for node in nodes:
        if node.version is not None:
            node.version = None
    _fill_defaults([n for g in scopes(model.graph) for n in g if n.domain == ""] if stale else nodes, target)
    imports[""] = target
    model.ir_version = max(model.ir_version or 0, 8)


def _infer(model: ir.Model) -> None:
    """Types and ranks, in place; sizes that inference makes up are unknown again."""
    names = named_dims(model)
    infer_model(model)
    keep_dims(model, names)


def _fill_defaults(nodes: Sequence[ir.Node], opset: int) -> None:
    """Write out the default attributes of those standard `nodes` that are defined by a function body.

    The onnx package forgets them when it expands the body, and then refuses the model in a full check.
    """
    for node in nodes:
        for name, default in _forgotten(node.op_type, opset):
            if name not in node.attributes:
                node.attributes[name] = ir.serde.deserialize_attribute(default)


@functools.cache
def _forgotten(op_type: str, opset: int) -> list[tuple[str, onnx.AttributeProto]]:
    """The attributes that have a default, of an operator that is defined by a function body."""
    schema = schema_of("", op_type, opset)
    if schema is None or not schema.has_function:  # type: ignore[attr-defined]
        return []
    return [(name, spec.default_value) for name, spec in schema.attributes.items() if spec.default_value.name]


def _form(node: ir.Node) -> object:
    """A key of everything in `node` that decides its conversion."""
    attrs = tuple(sorted((a.name, repr(a.value)) for a in node.attributes.values()))
    types = tuple(v and (v.dtype, None if v.shape is None else len(v.shape)) for v in node.inputs)
    return node.op_type, attrs, types, tuple(bool(v.name) for v in node.outputs)


def _raise_node(node: ir.Node, source: int, target: int, names: Names) -> bool:
    """Replace `node` by its form at opset `target`. Returns True if it means the same there."""
    if _since(node.op_type, source) is None:
        if is_unversioned(node.op_type):
            return True
        raise CannotRaiseError("the specification has no such operator")
    if node.op_type in _SAME_FORM or (node.op_type == "Scan" and source >= 9):
        return True
    if subgraphs(node) and node.op_type not in FIXES:
        raise CannotRaiseError("its form has changed")
    assert isinstance(node.graph, ir.Graph)
    builder = Builder(node.graph, names, WithoutTypes({"": target}), before=node, prefix="raised")
    site = UpgradedNode(node, source, builder)
    until, fix = FIXES.get(node.op_type, (0, None))
    with builder.record() as written:
        values = fix(site) if fix is not None and source < until else None
        values = _convert(site, target) if values is None else values
    if values:
        site.replace_by(values, written)
    return not values


# --- by the onnx package ---------------------------------------------------------------------------


def _convert(site: UpgradedNode, target: int) -> list[Var | None]:
    """Write the form that the onnx package's converter gives a node alone; no outputs if it stays as it is."""
    node = site.node
    values = {v.name: v for v in node.inputs if v is not None}
    inputs, constants = [], []
    for name, value in values.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes <= 1024 and not isinstance(tensor, ir.ExternalTensor):
            constants.append(onnx.numpy_helper.from_array(tensor.numpy(), name))
        else:
            inputs.append(ir.to_proto(value))
    outputs = [ir.to_proto(v) for v in node.outputs if v.name]
    graph = onnx.helper.make_graph([ir.to_proto(node)], "node", inputs, outputs, constants)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", site.source)], ir_version=8)
    try:
        converted = onnx.version_converter.convert_version(proto, target)
    except Exception as e:
        reason = str(e).splitlines()[0].rsplit("failed: ", 1)[-1]
        raise CannotRaiseError(f"the onnx version converter says: {reason}") from e
    after = converted.graph.node
    if len(after) == 1 and after[0].SerializeToString() == _normal(graph.node[0]).SerializeToString():
        return []
    known: dict[str | None, ir.Value | Var | None] = {"": None, **values}
    known |= {
        t.name: site.const(onnx.numpy_helper.to_array(t)) for t in converted.graph.initializer if t.name not in values
    }
    for made in after:
        attrs = {a.name: ir.from_proto(a) for a in made.attribute}
        written = site.emit(made.op_type, *[known[name] for name in made.input], outputs=len(made.output), **attrs)
        for name, var in zip(made.output, written if isinstance(written, tuple) else [written]):
            known[name] = var
            if not name:
                var.value.name = ""
    results = [known.get(v.name or "") for v in node.outputs]
    return [x if isinstance(x, Var) else None for x in results]


def _normal(node: onnx.NodeProto) -> onnx.NodeProto:
    """`node` as the converter writes it when it changes nothing."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.ClearField("metadata_props")
    for field in ("domain", "doc_string", "name"):
        if not getattr(copy, field):
            copy.ClearField(field)
    return copy
