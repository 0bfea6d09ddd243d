"""Model in, model out: grad, value_and_grad, vjp, jvp."""

from __future__ import annotations

import functools
import gc
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import onnx_ir as ir

from onnxgrad import control_flow  # noqa: F401  (it fills the registry)
from onnxgrad import rules as _rules  # noqa: F401
from onnxgrad.batching.directions import Stacked, along
from onnxgrad.custom import CustomRule, custom_rules
from onnxgrad.engine import forward, reverse
from onnxgrad.engine.activity import prepare, stoppers
from onnxgrad.engine.function_calls import CALL
from onnxgrad.errors import BadInput, NotDifferentiable, RuleError, UnknownName, ZeroDerivative
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.graph import ancestors, named_values
from onnxgrad.ir.index_expressions import with_parts
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.model_io import AnyModel, Opened, Signature
from onnxgrad.model_io.declared_shapes import undeclared
from onnxgrad.model_io.local_functions import worth_keeping
from onnxgrad.model_io.open import Keep, nothing
from onnxgrad.model_io.validity import blamed
from onnxgrad.rules.constant_sums import constant_total
from onnxgrad.rules.registry import registry
from onnxgrad.transforms.gradient_lowering import open_lowered

Names = str | Sequence[str]
Path = str | os.PathLike
Derive = TypeVar("Derive", bound=Callable[..., Any])


