"""Gradient nodes written out by reverse mode.

The graph is rewritten node by node in its own order; a Gradient is replaced when its turn comes, in branches and bodies
too. So its nodes precede all readers, a second Gradient can differentiate the nodes of the first, and types are known
downstream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx_ir as ir

from onnxgrad import control_flow, rules  # noqa: F401  (they fill the registry)
from onnxgrad.engine import reverse
from onnxgrad.engine.activity import is_differentiable, prepare
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder, Var, same_shape
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import ancestors, named_values, prune, reads, scopes, subgraphs
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.names import described
from onnxgrad.model_io import AnyModel, Opened, open_model
from onnxgrad.model_io.open import Keep, keep_no_function
from onnxgrad.transforms.gradient_node import DOMAIN, Bound, bind, is_gradient, strings
from onnxgrad.wording import type_text


def needs_lowering(model: ir.Model) -> bool:
    """True if there is a Gradient anywhere in `model`, including local functions."""
    if any(node.domain == DOMAIN and is_gradient(node) for graph in scopes(model.graph) for node in graph):
        return True
    return any(is_gradient(node) for function in model.functions.values() for node in function.all_nodes())


def open_lowered(
    model: AnyModel, first: Callable[[ir.Model], None] | None = None, *, keep: Keep = keep_no_function
) -> Opened:
    """`model` opened (see `open_model`) with its Gradient nodes lowered; every name keeps its meaning.

    Functions that contain a Gradient, or that its `y` calls, are inlined: with a Gradient, all functions are.

    Raises:
        BadInput: a Gradient that the specification does not allow.
        NotDifferentiable: an operator between `xs` and `y` has no rule or no derivative.
    """
    found = False

    def bound(private: ir.Model) -> None:
        nonlocal found
        if found := needs_lowering(private):
            bind(private)
        if first is not None:
            first(private)

    opened = open_model(model, bound, keep=lambda private: keep_no_function(private) if found else keep(private))
    if found:
        before = set(opened.model.graph.initializers)
        WithoutGradients(opened.model, opened.inference).keep_names()
        opened.constants = frozenset(set(opened.model.graph.initializers) - before)
        opened.model.opset_imports.pop(DOMAIN, None)
    return opened


class WithoutGradients:
    """A graph without Gradient nodes, and a map of the values that it had."""

    def __init__(self, model: ir.Model, inference: Inference | None = None) -> None:
        self.model = model
        self.graph = model.graph
        self.builder = Builder(self.graph, infer=inference)
        self.values = named_values(self.graph)
        self._outputs = [v.name or "" for v in self.graph.outputs]
        nodes = list(self.graph)
        #: the graphs that are being written, the outermost first
        self._open: list[ir.Graph] = [self.graph]
        self._exposed: set[ir.Value] = set()
        while any(self._is_due(n) for n in nodes):
            self.graph.remove(nodes)
            for node in nodes:
                self._write(node)
            nodes = list(self.graph)
            self._renew()

    def __getitem__(self, name: str) -> ir.Value:
        """The current value for the original name `name`."""
        if name not in self.values:
            raise UnknownName(name, self.values, "value")
        return self.builder.now(self.values[name])

    def expose(self, name: str) -> ir.Value:
        """A value fit to be the graph output `name`: made by a node of the graph, and exposed once.

        The value called `name` itself if it can be exposed, else a copy; the copy of a graph input, or the second one
        of a value, cannot have that name and gets a fresh one.
        """
        value = self[name]
        if value.producer() is None or value in self._exposed:
            taken = value.name == name
            value = self.builder.copy(value).value
            value.name = self.builder.names.fresh(name) if taken else name
        else:
            value.name = name
        self._exposed.add(value)
        return value

    def named(self, name: str) -> ir.Value:
        """A value with the name `name`: its replacement if that has the name, else an exposed copy."""
        value = self[name]
        if value.name != name:
            return self.expose(name)
        self._exposed.add(value)
        return value

    def keep_names(self) -> None:
        """Give every replaced value's name to its replacement, and restore the outputs."""
        self.graph.outputs.clear()
        replaced = [name for name, value in self.values.items() if value in self.builder.moved]
        values = {name: self.named(name) for name in dict.fromkeys([*self._outputs, *replaced])}
        self.graph.outputs.extend(values[name] for name in self._outputs)

    def _renew(self) -> None:
        """Have a builder that shares nothing with nodes that another round will move."""
        moved, self.builder = self.builder.moved, self.builder.nested(self.graph)
        self.builder.moved = moved

    @contextmanager
    def _inside(self, graph: ir.Graph) -> Iterator[None]:
        """Write into `graph`, which is nested in the current one."""
        outer, self.builder = self.builder, self.builder.nested(graph)
        self.builder.moved = outer.moved
        self._open.append(graph)
        try:
            yield
        finally:
            self._open.pop()
            self.builder = outer

    def _write_inside(self, graph: ir.Graph) -> None:
        """Rewrite a branch or a body."""
        with self._inside(graph):
            nodes = list(graph)
            graph.remove(nodes)
            for node in nodes:
                self._write(node)
            taken: set[ir.Value] = set()
            for i, value in enumerate(graph.outputs):
                maker = value.producer()
                if maker is None or maker.graph is not graph or value in taken:  # an output is made here, and once
                    graph.outputs[i] = value = self.builder.copy(value).value
                taken.add(value)
        prune(graph)

    def _belongs(self, node: ir.Node) -> bool:
        """True if `node` is of a kind that is replaced."""
        return is_gradient(node)

    def _holds(self, node: ir.Node) -> bool:
        """True if `node`, or a node inside it, is of such a kind."""
        return self._belongs(node) or any(self._belongs(n) for g in subgraphs(node) for n in g.all_nodes())

    def _is_due(self, node: ir.Node) -> bool:
        """True if a node of the outermost graph has to be rewritten."""
        return self._holds(node)

    def _replacement(self, node: ir.Node) -> Sequence[Var | None] | None:
        """The replacements of the outputs of `node`; None if it stays."""
        return self._gradient(node) if is_gradient(node) else None

    def _write(self, node: ir.Node) -> None:
        for inner in subgraphs(node):
            if any(map(self._holds, inner)):
                self._write_inside(inner)
        new = self._replacement(node)
        if new is None:
            self._open[-1].append(node)
            if any(v.name and (v.type is None or v.shape is None) for v in node.outputs):
                self.builder.infer(node)
            return
        if len(node.outputs) > len(new):
            has = f"{described(node)} has {len(node.outputs)} outputs"
            raise BadInput(f"{has}, but only {len(new)} tensors to put there")
        for old, var in zip(node.outputs, new):
            if var is not None:
                old.replace_all_uses_with(var.value, replace_graph_outputs=True)
                self.builder.moved[old] = var.value

    def _gradient(self, node: ir.Node) -> list[Var | None]:
        """∂(Σy)/∂x for each x of `xs` that is asked for; zeros where y does not depend on x."""
        where = described(node)
        bound, now = Bound.of(node), self.builder.now
        xs, zs, y = [now(v) for v in bound.xs], [now(v) for v in bound.zs], now(bound.y)
        names = strings(node, "xs")
        for name, x in zip([*names, "y"], [*xs, y]):
            if not is_differentiable(x):
                raise BadInput(f"{where}: {name!r} is a tensor of {type_text(x.dtype)}; only floats have derivatives")
        nodes = ancestors([n for graph in self._open for n in graph], [y], {*xs, *zs})
        fed = dict(zip([*xs, *zs], map(now, bound.fed)))
        if any(value is not named for named, value in fed.items()):
            at = self._substituted(nodes, fed, where)
            nodes = [at.nodes.get(n, n) for n in nodes]
            xs, y = [at.values.get(x, x) for x in xs], at.values.get(y, y)
        asked = [x for x, out in zip(xs, node.outputs) if out.name]
        if y.dtype is None:
            prepare(nodes, asked, [y], self.builder)  # the reason, if there is one
            raise BadInput(f"{where}: the type of {y.name!r} is not known; declare it in the model")
        seed = self.builder.full_like(Var(self.builder, y), 1)
        gradients = reverse(self.builder, nodes, {y: seed}, asked)
        return [
            (gradients.get(x) or self.builder.zeros_like(Var(self.builder, now(x)))) if out.name else None
            for x, out in zip(xs, node.outputs)
        ]

    def _substituted(self, nodes: Sequence[ir.Node], fed: Mapping[ir.Value, ir.Value], where: str) -> _Copies:
        """Evaluate `nodes` at the fed values: nodes that depend on substituted values are copied."""
        same = all(v is n or same_shape(Var(self.builder, n), Var(self.builder, v)) for n, v in fed.items())
        copies = _Copies(self.builder, same)
        for named, value in fed.items():
            if value is not named:
                if named.dtype is not None and value.dtype is not None and named.dtype != value.dtype:
                    raise BadInput(
                        f"{where}: {named.name!r} is a tensor of {type_text(named.dtype)}, and {value.name!r}, which "
                        f"is fed for it, one of {type_text(value.dtype)}"
                    )
                copies.variable(named, value)
        for node in nodes:
            copies.write(node)
        return copies


