"""A model as a pure function of a list of arrays, with a pullback that is one as well."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName, ZeroDerivative
from onnxgrad.function import Function
from onnxgrad.model_io import signature
from onnxgrad.model_io.open import AnyModel
from onnxgrad.runtime import Options, Session
from onnxgrad.transforms.first_order import jvp, vjp


class Call:
    """Arrays in, arrays out, by position.

    Attributes:
        model: what runs.
        inputs: names of the arguments.
        outputs: names of the results.
    """

    def __init__(
        self, model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], options: Options | None = None
    ) -> None:
        self.model, self.inputs, self.outputs = model, list(inputs), list(outputs)
        self.options = options or Options()
        self._values = {v.name or "": v for v in (*model.graph.inputs, *model.graph.outputs)}
        self._shapes: dict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = {}
        self._lock = threading.RLock()

    @classmethod
    def of(cls, model: AnyModel, options: Options | None = None, weights: Sequence[str] = ()) -> Call:
        """`model` as it is called: its inputs, and then the initializers `weights`, which become inputs.

        Raises:
            UnknownName: there is no such initializer.
        """
        opened = Function(model).model.clone()
        graph = opened.graph
        for value in [v for v in graph.inputs if v.name in graph.initializers and v.name not in weights]:
            graph.inputs.remove(value)  # a default value is a constant here
        given = [v.name or "" for v in graph.inputs if v.name not in graph.initializers]
        for name in weights:
            if name not in graph.initializers:
                raise UnknownName(name, graph.initializers, "initializer")
            value = graph.initializers.pop(name)
            value.const_value = None
            if value not in graph.inputs:
                graph.inputs.append(value)
        return cls(opened, [*given, *weights], [v.name or "" for v in graph.outputs], options)

    def dtype(self, name: str) -> np.dtype:
        """The dtype of an argument or result. Raises BadInput if the model does not declare it."""
        found = self._values[name].dtype
        if found is None:
            raise BadInput(f"the model declares no dtype for {name!r}")
        return found.numpy()

    def is_float(self, name: str) -> bool:
        """Whether it has a derivative."""
        return bool(np.issubdtype(self.dtype(name), np.floating))

    @cached_property
    def session(self) -> Session:
        """What runs the model."""
        return Session(self.model, self.options)

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results for these arguments."""
        with self._lock:
            session = self.session
        found = session.run(dict(zip(self.inputs, arrays, strict=True)), self.outputs)
        return [found[name] for name in self.outputs]

    def shapes(self, given: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The shapes of the results for arguments of these shapes: those of a run on zeros."""
        key = tuple(tuple(map(int, shape)) for shape in given)
        if key not in self._shapes:
            zeros = [np.zeros(shape, self.dtype(name)) for name, shape in zip(self.inputs, key, strict=True)]
            self._shapes[key] = [a.shape for a in self(zeros)]
        return self._shapes[key]

    @property
    def float_inputs(self) -> list[str]:
        """The arguments that results can be differentiated with respect to."""
        return [n for n in self.inputs if self.is_float(n)]

    @property
    def float_outputs(self) -> list[str]:
        """The results that have cotangents."""
        return [n for n in self.outputs if self.is_float(n)]

    @cached_property
    def pullback(self) -> Call:
        """(arguments, cotangents of `float_outputs`) to cotangents of `float_inputs`; it has a pullback itself.

        Raises:
            NotDifferentiable: an operator on the way has no derivative.
        """
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", ZeroDerivative)  # all gradients are asked for, wanted or not
            derived = vjp(self.model, wrt=self.float_inputs, of=self.float_outputs)
            names = signature(derived)
            cotangents = [names.cotangents[n] for n in self.float_outputs]
            gradients = [names.gradients[n] for n in self.float_inputs]
            return Call(derived, [*self.inputs, *cotangents], gradients, self.options)

    @cached_property
    def pushforward(self) -> Call:
        """(arguments, tangents of `float_inputs`) to tangents of `float_outputs`; it has a pushforward itself.

        Raises:
            NotDifferentiable: an operator on the way has no derivative.
        """
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", ZeroDerivative)
            derived = jvp(self.model, wrt=self.float_inputs, of=self.float_outputs)
            names = signature(derived)
            tangents = [names.tangents[n] for n in (*self.float_inputs, *self.float_outputs)]
            moved = len(self.float_inputs)
            return Call(derived, [*self.inputs, *tangents[:moved]], tangents[moved:], self.options)


def weights_of(model: AnyModel, trainable: bool | Sequence[str]) -> Mapping[str, np.ndarray]:
    """The initializers that are trained, by name: all floats of more than one number, none, or those named."""
    opened = model if isinstance(model, ir.Model) else Function(model).model
    held = {n: v.const_value for n, v in opened.graph.initializers.items() if v.const_value is not None}
    if trainable is True:
        return {n: t.numpy() for n, t in held.items() if t.dtype.is_floating_point() and t.size > 1}
    for name in trainable or ():
        if name not in held:
            raise UnknownName(name, held, "initializer")
    return {n: held[n].numpy() for n in trainable or ()}
