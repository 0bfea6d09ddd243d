"""Reader of Gradient nodes, and the specification's requirements on them.

A Gradient names its tensors in strings, which are not updated when a function is inlined or a value is renamed. So,
before any other change of a model, each name is resolved in the scope of the node, and the value becomes a further
input of the node: its inputs are then the tensors that are fed, those named by `xs` and `zs`, and `y`. After that, no
name is read again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.graph import ancestors, reads, subgraphs
from onnxgrad.ir.infer.registry import registry
from onnxgrad.ir.names import described
from onnxgrad.lower.optimizers import DOMAIN, KINDS

#: The only version of the domain: it is a preview, so another version may differ.
VERSION = 1


def is_gradient(node: ir.Node) -> bool:
    """True if `node` is a Gradient of the training domain."""
    return node.domain == DOMAIN and node.op_type == "Gradient"


def strings(node: ir.Node, name: str) -> list[str]:
    """A string-list attribute; empty if it is missing."""
    attribute = node.attributes.get(name)
    return [] if attribute is None or attribute.type != ir.AttributeType.STRINGS else list(attribute.as_strings())


def target_name(node: ir.Node) -> str:
    """The attribute `y`; empty if it is missing."""
    attribute = node.attributes.get("y")
    return "" if attribute is None or attribute.type != ir.AttributeType.STRING else attribute.as_string()


@dataclass
class Bound:
    """The values that a Gradient is about.

    Attributes:
        fed: where it is evaluated, one per name.
        xs, zs: the values that have these names.
        y: what is differentiated.
    """

    fed: list[ir.Value]
    xs: list[ir.Value]
    zs: list[ir.Value]
    y: ir.Value

    @classmethod
    def of(cls, node: ir.Node) -> Bound:
        """The names of a node that `bind` has processed."""
        xs, zs = len(strings(node, "xs")), len(strings(node, "zs"))
        values = [v for v in node.inputs if v is not None]
        assert len(values) == 2 * (xs + zs) + 1, f"{described(node)} was not bound"
        named = values[xs + zs : -1]
        return cls(values[: xs + zs], named[:xs], named[xs:], values[-1])


def bind(model: ir.Model, constants: Collection[str] = ()) -> None:
    """Convert the names in every Gradient of `model`, nested graphs included, into inputs of the node, in place.

    Args:
        model: as it was read: nothing is inlined, renamed or removed yet.
        constants: graph inputs that are as good as initializers: `y` may depend on them unmentioned.

    Raises:
        BadInput: what a node says is not what the specification allows.
    """
    _check_version(model)
    for function in model.functions.values():
        _check_version(function)
    for scope in _every_scope(model, constants):
        for node in scope.nodes:
            if is_gradient(node):
                for problem in scope.problems(node):
                    raise BadInput(f"{described(node)}: {problem}")
    named: dict[ir.Value, ir.Function] = {}
    for scope in _every_scope(model, constants):
        for node in [n for n in scope.nodes if is_gradient(n)]:
            names = [*strings(node, "xs"), *strings(node, "zs")]
            values = [scope.visible[name] for name in [*names, target_name(node)]]
            node.resize_inputs(2 * len(names) + 1)
            for i, value in enumerate(values, start=len(names)):
                node.replace_input_with(i, value)
            if scope.function is not None:
                named.update((v, scope.function) for v in values if v in scope.function.inputs)
    for value, function in named.items():
        _tell_apart(value, function)
    for node in [*model.graph.all_nodes(), *(n for f in model.functions.values() for n in f.all_nodes())]:
        if (
            node.domain == DOMAIN and node.op_type in _INFERENCE
        ):  # raising the opset needs types before any are inferred
            _INFERENCE[node.op_type](None, node)


def _check_version(holder: ir.Model | ir.Function) -> None:
    """A graph that has operators of the domain imports its only version."""
    node = next((n for n in holder.graph.all_nodes() if n.domain == DOMAIN), None)
    version = holder.opset_imports.get(DOMAIN)
    if node is not None and version != VERSION:
        what = f"version {version}" if version else "no version"
        raise BadInput(f"{described(node)}: {what} of {DOMAIN} is imported; there is only {VERSION}")


def _tell_apart(formal: ir.Value, function: ir.Function) -> None:
    """Separate two inputs of a function that a call passes the same tensor for: they are two variables inside."""
    copy = ir.Node("", "Identity", [formal], num_outputs=1, name=f"{formal.name}_variable")
    copy.outputs[0].name = f"{formal.name}_variable"
    formal.replace_all_uses_with(copy.outputs[0])
    copy.replace_input_with(0, formal)
    function.insert_before(function[0], copy)


@dataclass
class Scope:
    """A graph with everything that its nodes can see.

    Attributes:
        nodes: those of this graph.
        visible: values by name, those of the graphs around it included.
        before: the nodes of the graphs around it that come before it.
        constants: names that need not be listed.
        function: the local function that it belongs to.
    """

    nodes: list[ir.Node]
    visible: dict[str, ir.Value]
    before: list[ir.Node] = field(default_factory=list)
    constants: Collection[str] = ()
    function: ir.Function | None = None

    def problems(self, node: ir.Node) -> Iterator[str]:
        """The violations by Gradients among `nodes`."""
        xs, zs, y = strings(node, "xs"), strings(node, "zs"), target_name(node)
        names = [*xs, *zs]
        if not xs or not y:
            yield "the attributes xs and y are required"
            return
        if len(node.inputs) != len(names):
            yield f"{len(node.inputs)} inputs for {len(xs)} xs and {len(zs)} zs"
        if len(node.outputs) > len(xs):
            yield f"has {len(node.outputs)} outputs for {len(xs)} xs"
        for name, fed in zip(names, node.inputs):
            if fed is None:
                yield f"nothing is fed for {name!r}"
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"{name!r} is named twice in xs and zs"
        unknown = [name for name in dict.fromkeys([*names, y]) if name not in self.visible]
        for name in unknown:
            yield str(UnknownName(name, self.visible, "value"))
        if unknown:
            return
        late = list(self._late(node, [*names, y]))
        yield from late
        if not late:
            variables = {self.visible[name]: name for name in names}
            yield from self._dependent(node, variables)
            yield from self._missing(node, variables, self.visible[y])

    def _so_far(self, node: ir.Node) -> list[ir.Node]:
        return [*self.before, *self.nodes[: self.nodes.index(node)]]

    def _late(self, node: ir.Node, names: Sequence[str]) -> Iterator[str]:
        """Names of values that are computed after `node`."""
        known = {v for n in self._so_far(node) for v in n.outputs}
        for name in dict.fromkeys(names):
            value = self.visible[name]
            if value.producer() is None or value in known:
                continue
            own = [v.name for v in node.outputs if v.name]
            loop = next((o for o in node.outputs if o.name and (value is o or trail(self.nodes, o, value))), None)
            if loop is not None:
                yield f"a cycle: {name!r} is computed from its own output {own[0] if len(own) == 1 else loop.name!r}"
            else:
                yield f"{name!r} is computed only after it"

    def _dependent(self, node: ir.Node, variables: Mapping[ir.Value, str]) -> Iterator[str]:
        """Variables that are computed from others: the specification wants them independent."""
        so_far = self._so_far(node)
        for value, name in variables.items():
            if value.producer() is None:
                continue
            nodes = ancestors(so_far, [value], set(variables) - {value})
            for read in dict.fromkeys(v for n in nodes for v in reads(n)):
                if read in variables and read is not value:
                    way = trail(nodes, read, value)
                    yield (
                        f"{name!r} is computed from {variables[read]!r} ({way}); the variables of xs and zs must be "
                        "independent of each other"
                    )

    def _missing(self, node: ir.Node, variables: Mapping[ir.Value, str], y: ir.Value) -> Iterator[str]:
        """Leaves that y depends on and that neither xs nor zs names."""
        nodes = ancestors(self._so_far(node), [y], set(variables))
        read = [v for n in nodes for v in reads(n)] if y not in variables else []
        made = {v for n in nodes for v in n.outputs}
        for leaf in dict.fromkeys([y, *read] if y not in variables else read):
            if leaf in variables or leaf in made or leaf.is_initializer() or leaf.name in self.constants:
                continue
            way = trail(nodes, leaf, y)
            yield (
                f"{y.name!r} depends on {leaf.name!r} too ({way or 'it is the same'}), which is neither in xs nor "
                f"in zs\n  hint: name it in zs, and feed it"
            )


def scopes(graph: ir.Graph | ir.Function, constants: Collection[str] = ()) -> Iterator[Scope]:
    """`graph` and all graphs inside it."""
    function = graph if isinstance(graph, ir.Function) else None
    yield from _inner_scopes(graph, Scope([], {}, [], constants, function))


def _inner_scopes(graph: ir.Graph | ir.Function, outer: Scope) -> Iterator[Scope]:
    visible = dict(outer.visible) | _own_values(graph)
    here = Scope(list(graph), visible, outer.before, outer.constants, outer.function)
    yield here
    for i, node in enumerate(here.nodes):
        for inner in subgraphs(node):
            if any(is_gradient(n) for n in inner.all_nodes()):
                known = {n: v for n, v in visible.items() if v.producer() is not node}
                around = Scope([], known, [*outer.before, *here.nodes[:i]], outer.constants, outer.function)
                yield from _inner_scopes(inner, around)


def _own_values(graph: ir.Graph | ir.Function) -> dict[str, ir.Value]:
    values = {v.name: v for v in graph.inputs if v.name}
    if isinstance(graph, ir.Graph):
        values |= graph.initializers
    return values | {v.name: v for node in graph for v in node.outputs if v.name}


def _every_scope(model: ir.Model, constants: Collection[str]) -> Iterator[Scope]:
    yield from scopes(model.graph, constants)
    for function in model.functions.values():
        yield from scopes(function)


# --- walks ------------------------------------------------------------------------------------------


def trail(nodes: Sequence[ir.Node], source: ir.Value, goal: ir.Value) -> str:
    """A path from `source` to `goal` as ``a → Mul → h → Exp → y``; empty if there is none."""
    came: dict[ir.Value, tuple[ir.Value, ir.Node]] = {}
    reached = {source}
    for node in nodes:
        start = next((v for v in reads(node) if v in reached), None)
        if start is not None:
            for value in node.outputs:
                if value not in reached:
                    came[value] = (start, node)
                    reached.add(value)
    if goal not in came:
        return ""
    steps = [f"{goal.name}"]
    while goal is not source:
        goal, node = came[goal]
        steps += [node.op_type, f"{goal.name}"]
    steps.reverse()
    return " → ".join(steps if len(steps) < 16 else [*steps[:6], "…", *steps[-6:]])


# --- types ------------------------------------------------------------------------------------------


def _infer_gradient(ctx: osi.ShapeInferenceContext | None, node: ir.Node) -> None:
    """Each gradient has the type and shape of the tensor that is fed for its x."""
    for out, fed in zip(node.outputs, node.inputs):
        _as(out, fed)


def _infer_update(ctx: osi.ShapeInferenceContext | None, node: ir.Node) -> None:
    """Infer the outputs of an optimizer: new tensors have the types and shapes of the old ones."""
    tensors = list(node.inputs[2:])
    n, rest = divmod(len(tensors), len(KINDS[node.op_type]))
    if not rest:
        for out, old in zip(node.outputs, [*tensors[:n], *tensors[2 * n :]]):
            _as(out, old)


def _as(out: ir.Value, like: ir.Value | None) -> None:
    if like is not None and out.name:
        out.type = out.type or like.type
        out.shape = out.shape if out.shape is not None or like.shape is None else like.shape.copy()


_INFERENCE = {"Gradient": _infer_gradient} | dict.fromkeys(KINDS, _infer_update)

for _name, _infer in _INFERENCE.items():
    registry.register(DOMAIN, _name, 1)(_infer)