class Derivation:
    """One model being derived: resolves names, adds inputs and outputs, cleans up, records the signature."""

    def __init__(
        self,
        model: AnyModel,
        wrt: Names,
        of: Names | None,
        first: Callable[[ir.Model], None] | None = None,
        containers: bool = False,
    ) -> None:
        """Open `model`; with `containers`, `wrt` and `of` may be sequences and optionals of float tensors."""
        keeps = _keeping.get() and not registry.estimating  # an estimator looks at what made a quantized number
        try:
            self._open(model, wrt, of, first, containers, keep=worth_keeping if keeps else nothing)
        except BadInput:
            if not hasattr(self, "opened") or self.opened.functions is None:
                raise
            self._open(model, wrt, of, first, containers, keep=nothing)  # a name may be one inside a function
        kept = self.opened.functions
        if kept is not None and any(node in kept for node in ancestors(self.graph, self.of.values())):
            _kept.set(True)
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
        functions = self.opened.functions
        if functions is not None:
            functions.rule = CALL
        self.graph = self.opened.model.graph
        values = named_values(self.graph)
        self.wrt = float_values(wrt, values, "wrt", containers)
        self.builder = Builder(self.graph, infer=Inference.of(self.graph, functions))
        self.of = default_of(self.graph, containers) if of is None else of_values(of, values, self.builder, containers)
        self.builder.names.reserve(self.opened.training)
        self.nodes = list(self.graph)
        self.primal = set(values)

    def input(self, like: ir.Value, name: str, directions: int | str | None = None) -> Var:
        """A new graph input with the type and shape of `like`; with `directions`, as many of it in a stack."""
        if like.shape is None and isinstance(like.type, ir.TensorType):  # a graph input must say how many axes it has
            hint = "declare its shape in the model's value_info"
            raise BadInput(f"the rank of {like.name!r} is not known\n  hint: {hint}")
        value = ir.Value(
            name=self.builder.names.exactly(identifier(name)),
            type=like.type,
            shape=None
            if like.shape is None
            else ir.Shape([*([] if directions is None else [directions]), *like.shape]),
        )
        self.graph.inputs.append(value)
        return self.builder.var(value)

    def output(self, var: Var, name: str, like: ir.Value) -> str:
        """A new graph output that holds `var`, of the type and shape of `like`; returns its name."""
        value = var.value
        if value.producer() is None or value.is_graph_output() or value.name in self.primal:
            var = self.builder.append(ir.Node("", "Identity", [value]))[0]
        var.value.type = var.value.type or like.type
        var.value.shape = var.value.shape if var.value.shape is not None else like.shape
        var.value.name = self.builder.names.exactly(identifier(name))
        self.graph.outputs.append(var.value)
        return var.value.name

    def zeros(self, value: ir.Value) -> Var:
        """The derivative of, or by, `value` where nothing connects them."""
        return self.builder.zeros_like(self.builder.var(self.builder.now(value)))

    def found(self, derivatives: Mapping[ir.Value, Var], of: Mapping[str, ir.Value]) -> list[Var]:
        """Those of the values `of`, with a warning for each that is zero because nothing leads there."""
        for name, value in of.items():
            if value not in derivatives:
                ends = ", ".join(repr(n) for n in (self.of if of is self.wrt else self.wrt))
                why = stoppers(self.nodes, self.wrt.values(), self.of.values(), self.builder)
                reason = f"nothing but {', '.join(why)} connects them" if why else "nothing connects them"
                kinds = ("gradient of", "with respect to") if of is self.wrt else ("tangent by", "of")
                message = f"the {kinds[0]} {ends} {kinds[1]} {name!r} is zero: {reason}"
                warnings.warn(ZeroDerivative(message, name), stacklevel=7)
        return [derivatives.get(v) or self.zeros(v) for v in of.values()]

    def pull_back(self, seeds: Mapping[ir.Value, Var]) -> None:
        """Add the gradient outputs."""
        for name, value in self.of.items():
            if operator := constant_total(value):
                part = "[0]" if value.shape is not None and len(value.shape) == 1 and name[-1] != "]" else "[:, 0]"
                whole = name.rpartition("[")[0] if name.endswith("]") else name
                hint = f"take one class of it, such as of='{whole or name}{part}', or a loss"
                message = f"the gradient of the sum of {name!r} is zero: rows of a {operator} sum to 1\n  hint: {hint}"
                warnings.warn(ZeroDerivative(message, name), stacklevel=6)
        found = reverse(self.builder, self.nodes, seeds, list(self.wrt.values()))
        self.add_gradients(self.found(found, self.wrt))

    def add_gradients(self, gradients: Sequence[Var]) -> None:
        """Add the gradient outputs, given what they hold."""
        for (name, value), g in zip(self.wrt.items(), gradients):
            self.signature.gradients[name] = self.output(g, f"{name}_grad", value)

    def pull_cotangents(self, directions: int | str | None = None) -> list[Var]:
        """Add inputs for cotangents of `of`, and the gradient outputs; the inputs."""
        ends, wrt = list(self.of.values()), list(self.wrt.values())
        seeds = [self.input(v, f"{name}_cotangent", directions) for name, v in self.of.items()]
        self.signature.cotangents = {name: seed.name for name, seed in zip(self.of, seeds)}

        def write(slices: Sequence[Var]) -> list[Var]:
            return self.found(reverse(self.builder, list(self.graph), dict(zip(ends, slices)), wrt), self.wrt)

        self.add_gradients(write(seeds) if directions is None else self._along(seeds, write, self.wrt, ends))
        return seeds

    def push_tangents(self, directions: int | str | None = None) -> list[Var]:
        """Add inputs for tangents of `wrt`, and outputs for those of `of`; the inputs."""
        ends, wrt = list(self.of.values()), list(self.wrt.values())
        seeds = [self.input(v, f"{name}_tangent", directions) for name, v in self.wrt.items()]
        self.signature.input_tangents = {name: seed.name for name, seed in zip(self.wrt, seeds)}

        def write(slices: Sequence[Var]) -> list[Var]:
            return self.found(forward(self.builder, list(self.graph), dict(zip(wrt, slices)), ends), self.of)

        tangents = write(seeds) if directions is None else self._along(seeds, write, self.of, ends)
        for (name, value), t in zip(self.of.items(), tangents):
            self.signature.output_tangents[name] = self.output(t, f"{name}_tangent", value)
        return seeds

    def lowered(self, of: Sequence[ir.Value]) -> list[ir.Node]:
        """All nodes, after every lowering: values that shapes are taken from must not be replaced meanwhile."""
        prepare(list(self.graph), list(self.wrt.values()), of, self.builder)
        return list(self.graph)

    def _along(
        self,
        seeds: Sequence[Var],
        write: Callable[[Sequence[Var]], list[Var]],
        likes: Mapping[str, ir.Value],
        of: Sequence[ir.Value],
    ) -> list[Var]:
        for name, value in likes.items():
            if value.shape is None:
                hint = "declare its shape in the model's value_info"
                raise BadInput(f"the rank of {name!r} is not known\n  hint: {hint}")
        self.lowered(of)
        results = [Stacked(self.builder.var(self.builder.now(v))) for v in likes.values()]
        return along(self.builder, seeds, write, results)

    def ones(self) -> dict[ir.Value, Var]:
        """The seeds for which the cotangent of `wrt` is the gradient of the sum of `of`."""
        return {v: self.builder.full_like(self.builder.var(v), 1) for v in self.of.values()}

    def close(self) -> Any:
        """Clean up; the derived model in the caller's kind."""
        initializers = self.graph.initializers
        kept = [initializers[n] for n in self.opened.training if n in initializers]
        finish(self.graph, kept, self.builder.names)
        self.signature.store(self.opened.model)
        return self.opened.close()


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector: a derivation makes many objects and no garbage (a third less time)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: Whether a derivation leaves local functions functions, and whether one did.
_keeping: ContextVar[bool] = ContextVar("keeping", default=False)
_kept: ContextVar[bool] = ContextVar("kept", default=False)


