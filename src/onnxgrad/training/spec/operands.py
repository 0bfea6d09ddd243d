"""Checks of operands: first by schemas, then by types and shapes.

Schemas check each node as written. Types and shapes come from inference; an operand of unknown type passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from onnxgrad.engine.activity import is_differentiable
from onnxgrad.ir.match import normal_domain
from onnxgrad.ir.names import described
from onnxgrad.lower.optimizers import KINDS
from onnxgrad.transforms.gradient_node import DOMAIN, VERSION, is_gradient, strings, target_name
from onnxgrad.wording import shape_text, type_text


def misuses(proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Errors in `nodes`, and those inside them, by the schemas of the opsets that `proto` imports."""
    imports = {normal_domain(o.domain): o.version for o in proto.opset_import}
    local = {(f.domain, f.name) for f in proto.functions}
    context = onnx.checker.C.CheckerContext()
    context.ir_version = proto.ir_version
    context.opset_imports = imports
    for node in nodes:
        domain = normal_domain(node.domain)
        for a in node.attribute:
            for body in (a.g, *a.graphs):
                yield from misuses(proto, body.node)
        if (domain, node.op_type) in local or (domain == DOMAIN and node.op_type == "GraphCall"):
            continue
        if domain not in imports:
            yield f"{described(node)}: the model imports no opset of {domain!r}"
            continue
        if domain == DOMAIN and imports[domain] != VERSION:
            yield f"{described(node)}: the model imports version {imports[domain]} of {DOMAIN}; there is only {VERSION}"
            continue
        if domain and not any(s.domain == domain for s in onnx.defs.get_all_schemas()):
            continue  # an operator of another domain
        try:
            schema = onnx.defs.get_schema(node.op_type, imports[domain], domain)
        except onnx.defs.SchemaError:
            version = f"opset {imports[domain]} of {domain or 'ai.onnx'}"
            yield f"{described(node)}: there is no such operator in {version}"
            continue
        why = _complaint(node, schema, context)
        if why:
            yield f"{described(node)}: {why}"


def _complaint(node: onnx.NodeProto, schema: onnx.defs.OpSchema, context: onnx.checker.C.CheckerContext) -> str:
    """The error in a node by the schema of its operator; empty if there is none."""
    given = {a.name for a in node.attribute}
    lacking = [a.name for a in schema.attributes.values() if a.required and a.name not in given]
    if lacking:
        return f"it lacks the attribute {', '.join(map(repr, lacking))}"
    unknown = sorted(given - set(schema.attributes))
    if unknown:
        return f"there is no attribute {', '.join(map(repr, unknown))}"
    groups = len(KINDS.get(node.op_type, ())) if node.domain == DOMAIN else 0
    if groups:
        for i, name in enumerate(node.input):
            if not name:
                return f"its input {i} is left out"
        tensors, outputs = len(node.input) - 2, len(node.output)
        if tensors < groups or tensors % groups:
            return f"it has {len(node.input)} inputs; it takes R, T and {groups} per tensor"
        if outputs > tensors // groups * (groups - 1):
            return f"it has {outputs} outputs; it gives {groups - 1} per tensor"
        mode = next((a.s.decode() for a in node.attribute if a.name == "mode"), "standard")
        if mode not in ("standard", "nesterov"):
            return f"mode must be 'standard' or 'nesterov', not {mode!r}"
    if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute):
        return ""  # the checker would follow names into graphs that it was not given
    try:
        onnx.checker.C.check_node(node.SerializeToString(), context, onnx.checker.C.LexicalScopeContext())
    except Exception as e:
        return " ".join(str(e).split("==>")[0].split())
    return ""


def misfits(nodes: Iterable[ir.Node]) -> Iterator[str]:
    """Errors in the types and shapes of operands of the training domain's operators among `nodes`."""
    for node in nodes:
        if node.domain == DOMAIN and node.op_type in KINDS:
            yield from (f"{described(node)}: {why}" for why in _of_optimizer(node))


def _of_optimizer(node: ir.Node) -> Iterator[str]:
    given = [v for v in node.inputs if v is not None]
    if len(given) < len(node.inputs) or len(given) < 2:
        return  # which its schema has checked
    rate, count, *tensors = given
    kinds = KINDS[node.op_type]
    for letter, value, types in (("R", rate, _FLOATS), ("T", count, {ir.DataType.INT64})):
        if value.dtype is not None and value.dtype not in types:
            listed = " or ".join(t.name for t in sorted(types))
            yield f"{letter} is {listed}, and {value.name!r} is a tensor of {value.dtype.name}"
        elif value.shape is not None and any(d != 1 for d in value.shape if isinstance(d, int)):
            yield f"{letter} is one number, and {value.name!r} has the shape {shape_text(value.shape)}"
    n = len(tensors) // len(kinds)
    for i, x in enumerate(tensors[:n]):
        if x.dtype is not None and x.dtype not in _FLOATS:
            yield f"X is FLOAT or DOUBLE, and {x.name!r} is a tensor of {x.dtype.name}"
            continue
        for letter, value in zip(kinds[1:], tensors[n + i :: n]):
            why = _unlike(value, x)
            if why:
                yield f"{letter} is as X is, and {value.name!r} {why}"


_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE}


def _unlike(value: ir.Value, x: ir.Value) -> str:
    """The difference between `value` and `x` in type or shape; empty if none is known."""
    if value.dtype is not None and x.dtype is not None and value.dtype != x.dtype:
        return f"is a tensor of {value.dtype.name}, {x.name!r} one of {x.dtype.name}"
    if value.shape is not None and x.shape is not None:
        a, b = list(value.shape), list(x.shape)
        if len(a) != len(b) or any(isinstance(m, int) and isinstance(k, int) and m != k for m, k in zip(a, b)):
            return f"has the shape {shape_text(a)}, {x.name!r} {shape_text(b)}"
    return ""


def underivable(node: ir.Node, visible: dict[str, ir.Value]) -> Iterator[str]:
    """Names in a Gradient of tensors that have no derivative, and fed tensors of another type; types are known."""
    assert is_gradient(node)
    xs, zs = strings(node, "xs"), strings(node, "zs")
    for name in dict.fromkeys([*xs, target_name(node)]):
        value = visible.get(name)
        if value is not None and not is_differentiable(value):
            yield f"{name!r} is a tensor of {type_text(value.dtype)}; only floats have derivatives"
    for name, fed in zip([*xs, *zs], node.inputs):
        named = visible.get(name)
        if fed is not None and named is not None and named.dtype is not None and fed.dtype not in (None, named.dtype):
            wanted, given = type_text(named.dtype), type_text(fed.dtype)
            yield f"{name!r} is a tensor of {wanted}, and {fed.name!r}, which is fed for it, one of {given}"
