"""A model under derivation: the parts that grad, vjp, jvp and transforms on them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad import control_flow  # noqa: F401  (it fills the registry)
from onnxgrad import rules as _rules  # noqa: F401
from onnxgrad.batching.directions import Batched, vmapped
from onnxgrad.engine import forward, reverse
from onnxgrad.engine import function_calls as _calls  # noqa: F401  (it registers the rule of calls)
from onnxgrad.engine.activity import prepare
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.ir.graph import ancestors, named_values
from onnxgrad.model_io import AnyModel, Opened, Signature
from onnxgrad.model_io.local_functions import worth_keeping
from onnxgrad.model_io.open import Keep, keep_no_function
from onnxgrad.rules.registry import registry
from onnxgrad.transforms.gradient_lowering import open_lowered
from onnxgrad.transforms.keep_functions import Attempt
from onnxgrad.transforms.select_values import Names, default_of, float_values, of_values
from onnxgrad.transforms.zero_derivatives import warn_of_constant_sums, warn_unconnected


def check_rank(value: ir.Value, name: str | None = None) -> int:
    """The number of axes of `value`. Raises BadInput, about `name` or its own name, if it is not known."""
    if value.shape is None:
        hint = "declare its shape in the model's value_info"
        raise BadInput(f"the rank of {name or value.name!r} is not known\n  hint: {hint}")
    return len(value.shape)


class Derivation:
    """One model being derived: resolves names, adds inputs and outputs, cleans up, records the signature."""

    def __init__(
        self,
        model: AnyModel,
        wrt: Names,
        of: Names | None,
        first: Callable[[ir.Model], None] | None = None,
        containers: bool = False,
        attempt: Attempt | None = None,
    ) -> None:
        """Open `model`; with `containers`, `wrt` and `of` may be sequences and optionals of float tensors.

        With an `attempt`, large local functions stay functions.
        """
        if registry.estimating:  # an estimator looks at the producer of a quantized number
            attempt = None
        try:
            self._open(model, wrt, of, first, containers, keep=keep_no_function if attempt is None else worth_keeping)
        except BadInput:
            if not hasattr(self, "opened") or self.opened.functions is None:
                raise
            self._open(model, wrt, of, first, containers, keep=keep_no_function)  # a name may be one inside a function
        kept = self.opened.functions
        if attempt is not None and kept is not None:
            attempt.kept = attempt.kept or any(node in kept for node in ancestors(self.graph, self.of.values()))
        self.signature = Signature()

    def _open(
        self,
        model: AnyModel,
        wrt: Names,
        of: Names | None,
        first: Callable[[ir.Model], None] | None,
        containers: bool,
        keep: Keep,
    ) -> None:
        """Open `model` and find the values that `wrt` and `of` name."""
        self.opened: Opened = open_lowered(model, first, keep=keep)
        self.graph = self.opened.model.graph
        values = named_values(self.graph)
        self.wrt = float_values(wrt, values, "wrt", containers)
        noting = self.opened.kind is ir.Model
        self.builder = Builder(self.graph, infer=self.opened.inference, noting=noting)
        self.of = default_of(self.graph, containers) if of is None else of_values(of, values, self.builder, containers)
        self.builder.names.reserve(self.opened.training)
        self.nodes = list(self.graph)
        self.primal = set(values)

    def input(self, like: ir.Value, name: str, directions: int | str | None = None) -> Var:
        """A new graph input with the type and shape of `like`; with `directions`, as many of it in a stack."""
        if isinstance(like.type, ir.TensorType):  # a graph input must declare its number of axes
            check_rank(like)
        shape = like.shape
        if shape is not None and directions is not None:
            shape = ir.Shape([directions, *shape])
        value = ir.Value(name=self.builder.names.exactly(identifier(name)), type=like.type, shape=shape)
        self.graph.inputs.append(value)
        return self.builder.var(value)

    def replaced(self, value: ir.Value, name: str, shape: ir.Shape | None = None) -> Var:
        """An input in place of the input `value`, which is no input any more; `name` is a stem for a new name."""
        new = ir.Value(name=value.name, type=value.type, shape=shape or value.shape)
        value.name = self.builder.names.fresh(name)
        self.graph.inputs[:] = [new if v is value else v for v in self.graph.inputs]
        return self.builder.var(new)

    def output(self, var: Var, name: str, like: ir.Value) -> str:
        """Add the graph output `var`, of the type and shape of `like`. Returns its name."""
        value = var.value
        if value.producer() is None or value.is_graph_output() or value.name in self.primal:
            var = self.builder.copy(value)
        var.value.type = var.value.type or like.type
        var.value.shape = var.value.shape if var.value.shape is not None else like.shape
        var.value.name = self.builder.names.exactly(identifier(name))
        self.graph.outputs.append(var.value)
        return var.value.name

    def zeros(self, value: ir.Value) -> Var:
        """The derivative of, or by, `value` where nothing connects them."""
        return self.builder.zeros_like(self.builder.var(self.builder.now(value)))

    def derivatives_of(self, derivatives: Mapping[ir.Value, Var], of: Mapping[str, ir.Value]) -> list[Var]:
        """The derivatives of the values `of`; zero, with a warning, for a value that nothing connects."""
        for name, value in of.items():
            if value not in derivatives:
                warn_unconnected(name, self.wrt, self.of, of is not self.wrt, self.nodes, self.builder)
        return [derivatives.get(v) or self.zeros(v) for v in of.values()]

    def pull_back(self, seeds: Mapping[ir.Value, Var]) -> None:
        """Add the gradient outputs."""
        warn_of_constant_sums(self.of)
        gradients = reverse(self.builder, self.nodes, seeds, list(self.wrt.values()))
        self.add_gradients(self.derivatives_of(gradients, self.wrt))

    def add_gradients(self, gradients: Sequence[Var]) -> None:
        """Add the gradient outputs with these values."""
        for (name, value), g in zip(self.wrt.items(), gradients):
            self.signature.gradients[name] = self.output(g, f"{name}_grad", value)

    def pull_cotangents(self, directions: int | str | None = None) -> list[Var]:
        """Add inputs for cotangents of `of`, and the gradient outputs; the inputs."""
        ends, wrt = list(self.of.values()), list(self.wrt.values())
        seeds = [self.input(v, f"{name}_cotangent", directions) for name, v in self.of.items()]
        self.signature.cotangents = {name: seed.name for name, seed in zip(self.of, seeds)}

        def write(slices: Sequence[Var]) -> list[Var]:
            return self.derivatives_of(reverse(self.builder, list(self.graph), dict(zip(ends, slices)), wrt), self.wrt)

        self.add_gradients(write(seeds) if directions is None else self._batch(seeds, write, self.wrt, ends))
        return seeds

    def tangent_inputs(self, directions: int | str | None = None) -> dict[ir.Value, Var]:
        """An input for the tangent of each `wrt`, by value."""
        seeds = {v: self.input(v, f"{name}_tangent", directions) for name, v in self.wrt.items()}
        self.signature.input_tangents = {name: seeds[v].name for name, v in self.wrt.items()}
        return seeds

    def add_products(self, products: Mapping[ir.Value, Var], kind: str) -> None:
        """Add the outputs of products with a vector, ``{wrt}_{kind}``; zero for a `wrt` without one."""
        for name, value in self.wrt.items():
            product = products.get(value) or self.zeros(value)
            self.signature.products[name] = self.output(product, f"{name}_{kind}", value)

    def push_tangents(self, directions: int | str | None = None) -> list[Var]:
        """Add inputs for tangents of `wrt`, and outputs for those of `of`; the inputs."""
        ends, wrt = list(self.of.values()), list(self.wrt.values())
        seeds = list(self.tangent_inputs(directions).values())

        def write(slices: Sequence[Var]) -> list[Var]:
            return self.derivatives_of(forward(self.builder, list(self.graph), dict(zip(wrt, slices)), ends), self.of)

        tangents = write(seeds) if directions is None else self._batch(seeds, write, self.of, ends)
        for (name, value), t in zip(self.of.items(), tangents):
            self.signature.output_tangents[name] = self.output(t, f"{name}_tangent", value)
        return seeds

    def lowered(self, of: Sequence[ir.Value]) -> list[ir.Node]:
        """All nodes, after every lowering: values that shapes are taken from must not be replaced meanwhile."""
        prepare(list(self.graph), list(self.wrt.values()), of, self.builder)
        return list(self.graph)

    def _batch(
        self,
        seeds: Sequence[Var],
        write: Callable[[Sequence[Var]], list[Var]],
        likes: Mapping[str, ir.Value],
        of: Sequence[ir.Value],
    ) -> list[Var]:
        for name, value in likes.items():
            check_rank(value, name)
        self.lowered(of)
        results = [Batched(self.builder.var(self.builder.now(v))) for v in likes.values()]
        return vmapped(self.builder, seeds, write, results)

    def over_slices(
        self,
        values: Sequence[ir.Value],
        columns: Sequence[Var],
        results: list[Var],
        likes: Iterable[Var],
        axis: int | None = None,
    ) -> list[Var]:
        """`results`, each like one of `likes`, for every slice of `columns` in the place of `values`, stacked.

        With an `axis`, a slice gets a new axis of length 1 there.
        """

        def write(slices: Sequence[Var]) -> list[Var]:
            for value, piece in zip(values, slices):
                new = piece if axis is None else self.builder.Unsqueeze(piece, [axis])
                new.value.shape = value.shape
                value.replace_all_uses_with(new.value)
            self.graph.sort()
            return results

        stacks = vmapped(self.builder, columns, write, [Batched(x) for x in likes])
        self.graph.sort()
        return stacks

    def refuse_computed(self) -> None:
        """Raise BadInput unless every `wrt` is an input of the model."""
        for name, value in self.wrt.items():
            if not value.is_graph_input() or value.is_initializer():
                raise BadInput(f"`wrt` {name!r} is no input of the model")

    def ones(self) -> dict[ir.Value, Var]:
        """The seeds for which the cotangent of `wrt` is the gradient of the sum of `of`."""
        return {v: self.builder.full_like(self.builder.var(v), 1) for v in self.of.values()}

    def close(self) -> Any:
        """Clean up; the derived model in the caller's kind."""
        self.opened.finish(self.builder)
        self.signature.store(self.opened.model)
        self.builder.forget()
        self.nodes = []
        return self.opened.close()