def keeping_functions(derive: Derive) -> Derive:
    """Have `derive` leave large local functions functions; where that cannot be, it starts again with all inlined.

    That is where something inside cannot be differentiated (the message then tells the whole path), or where inside
    something is not known that is known from one call: an error is final where no call leads to what is
    differentiated. (Names inside a function are seen when the model is opened, see `Derivation`.)

    A failure over a model that is not valid is told as that (see `onnxgrad.model_io.validity`).
    """

    @functools.wraps(derive)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _set(_keeping, True), _set(_kept, False):
            try:
                return derive(*args, **kwargs)
            except (NotDifferentiable, RuleError, BadInput):
                if not _kept.get():
                    raise
        return derive(*args, **kwargs)

    @functools.wraps(derive)
    def judged(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        with blamed(model):
            try:
                return wrapped(*args, **kwargs)
            except RuleError as e:
                _blame_declarations(e, model, lambda copy: _again(derive, copy, args, kwargs))
                raise

    return judged  # type: ignore[return-value]


def _again(derive: Callable[..., Any], model: ir.Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args:
        derive(model, *args[1:], **kwargs)
    else:
        derive(**{**kwargs, "model": model})


def _blame_declarations(error: RuleError, model: Any, again: Callable[[ir.Model], None]) -> None:
    """Raise BadInput if the derivation that ended in `error` succeeds without what `model` declares about results."""
    copy = undeclared(model)
    if copy is None:
        return
    try:
        again(copy)
    except Exception:
        return
    where = re.search(r"\w+ node '[^']*'", str(error))
    raise BadInput(
        "the shapes that the model declares contradict its operators"
        + (f", which shows at {where.group()}" if where else "")
        + "\n  hint: onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True), or drop its value_info"
    ) from error


@contextmanager
def _set(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _inlining(wanted: bool) -> AbstractContextManager[None]:
    """Inline all functions if that is `wanted`: a call has no form for a stack of directions, what it calls has."""
    return _set(_keeping, _keeping.get() and not wanted)


@without_collection()
@keeping_functions
def vjp(
    model: AnyModel,
    *,
    wrt: Names,
    of: Names | None = None,
    directions: int | str | None = None,
    rules: Sequence[CustomRule | Path] = (),
) -> Any:
    """The model with its pullback: cotangents of `of` in, cotangents of `wrt` out.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of graph inputs, initializers or intermediate float values. Where one depends on
            another, each gets its total derivative.
        of: names of float values, or index expressions on them (``"y[:, 3]"``); default: every float output.
            Cotangents and tangents of a sequence are sequences of the same length, those of an optional are optionals,
            in which nothing stands for zero.
        directions: a number, or a name for one that each run chooses, of cotangents to pull back at once. All of
            them, and all gradients, then have one more axis in front; the primal is computed once.
        rules: derivatives of your own, from `custom_vjp` or `custom_jvp`, or files that hold them.

    Returns:
        A model of the kind that came in (a path gives a ModelProto) with the primal inputs and outputs
        as they are, one more input ``{of}_cotangent`` (shape and dtype of `of`) per `of`, and one more
        output ``{wrt}_grad`` (shape and dtype of `wrt`) per `wrt`; `signature` tells the exact names.
        A `wrt` that `of` does not depend on gets zeros. A model below opset 18 comes back raised to it.

    Warns:
        ZeroDerivative: a derivative is zero, because nothing that has one leads there.

    Raises:
        UnknownName: a name that the model does not have.
        BadInput: a value that is no float, or a model that cannot be read.
        NotDifferentiable: an operator between `wrt` and `of` has no rule or no derivative.
    """
    with custom_rules(*rules), _inlining(directions is not None):
        d = Derivation(model, wrt, of, containers=directions is None)
        d.pull_cotangents(_counted(directions))
        return d.close()


@without_collection()
@keeping_functions
def jvp(
    model: AnyModel,
    *,
    wrt: Names,
    of: Names | None = None,
    directions: int | str | None = None,
    rules: Sequence[CustomRule | Path] = (),
) -> Any:
    """The model with its pushforward: tangents of `wrt` in, tangents of `of` out.

    As `vjp`, with one more input ``{wrt}_tangent`` per `wrt` and one more output ``{of}_tangent`` per `of`.
    With `directions`, all tangents have one more axis in front.
    The tangent of an intermediate `wrt` is added to the one that flows into it from another.
    Arguments and errors are those of `vjp`.
    """
    with custom_rules(*rules), _inlining(directions is not None):
        d = Derivation(model, wrt, of, containers=directions is None)
        d.push_tangents(_counted(directions))
        return d.close()


@without_collection()
@keeping_functions
def value_and_grad(
    model: AnyModel, *, wrt: Names, of: Names | None = None, rules: Sequence[CustomRule | Path] = ()
) -> Any:
    """The model with the gradient of the sum of `of` as further outputs ``{wrt}_grad``.

    For a scalar `of` this is its gradient; for others, that of the sum of all their elements. Arguments, shapes and
    errors are those of `vjp`, but nothing is added to the inputs. The sum of a Softmax is
    constant: its gradient is zero, with a warning.
    """
    with custom_rules(*rules):
        d = Derivation(model, wrt, of, containers=True)
        d.pull_back(d.ones())
        return d.close()


@without_collection()
@keeping_functions
def grad(model: AnyModel, *, wrt: Names, of: Names | None = None, rules: Sequence[CustomRule | Path] = ()) -> Any:
    """As `value_and_grad`, with the gradients ``{wrt}_grad`` as the only outputs (the inputs stay as they are)."""
    with custom_rules(*rules):
        d = Derivation(model, wrt, of, containers=True)
        seeds = d.ones()
        d.graph.outputs.clear()
        d.pull_back(seeds)
        return d.close()


# --- names -----------------------------------------------------------------------------------------


def float_values(
    names: Names, values: Mapping[str, ir.Value], role: str, containers: bool = False
) -> dict[str, ir.Value]:
    """The values of `names` (each once), which must be float tensors of known type; `containers`: or hold such."""
    if not isinstance(names, Iterable):
        raise BadInput(f"`{role}` takes names of values, not {names!r}")
    listed = [names] if isinstance(names, str) else list(names)
    if not listed:
        raise BadInput(f"`{role}` names no value")
    found = {}
    for name in listed:
        if not isinstance(name, str):
            raise BadInput(f"`{role}` takes names of values, not {name!r}")
        if name not in values:
            raise UnknownName(name, values, "value")
        value = found[name] = values[name]
        if value.type is None:
            raise BadInput(f"the type of `{role}` {name!r} is not known\n  hint: declare it in the model's value_info")
        if not is_float(value, containers):
            raise BadInput(f"`{role}` {name!r} is a {_described(value.type)}; only float tensors have derivatives")
    return found


def of_values(
    of: Names, values: Mapping[str, ir.Value], builder: Builder, containers: bool = False
) -> dict[str, ir.Value]:
    """As `float_values`, and of parts such as ``y[:, 3]`` (numpy's basic indexing; a name that holds brackets wins)."""
    named = [of] if isinstance(of, str) or not isinstance(of, Iterable) else of
    return float_values(of, with_parts(builder, named, values), "of", containers)


def default_of(graph: ir.Graph, containers: bool = False) -> dict[str, ir.Value]:
    """All float outputs; `containers`: and sequences and optionals of floats."""
    found = {v.name or "": v for v in graph.outputs if is_float(v, containers)}
    if not found:
        raise BadInput("the model has no float output to differentiate; name a value with `of`")
    return found


def is_float(value: ir.Value, containers: bool = False) -> bool:
    """Whether `value` is a float tensor; `containers`: or a sequence or optional of them."""
    held = value.type
    while containers and isinstance(held, (ir.SequenceType, ir.OptionalType)):
        held = held.elem_type
    return isinstance(held, ir.TensorType) and held.dtype in FLOATS


def _counted(directions: int | str | None) -> int | str | None:
    """`directions`, which is a number from 0 on or a name."""
    wrong = isinstance(directions, bool) or (isinstance(directions, int) and directions < 0) or directions == ""
    if wrong or not isinstance(directions, (int, str, type(None))):
        raise BadInput(f"`directions` is a number or the name of a dimension, not {directions!r}")
    return directions


def _described(held: ir.TypeProtocol) -> str:
    if isinstance(held, ir.TensorType):
        return f"tensor of {held.dtype.name.lower()}"
    return type(held).__name__.removesuffix("Type").lower()
