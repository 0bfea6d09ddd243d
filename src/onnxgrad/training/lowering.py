"""Training operators written out: Gradient by reverse mode, optimizers by their formulas.

The graph is written once more, node by node in its own order; a node of the training domain is replaced
when its turn comes. So what a Gradient emits stands before everything that reads it, a second Gradient
can differentiate what the first has emitted, and types are known downstream. BatchNormalization in
training mode is given private statistics on the way (see `batchnorm`), also where a rule has emitted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad import flow, rules  # noqa: F401  (they fill the registry)
from onnxgrad.door import AnyModel, open_model
from onnxgrad.engine import reverse
from onnxgrad.engine.paths import is_differentiable, prepare
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.infer import forget_values
from onnxgrad.ir.names import described
from onnxgrad.ir.walk import prune, reads, subgraphs
from onnxgrad.training.batchnorm import trains, with_private_statistics
from onnxgrad.training.info import DOMAIN, named_values
from onnxgrad.training.optimizers import OPTIMIZERS
from onnxgrad.training.trainmode import ancestors


class Lowered:
    """A graph without operators of the training domain, and what became of the values it had."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self.builder = Builder(self.graph)
        self.values = named_values(self.graph)
        nodes = list(self.graph)
        if any(n.domain == DOMAIN for node in nodes for g in subgraphs(node) for n in g.all_nodes()):
            raise BadInput(f"an operator of {DOMAIN} inside a branch or loop body is not supported")
        self._exposed: set[ir.Value] = set()
        #: the BatchNormalization nodes whose statistics are their own
        self._private: set[ir.Node] = set()
        while any(n.domain == DOMAIN or (trains(n) and n not in self._private) for n in nodes):
            self.graph.remove(nodes)
            for node in nodes:
                self._write(node)
            nodes = list(self.graph)
            self._renew()

    def __getitem__(self, name: str) -> ir.Value:
        """The value that now stands for the one that was called `name`."""
        if name not in self.values:
            raise UnknownName(name, self.values, "value")
        return self.now(self.values[name])

    def expose(self, name: str) -> ir.Value:
        """A value fit to be the graph output `name`: made by a node of the graph, and exposed once.

        The value called `name` itself if it is fit, else a copy; the copy of a graph input, or the second
        one of a value, cannot have that name and gets a fresh one.
        """
        value = self[name]
        if value.producer() is None or value in self._exposed:
            taken = value.name == name
            (copy,) = self.builder.append(ir.Node("", "Identity", [value]))
            value = copy.value
            value.name = self.builder.names.fresh(name) if taken else name
        else:
            value.name = name
        self._exposed.add(value)
        return value

    def now(self, value: ir.Value) -> ir.Value:
        """What stands for `value`, however often it was replaced."""
        while value in self.builder.moved:
            value = self.builder.moved[value]
        return value

    def _renew(self) -> None:
        """Have a builder that shares nothing with nodes that another round will move."""
        moved, self.builder = self.builder.moved, self.builder.nested(self.graph)
        self.builder.moved = moved

    def _write(self, node: ir.Node) -> None:
        new: Sequence[Var | None]
        if trains(node) and node not in self._private:
            with self.builder.record() as written:
                new = with_private_statistics(self.builder, node, len(self._private))
            self._private.update(n for n in written if trains(n))
        elif node.domain != DOMAIN:
            self.graph.append(node)
            if any(v.name and (v.type is None or v.shape is None) for v in node.outputs):
                self.builder.infer(node)
            return
        elif node.op_type == "Gradient":
            new = self._gradient(node)
        elif node.op_type in OPTIMIZERS:
            new = [x for kind in OPTIMIZERS[node.op_type](self.builder, node) for x in kind]
        else:
            raise BadInput(f"node {node.name!r}: there is no operator {node.op_type!r} in {DOMAIN}")
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
        xs = _strings(node, "xs")
        zs = _strings(node, "zs")
        y = node.attributes["y"].as_string() if "y" in node.attributes else ""
        if not xs or not y:
            raise BadInput(f"{where}: the attributes xs and y are required")
        if len(node.inputs) != len(xs) + len(zs):
            raise BadInput(f"{where}: {len(node.inputs)} inputs for {len(xs)} xs and {len(zs)} zs")
        for name, fed in zip([*xs, *zs], node.inputs):
            named = self._differentiable(name, where) if name in xs else self._named(name, where)
            if fed is None or self.now(fed) is not named:
                raise BadInput(
                    f"{where}: {name!r} is fed with {fed and fed.name!r}; a gradient at other "
                    "tensors than those named in xs and zs is not supported"
                )
        self._check_independent([*xs, *zs], where)
        target = self._differentiable(y, where)
        asked = [v for v, out in zip(xs, node.outputs) if out.name]
        wrt = {name: self._named(name, where) for name in asked}
        if target.dtype is None:
            prepare(list(self.graph), list(wrt.values()), [target], self.builder)  # the reason, if it is there
            raise BadInput(f"{where}: the type of {y!r} is not known; declare it in the model")
        seed = self.builder.full_like(Var(self.builder, target), 1)
        found = reverse(self.builder, list(self.graph), {target: seed}, list(wrt.values()))
        results: list[Var | None] = []
        for name, out in zip(xs, node.outputs):
            g = found.get(wrt[name]) if out.name else None
            if out.name and g is None:
                g = self.builder.zeros_like(Var(self.builder, self._named(name, where)))
            results.append(g)
        return results

    def _check_independent(self, names: Sequence[str], where: str) -> None:
        """The specification wants independent variables: none is computed from another."""
        values = {self._named(name, where): name for name in names}
        for value, name in values.items():
            if value.producer() is None:
                continue
            for node in ancestors(list(self.graph), value):
                for read in reads(node):
                    if read in values and read is not value:
                        raise BadInput(
                            f"{where}: {name!r} is computed from {values[read]!r}; the variables of xs, zs "
                            "must be independent of each other"
                        )

    def _named(self, name: str, where: str) -> ir.Value:
        try:
            value = self[name]
        except UnknownName as e:
            raise BadInput(f"{where}: {e}") from e
        producer = value.producer()
        if producer is not None and producer.graph is None:
            raise BadInput(f"{where}: {name!r} is computed only after it")
        return value

    def _differentiable(self, name: str, where: str) -> ir.Value:
        value = self._named(name, where)
        if not is_differentiable(value):
            raise BadInput(f"{where}: {name!r} is a tensor of {value.dtype}; only floats have derivatives")
        return value


def _strings(node: ir.Node, name: str) -> list[str]:
    given = node.attributes.get(name)
    return [] if given is None else list(given.as_strings())


def lower_gradients(model: AnyModel) -> Any:
    """`model` with its Gradient nodes and optimizer operators written out as standard operators.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` whose graph holds such nodes.

    Returns:
        A model of the kind that came in (a path gives a ModelProto), with the same inputs and outputs.

    Raises:
        BadInput: a node that the specification does not allow. NotDifferentiable: no way from `xs` to `y`
            or an operator without a rule on it.
    """
    opened = open_model(model)
    graph = opened.model.graph
    names = [v.name or "" for v in graph.outputs]
    declared = [(v.type, v.shape) for v in graph.outputs]
    lowered = Lowered(opened.model)
    graph.outputs.clear()
    for name, (held, shape) in zip(names, declared):
        value = lowered.expose(name)
        value.type, value.shape = value.type or held, shape if value.shape is None else value.shape
        graph.outputs.append(value)
    prune(graph)
    forget_values(graph)
    opened.model.opset_imports.pop(DOMAIN, None)
    return opened.close()
