"""Training operators written out: Gradient by reverse mode, optimizers by their formulas.

BatchNormalization in training mode is given private statistics on the way (see `batchnorm`), also where
a rule has emitted it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Var
from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.names import described
from onnxgrad.lower.optimizers import KINDS, update
from onnxgrad.model_io import AnyModel, Opened, open_model
from onnxgrad.training.graph.batchnorm import trains, with_private_statistics
from onnxgrad.training.graph.rounding import through_rounding
from onnxgrad.training.spec.training_info import MutableInputs
from onnxgrad.transforms.gradient_lowering import WithoutGradients
from onnxgrad.transforms.gradient_node import DOMAIN, bind, is_gradient


def open_bound(model: ir.Model, constants: Collection[str] = ()) -> Opened:
    """`model` itself opened, every Gradient in it bound to the values that it names (see `gradients.bind`)."""
    return open_model(model, first=functools.partial(bind, constants=constants), own=True)


class Lowered(WithoutGradients):
    """A graph without operators of the training domain, and a map of the values that it had."""

    def __init__(self, model: ir.Model) -> None:
        #: the BatchNormalization nodes whose statistics are their own
        self._private: set[ir.Node] = set()
        with through_rounding(model):
            super().__init__(model)

    def _belongs(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN

    def _is_due(self, node: ir.Node) -> bool:
        return self._holds(node) or self._shares_statistics(node)

    def _shares_statistics(self, node: ir.Node) -> bool:
        return trains(node) and node not in self._private

    def _replacement(self, node: ir.Node) -> Sequence[Var | None] | None:
        if self._shares_statistics(node):
            with self.builder.record() as written:
                new = with_private_statistics(self.builder, node, len(self._private))
            self._private.update(n for n in written if trains(n))
            return new
        if node.domain == DOMAIN and node.op_type in KINDS:
            return update(self.builder, node, shortest=True)
        if node.domain == DOMAIN and not is_gradient(node):
            raise BadInput(f"{described(node)}: there is no operator {node.op_type!r} in {DOMAIN}")
        return super()._replacement(node)


class Opening:
    """A model prepared for `write_out`: its Gradients are bound, and values that training changes are no constants.

    Args:
        model: as of `open_model`.
        variables: names of further initializers that are no constants.
        first: what else sees the model as it was written, before anything is done with it; gives further `variables`.
    """

    def __init__(
        self,
        model: AnyModel,
        variables: Collection[str] = (),
        first: Callable[[ir.Model], Collection[str]] = lambda private: (),
    ) -> None:
        def prepare(private: ir.Model) -> None:
            names = {*variables, *first(private)}
            bind(private, names)
            self._inputs = MutableInputs(private.graph, names)

        self.opened = open_model(model, prepare)

    def write_out(self, reserved: Collection[str] = (), read: Collection[str] = ()) -> None:
        """Lower the main graph in place; it keeps its outputs under their names, and the values called `read`.

        No new value gets a `reserved` name.
        """
        graph = self.opened.model.graph
        names = [v.name or "" for v in graph.outputs]
        declared = [(v.type, v.shape) for v in graph.outputs]
        lowered = Lowered(self.opened.model)
        lowered.builder.names.reserve(reserved)
        graph.outputs.clear()
        for name, (held, shape) in zip(names, declared):
            value = lowered.named(name)  # an input may be an output directly
            value.type, value.shape = value.type or held, shape if value.shape is None else value.shape
            graph.outputs.append(value)
        finish(graph, [lowered.named(name) for name in sorted({*read} & lowered.values.keys())])
        self._inputs.restore(graph)

    def close(self) -> Any:
        """The model in the kind that came in."""
        self.opened.model.opset_imports.pop(DOMAIN, None)
        return self.opened.close()


def lowered_graph(model: AnyModel) -> Any:
    """`model`, which has no training information, with its training operators written out."""
    opening = Opening(model)
    opening.write_out()
    return opening.close()
