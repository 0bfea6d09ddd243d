"""Model in, model out: grad, value_and_grad, vjp, jvp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad import flow, rules  # noqa: F401  (they fill the registry)
from onnxgrad.door import AnyModel, Opened, Signature, open_model
from onnxgrad.engine import forward, reverse
from onnxgrad.engine.paths import is_differentiable
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.ir.infer import forget_values
from onnxgrad.ir.walk import prune

Names = str | Sequence[str]


class _Derivation:
    """One model being derived: resolves names, adds inputs and outputs, cleans up, records the signature."""

    def __init__(self, model: AnyModel, wrt: Names, of: Names | None) -> None:
        self.opened: Opened = open_model(model)
        self.graph = self.opened.model.graph
        self.builder = Builder(self.graph)
        self.nodes = list(self.graph)
        self.signature = Signature()
        values = _named_values(self.graph)
        self.wrt = {n: _float_value(n, values, "wrt") for n in _listed(wrt)}
        if of is None:
            self.of = {v.name or "": v for v in self.graph.outputs if is_differentiable(v)}
            if not self.of:
                raise BadInput("the model has no float output to differentiate; name a value with `of`")
        else:
            self.of = {n: _float_value(n, values, "of") for n in _listed(of)}

    def input(self, like: ir.Value, name: str) -> Var:
        """A new graph input with the type and shape of `like`."""
        value = ir.Value(name=self.builder.names.exactly(identifier(name)), type=like.type, shape=like.shape)
        self.graph.inputs.append(value)
        return self.builder.var(value)

    def output(self, var: Var, name: str, like: ir.Value) -> str:
        """A new graph output that holds `var`, of the type and shape of `like`; returns its name."""
        value = var.value
        if value.producer() is None or value.is_graph_output() or value.producer() in self._primal:
            var = self.builder.append(ir.Node("", "Identity", [value]))[0]
        var.value.type = var.value.type or like.type
        var.value.shape = var.value.shape if var.value.shape is not None else like.shape
        var.value.name = self.builder.names.exactly(identifier(name))
        self.graph.outputs.append(var.value)
        return var.value.name

    @functools.cached_property
    def _primal(self) -> set[ir.Node]:
        return set(self.nodes)

    def pull_back(self, seeds: dict[ir.Value, Var]) -> None:
        """Add the gradient outputs."""
        found = reverse(self.builder, self.nodes, seeds, list(self.wrt.values()))
        for name, value in self.wrt.items():
            g = found.get(value)
            if g is None:
                g = self.builder.zeros_like(self.builder.var(value))
            self.signature.gradients[name] = self.output(g, f"{name}_grad", value)

    def close(self) -> Any:
        """Clean up; the derived model in the caller's kind."""
        prune(self.graph)
        forget_values(self.graph)
        self.signature.store(self.opened.model)
        return self.opened.close()


def vjp(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """The model with its pullback: cotangents of `of` in, cotangents of `wrt` out.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        wrt: names of graph inputs, initializers or intermediate float values.
        of: names of float values; default: every float output.

    Returns:
        A model of the kind that came in (a path gives a ModelProto) with the primal inputs and outputs
        as they are, one more input ``{of}_cotangent`` (shape and dtype of `of`) per `of`, and one more
        output ``{wrt}_grad`` (shape and dtype of `wrt`) per `wrt`; `signature` tells the exact names.
        A `wrt` that `of` does not depend on gets zeros.

    Raises:
        UnknownName: a name that the model does not have. BadInput: a value that is no float.
        NotDifferentiable: an operator between `wrt` and `of` has no rule or no derivative.
    """
    d = _Derivation(model, wrt, of)
    seeds = {}
    for name, value in d.of.items():
        seeds[value] = d.input(value, f"{name}_cotangent")
        d.signature.cotangents[name] = seeds[value].name
    d.pull_back(seeds)
    return d.close()


def jvp(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """The model with its pushforward: tangents of `wrt` in, tangents of `of` out.

    As `vjp`, with one more input ``{wrt}_tangent`` per `wrt` and one more output ``{of}_tangent`` per `of`.
    """
    d = _Derivation(model, wrt, of)
    seeds = {}
    for name, value in d.wrt.items():
        seeds[value] = d.input(value, f"{name}_tangent")
        d.signature.input_tangents[name] = seeds[value].name
    found = forward(d.builder, d.nodes, seeds, list(d.of.values()))
    for name, value in d.of.items():
        t = found.get(value)
        if t is None:
            t = d.builder.zeros_like(d.builder.var(d.builder.now(value)))
        d.signature.output_tangents[name] = d.output(t, f"{name}_tangent", value)
    return d.close()


def value_and_grad(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """The model with the gradient of the sum of `of` as further outputs ``{wrt}_grad``.

    For a scalar `of` this is its gradient; for others that of the sum of all their elements.
    """
    d = _Derivation(model, wrt, of)
    d.pull_back({v: d.builder.full_like(d.builder.var(v), 1) for v in d.of.values()})
    return d.close()


def grad(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """As `value_and_grad`, with the gradients as the only outputs (the inputs stay as they are)."""
    d = _Derivation(model, wrt, of)
    seeds = {v: d.builder.full_like(d.builder.var(v), 1) for v in d.of.values()}
    d.graph.outputs.clear()
    d.pull_back(seeds)
    return d.close()


def _listed(names: Names) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names)
    if not listed:
        raise BadInput("no name given")
    return list(dict.fromkeys(listed))


def _named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    values = {v.name: v for v in graph.inputs} | dict(graph.initializers)
    values |= {v.name: v for node in graph for v in node.outputs if v.name}
    return values  # type: ignore[return-value]


def _float_value(name: str, values: dict[str, ir.Value], role: str) -> ir.Value:
    if name not in values:
        raise UnknownName(name, values, "value")
    value = values[name]
    if not is_differentiable(value):
        raise BadInput(f"`{role}` {name!r} is a tensor of {value.dtype}; only float values have derivatives")
    return value


