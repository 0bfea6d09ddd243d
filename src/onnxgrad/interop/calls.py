"""A model as a pure function of a list of arrays, with a pullback that is one as well."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName, ZeroDerivative
from onnxgrad.function import Function, model_bytes, model_of_bytes
from onnxgrad.ir.graph import into_input, required_inputs
from onnxgrad.ir.match import FLOATS
from onnxgrad.model_io import Signature, signature
from onnxgrad.model_io.open import AnyModel
from onnxgrad.runtime import Options, Session
from onnxgrad.training.graph.exported_constants import sort_out
from onnxgrad.training.graph.frozen_norms import is_statistic
from onnxgrad.training.graph.lift_weights import own_weights
from onnxgrad.training.graph.training_mode import statistics
from onnxgrad.transforms.first_order import jvp, vjp


class Call:
    """Arrays in, arrays out, by position.

    Attributes:
        model: the model to run.
        inputs: names of the arguments.
        outputs: names of the results.
        fixed: arguments that nothing is differentiated with respect to.
    """

    def __init__(
        self,
        model: ir.Model,
        inputs: Sequence[str],
        outputs: Sequence[str],
        options: Options | None = None,
        fixed: Collection[str] = (),
    ) -> None:
        self.model, self.inputs, self.outputs, self.fixed = model, list(inputs), list(outputs), frozenset(fixed)
        self.options = options or Options()
        self._values = {v.name or "": v for v in (*model.graph.inputs, *model.graph.outputs)}
        self._shapes: dict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = {}
        self._lock = threading.RLock()

    @classmethod
    def of(
        cls,
        model: AnyModel,
        options: Options | None = None,
        weights: Sequence[str] = (),
        fixed: Collection[str] = (),
    ) -> Call:
        """A call of `model` with its inputs, and then the initializers `weights`, which become inputs.

        Those of the weights that are `fixed` have no derivative.

        Raises:
            UnknownName: there is no such initializer.
        """
        opened = Function(model).model.clone()
        graph = opened.graph
        for value in [v for v in graph.inputs if v.name in graph.initializers and v.name not in weights]:
            graph.inputs.remove(value)  # a default value is a constant here
        given = [v.name or "" for v in required_inputs(graph)]
        for name in weights:
            if name not in graph.initializers:
                raise UnknownName(name, graph.initializers, "initializer")
            into_input(graph, name)
        return cls(opened, [*given, *weights], [v.name or "" for v in graph.outputs], options, fixed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Call:
        """The same call with sessions of its own; the model, which never changes, is shared."""
        return Call(self.model, self.inputs, self.outputs, self.options, self.fixed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model as a file, without sessions."""
        return _unpickle, (model_bytes(self.model), self.inputs, self.outputs, self.options, self.fixed)

    def dtype(self, name: str) -> np.dtype:
        """The dtype of an argument or result. Raises BadInput if the model does not declare it."""
        found = self._values[name].dtype
        if found is None:
            raise BadInput(f"the model declares no dtype for {name!r}")
        return found.numpy()

    def is_float(self, name: str) -> bool:
        """True if the value `name` has a derivative."""
        return name not in self.fixed and ir.DataType.from_numpy(self.dtype(name)) in FLOATS

    @cached_property
    def session(self) -> Session:
        """The session that runs the model."""
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
        derived, names = self._derived(vjp)
        cotangents = [names.cotangents[n] for n in self.float_outputs]
        gradients = [names.gradients[n] for n in self.float_inputs]
        return Call(derived, [*self.inputs, *cotangents], gradients, self.options, self.fixed)

    @cached_property
    def pushforward(self) -> Call:
        """(arguments, tangents of `float_inputs`) to tangents of `float_outputs`; it has a pushforward itself.

        Raises:
            NotDifferentiable: an operator on the way has no derivative.
        """
        derived, names = self._derived(jvp)
        given = [names.tangents[n] for n in self.float_inputs]
        return Call(
            derived, [*self.inputs, *given], [names.tangents[n] for n in self.float_outputs], self.options, self.fixed
        )

    def _derived(self, transform: Callable[..., ir.Model]) -> tuple[ir.Model, Signature]:
        """The derivative with respect to all float inputs, of all float outputs, and its names."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", ZeroDerivative)  # all gradients are asked for, wanted or not
            derived = transform(self.model, wrt=self.float_inputs, of=self.float_outputs)
            return derived, signature(derived)


def _unpickle(data: bytes, *rest: Any) -> Call:
    return Call(model_of_bytes(data), *rest)


def with_own_weights(model: AnyModel, wanted: Collection[str] = ()) -> ir.Model:
    """A copy of `model` in which each weight, and each running statistic, is an initializer of its own, as in training.

    Exporters store equal tensors once: a fresh BatchNormalization's running mean is an Identity of its bias.
    """
    opened = Function(model).model.clone()
    own_weights(opened, wanted)
    return opened


def weights_of(model: AnyModel, trainable: bool | Sequence[str]) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """The initializers that are trained, and the names of running statistics, which are not.

    By default the weights that `attach` trains by default; none, or those named.
    """
    opened = model if isinstance(model, ir.Model) else Function(model).model
    graph = opened.graph
    held = {n: v.const_value for n, v in graph.initializers.items() if v.const_value is not None}
    floats = {n: graph.initializers[n] for n, t in held.items() if t.dtype.is_floating_point()}
    running = {v.name or "" for v in statistics(list(graph))} & floats.keys()
    running |= {n for n in floats if is_statistic(n)}
    if trainable is True:
        read = {v for node in graph.all_nodes() for v in node.inputs}
        names = list(sort_out({n: v for n, v in floats.items() if v in read and n not in running}, list(graph)).weights)
    else:
        names = list(trainable or ())
    for name in names:
        if name not in held:
            raise UnknownName(name, held, "initializer")
    kept = [name for name in floats if name in running and name not in names]
    return {n: held[n].numpy() for n in (*names, *kept)}, kept
