"""Active values and nodes: those between `wrt` and `of`, and the operators that have no derivative there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import onnx_ir as ir

from onnxgrad.engine.resolve import replacement, rule_of
from onnxgrad.errors import NoDerivative, NoRule, NotDifferentiable
from onnxgrad.ir.builder import FLOATS, Builder
from onnxgrad.ir.graph import captured, reads
from onnxgrad.ir.names import described
from onnxgrad.lower.registry import lowering_for
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Rule, Undefined, Zero

#: Types whose values are counts, places or conditions, never quantized numbers.
_DISCRETE = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.STRING})


def is_differentiable(value: ir.Value) -> bool:
    """True if a value can carry a tangent: floats, containers of floats, values of unknown type."""
    kind = value.type
    if type(kind) is ir.TensorType and kind.dtype in FLOATS:
        return True
    while isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        kind = kind.elem_type
    if kind is None or not isinstance(kind, ir.TensorType):
        return kind is None
    return kind.dtype in FLOATS or _is_estimated(value)


def _is_estimated(value: ir.Value) -> bool:
    """True if a quantized value has a straight-through tangent, which is a float.

    The tangent comes from the producer, or through operators that only move elements of the same type or are lowered.
    """
    if not registry.estimating:
        return False
    stack, seen = [value], {value}
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None or value.dtype is None or value.dtype in _DISCRETE:
            continue
        if registry.estimates(node.domain, node.op_type):
            return True
        written = lowering_for(node.op_type, node.domain) is not None
        for v in node.inputs:
            if v is not None and v not in seen and (v.dtype == value.dtype or (written and v.dtype not in FLOATS)):
                seen.add(v)
                stack.append(v)
    return False


def moved_by(node: ir.Node, rule: Rule | None, active: Collection[ir.Value]) -> bool:
    """True if `node` has a derivative with respect to some value of `active`."""
    if isinstance(rule, Zero):
        return False
    for i, v in enumerate(node.inputs):
        if v in active and (rule is None or rule.carries(i)):
            return True
    return bool(node.attributes.data) and any(v in active for v in captured(node))


class Path(dict[ir.Node, Rule | None]):
    """Nodes with their rules, in order.

    Attributes:
        active: the values that depend, differentiably, on those that the path begins with.
    """

    def __init__(self, rules: Iterable[tuple[ir.Node, Rule | None]], active: set[ir.Value]) -> None:
        super().__init__(rules)
        self.active = active

    def leading_to(self, of: Iterable[ir.Value]) -> Path:
        """The nodes of this path through which `of` depends on the values that it begins with."""
        active, wanted = self.active, set(of)
        path: list[tuple[ir.Node, Rule | None]] = []
        for node, rule in reversed(self.items()):
            outputs = node.outputs
            if not wanted.isdisjoint(outputs) and any(v in wanted and v in active for v in outputs):
                path.append((node, rule))
                wanted.update(
                    v for i, v in enumerate(node.inputs) if v is not None and (rule is None or rule.carries(i))
                )
                if node.attributes.data:
                    wanted.update(captured(node))
        return Path(reversed(path), active)


def moved_nodes(nodes: Iterable[ir.Node], wrt: Iterable[ir.Value], builder: Builder) -> Path:
    """The nodes that depend, differentiably, on `wrt`."""
    path = Path((), set(wrt))
    active = path.active
    for node in nodes:
        rule = rule_of(node, builder)
        if moved_by(node, rule, active):
            path[node] = rule
            for v in node.outputs:
                if is_differentiable(v):
                    active.add(v)
    return path


def active_values(nodes: Iterable[ir.Node], wrt: Iterable[ir.Value], builder: Builder) -> set[ir.Value]:
    """The values that depend, differentiably, on `wrt`."""
    return moved_nodes(nodes, wrt, builder).active


def on_path(nodes: Iterable[ir.Node], wrt: Iterable[ir.Value], of: Iterable[ir.Value], builder: Builder) -> Path:
    """The nodes through which `of` depends on `wrt`."""
    return moved_nodes(nodes, wrt, builder).leading_to(of)


def stoppers(nodes: Sequence[ir.Node], wrt: Iterable[ir.Value], of: Iterable[ir.Value], builder: Builder) -> list[str]:
    """The operators before `of` with a zero derivative that read values depending on `wrt`."""
    active, wanted = active_values(nodes, wrt, builder), set(of)
    names: dict[str, None] = {}
    for node in reversed(nodes):
        if any(v in wanted for v in node.outputs):
            wanted.update(v for v in reads(node) if v is not None)
            if not any(v in active for v in node.outputs) and any(v in active for v in reads(node)):
                names[node.op_type] = None
    return list(names)[::-1]


def prepare(
    nodes: Sequence[ir.Node],
    wrt: Sequence[ir.Value],
    of: Sequence[ir.Value],
    builder: Builder,
    reverse: bool = False,
) -> Path:
    """The nodes to differentiate: those on the path, each with a rule.

    An operator without a rule is replaced, in its graph, by the specification's own function body; for reverse mode, an
    operator whose rule rewrites it is replaced by that form. Raises NoRule or NoDerivative, before anything is written,
    naming every obstacle.
    """
    nodes = list(nodes)
    while True:
        wrt, of = [builder.now(v) for v in wrt], [builder.now(v) for v in of]
        path = on_path(nodes, wrt, of, builder)
        seeds = of if reverse else None
        bodies = {node: body for node, r in path.items() if (body := replacement(node, r, builder, wrt, seeds))}
        if not bodies:
            break
        nodes = [n for node in nodes for n in bodies.get(node, [node])]
    refuse([n for n, r in path.items() if r is None or isinstance(r, Undefined)], path, wrt, of, builder)
    return path


def obstacle(node: ir.Node, builder: Builder) -> str:
    """The reason that `node` cannot be differentiated; empty if it can."""
    rule = rule_of(node, builder)
    if rule is None:
        return "onnxgrad has no rule for it, and the specification gives it no function body"
    return rule.reason if isinstance(rule, Undefined) else ""


def refuse(
    nodes: Sequence[ir.Node],
    among: Iterable[ir.Node],
    wrt: Sequence[ir.Value],
    of: Sequence[ir.Value],
    builder: Builder,
) -> None:
    """Raise one error that names all of `nodes` with the path through each; do nothing without nodes."""
    if not nodes:
        return
    lines = []
    for node in nodes[:5]:
        opset = builder.infer.context.get_opset_version(node.domain)
        lines.append(f"  {described(node)} ({node.domain or 'ai.onnx'}, opset {opset}): {obstacle(node, builder)}")
        lines.append(f"    on the path {describe_path(node, among, wrt, of)}")
    if len(nodes) > 5:
        lines.append(f"  … and {len(nodes) - 5} more")
    hint = "take `wrt` after, or `of` before, the node"
    missing = any(rule_of(n, builder) is None for n in nodes)
    if missing:
        hint += "; or register a rule for the operator (docs/add-an-operator.md)"
    error: type[NotDifferentiable] = NoRule if missing else NoDerivative
    raise error("cannot differentiate\n" + "\n".join(lines) + f"\n  hint: {hint}")


def describe_path(node: ir.Node, among: Iterable[ir.Node], wrt: Sequence[ir.Value], of: Sequence[ir.Value]) -> str:
    """A path from a `wrt` through `node` to an `of`, as ``x → Conv → … → y``."""
    producers = {v: n for n in among for v in n.outputs}
    users: dict[ir.Value, list[ir.Node]] = {}
    for n in among:
        for v in reads(n):
            users.setdefault(v, []).append(n)
    before = _walk(node, lambda n: [producers[v] for v in reads(n) if v in producers], reads, set(wrt))
    after = _walk(node, lambda n: [u for v in n.outputs for u in users.get(v, ())], lambda n: n.outputs, set(of))
    (start, middle), (end, last) = before, after
    chain = [n.op_type for n in reversed(middle)] + [f"[{node.op_type}]"] + [n.op_type for n in last]
    if len(chain) > 9:
        at = len(middle)
        chain = [*chain[: min(3, at)], "…", chain[at], "…", *chain[-2:]] if 3 < at < len(chain) - 3 else chain
        chain = chain if len(chain) < 20 else [*chain[:6], "…", *chain[-6:]]
    return " → ".join([start, *chain, end])


def _walk(
    node: ir.Node,
    onward: Callable[[ir.Node], Iterable[ir.Node]],
    touches: Callable[[ir.Node], Iterable[ir.Value]],
    goal: Collection[ir.Value],
) -> tuple[str, list[ir.Node]]:
    """From `node` to the nearest node that touches a value of `goal`: the value, and the nodes in between."""
    came: dict[ir.Node, ir.Node | None] = {node: None}
    queue = deque([node])
    while queue:
        current = queue.popleft()
        reached = next((v.name or "?" for v in touches(current) if v in goal), None)
        if reached is not None:
            trail: list[ir.Node] = []
            back: ir.Node | None = current
            while back is not None and back is not node:
                trail.append(back)
                back = came[back]
            return reached, trail[::-1]
        for n in onward(current):
            if n not in came:
                came[n] = current
                queue.append(n)
    return "?", []
