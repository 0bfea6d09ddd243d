"""ONNX models as functions on the tape: a model is one operation, differentiated node by node.

The forward run also returns the residuals that a backward pass reads, so the model runs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from onnxgrad._later import without_collection
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.cache import Cache
from onnxgrad.eager.core.executable import Executable
from onnxgrad.eager.core.plans import GraphCall, Pullback
from onnxgrad.eager.core.recording import record_several
from onnxgrad.eager.core.tape import is_differentiated
from onnxgrad.eager.xp.dtypes import cast
from onnxgrad.errors import BadInput, NotDifferentiable, UnknownName
from onnxgrad.function import Function
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import into_input, required_inputs
from onnxgrad.model_io import AnyModel, signature
from onnxgrad.runtime.feeds import bind
from onnxgrad.transforms.gradient_lowering import open_lowered
from onnxgrad.transforms.linearize import split_vjp


class EagerModel:
    """A model as a function of arrays, which can be called inside a function to differentiate.

    Arguments are positional in the order of the model's inputs, or by name. A weight can be passed by name as well, in
    place of its stored value, and then has a derivative: ``net(x, **weights)``. A single output is returned as an
    array, several as a dict by name.

    Attributes:
        inputs: the names of the inputs.
        parameters: the float weights of the model, by name.
    """

    def __init__(self, model: AnyModel | Function, custom: bool = False) -> None:
        opened = open_lowered(model.model if isinstance(model, Function) else model)
        self._model = opened.model
        graph = self._model.graph
        self.inputs = [v.name or "" for v in required_inputs(graph)]
        self.parameters = {
            name: Array(v.const_value.numpy())
            for name, v in graph.initializers.items()
            if v.const_value is not None and v.dtype in FLOATS
        }
        self._custom = custom  # see `Primitive.custom`
        self._made = Cache(64)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            BadInput: the arguments do not fit the model, or it fails on them.
        """
        for name in kwargs:
            if name not in self.inputs and name not in self._model.graph.initializers:
                raise UnknownName(name, [*self.inputs, *self.parameters], "input or weight")
        given = bind(self.inputs, args, kwargs)
        arrays = {name: self._array(name, x) for name, x in given.items()}
        results = self.results(tuple(arrays), list(arrays.values()))
        return next(iter(results.values())) if len(results) == 1 else results

    def results(self, names: tuple[str, ...], operands: Sequence[Array]) -> dict[str, Array]:
        """The outputs by name, given the `operands` of the inputs and weights of these names, in their dtypes."""
        wrt = tuple(n for n, x in zip(names, operands) if is_differentiated(x._node))
        call, run, outputs = self._made.get((names, wrt), lambda: self._make(names, wrt))
        return dict(zip(outputs, record_several(call, operands, run.results(operands))))

    def _array(self, name: str, value: Any) -> Array:
        held = next((v for v in self._model.graph.inputs if v.name == name), None)
        held = held if held is not None else self._model.graph.initializers[name]
        dtype = None if held.dtype is None else held.dtype.numpy()
        x = as_array(value, dtype)
        if dtype is None or x.dtype == dtype:
            return x
        if not np.can_cast(x.dtype, dtype, "same_kind") and not isinstance(value, (int, list, tuple)):
            raise BadInput(f"the argument for {name!r} is {x.dtype}, and the model takes {dtype}")
        return cast(x, dtype)

    @without_collection()
    def _make(self, given: Sequence[str], wrt: Sequence[str]) -> tuple[GraphCall, Executable, list[str]]:
        """The graph with the inputs `given`, which also outputs the residuals of the VJP with respect to `wrt`."""
        model = self._model.clone()
        graph = model.graph
        by_name = {v.name: v for v in graph.inputs} | dict(graph.initializers)
        names = [v.name or "" for v in graph.outputs]
        for name in given:
            if name in graph.initializers:
                into_input(graph, name)
        graph.inputs[:] = [by_name[name] for name in given]
        floats = [name for name in wrt if by_name[name].dtype in FLOATS]
        linear = None
        if floats:
            with suppress(NotDifferentiable):  # raised when the derivative is asked for
                model, linear = split_vjp(model, wrt=floats)
        graph = model.graph
        used = frozenset((n.domain, n.op_type) for n in graph.all_nodes())
        pullback = None if linear is None else Pullback(linear.graph, signature(linear), len(names))
        return GraphCall(graph, (dict(graph.opset_imports), used), pullback, self._custom), Executable(model), names


def from_onnx(model: AnyModel | Function) -> EagerModel:
    """`model` (a path, a ModelProto, an ``onnx_ir.Model`` or a `Function`) as a function of arrays."""
    return EagerModel(model)