class _Copies(Copies):
    """Copies of nodes that read other values than the originals, appended by a builder.

    Attributes:
        nodes: the copy of each node that has one.
    """

    def __init__(self, builder: Builder, same_shapes: bool) -> None:
        super().__init__({}, builder.names)
        self.builder = builder
        self.same_shapes = same_shapes
        self.nodes: dict[ir.Node, ir.Node] = {}

    def variable(self, named: ir.Value, value: ir.Value) -> None:
        """Replace `named` by a copy of `value`, a variable of its own even if others are fed `value` too."""
        copy = ir.Node("", "Identity", [value])
        copy.outputs[0].type = value.type or named.type
        (var,) = self.builder.append(copy)
        self.values[named] = var.value

    def write(self, node: ir.Node) -> None:
        """Copy `node` if it reads anything that has a copy."""
        if not any(v in self.values for v in reads(node)):
            return
        copy = self.unnamed(node)
        for old, new in zip(node.outputs, copy.outputs):
            new.name = None if old.name else ""
            new.shape = old.shape if self.same_shapes else None
        self.nodes[node] = copy
        self._append(copy)

    def _append(self, copy: ir.Node) -> None:
        skipped = [v for v in copy.outputs if v.name == ""]
        self.builder.append(copy)
        for value in skipped:
            value.name = ""
