"""Compiled functions: traced once for the shapes of their arguments, and run as one graph on ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad._later import without_collection
from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.bodies import TracedBody, refuse_custom, trace
from onnxgrad.eager.core.cache import Cache
from onnxgrad.eager.core.executable import Executable, model_of
from onnxgrad.eager.core.plans import formal, new_builder
from onnxgrad.eager.core.tape import exporting
from onnxgrad.eager.models import EagerModel
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.cleanup import end_derivation
from onnxgrad.ir.subgraphs import give
from onnxgrad.transforms.vmap import vmap as vmap_model

#: How many shapes of arguments a compiled function is kept for.
MOST_SHAPES = 64
_FLOATS = (float, np.floating)  # of which 0.0 and -0.0 are equal, and NaN to none


def graph_model(
    operands: Sequence[np.ndarray], operators: Sequence[Any], write: Callable[[Builder, list[Var]], Sequence[Var]]
) -> ir.Model:
    """A model of inputs like `operands`, whose outputs `write` writes.

    Args:
        operands: arrays of the dtypes and shapes of the inputs.
        operators: the primitives that `write` uses, which decide the opset.
        write: a function of a builder and the inputs.
    """
    b = new_builder(operators)
    give(b, write(b, [formal(b, x, "in") for x in operands]))
    end_derivation(b)
    return model_of(b.graph)


class _Compiled:
    """A function for one structure of its arguments.

    Attributes:
        output: the result of the traced call, as a tree.
        custom: whether its graph lacks a custom derivative.
    """

    def __init__(self, body: TracedBody) -> None:
        self._run = Executable(_closed_model(body))
        self.output = trees.mapped_leaves(lambda _: 0, body.output)  # without the tape
        self.custom = body.custom

    @functools.cached_property
    def model(self) -> EagerModel:
        """The graph as a function on the tape."""
        return EagerModel(self._run.model)

    def __call__(self, operands: Sequence[Array]) -> Any:
        """The result, as a tree."""
        if not exporting.get() and all(x._node is None for x in operands):
            results: Sequence[Array] = [Array(y) for y in self._run([x._data for x in operands])]
        else:
            results = list(self.model.results(tuple(self._run.names), operands).values())
        return trees.rebuilt(self.output, results)


def _closed_model(body: TracedBody) -> ir.Model:
    """The graph of a body. Its inputs are its parameters and the captured arrays on the tape; others are constants."""
    operands = [np.asarray(s.value if hasattr(s, "value") else s) for s in body.sources]
    count = body.count

    def write(b: Builder, inputs: list[Var]) -> list[Var]:
        rest = iter(inputs[count:])
        captured = [next(rest) if x._node is not None else b.const(x._data) for x in body.captured]
        return body.write(b, [*inputs[:count], *captured])

    traced = [x for x, y in zip(operands[count:], body.captured) if y._node is not None]
    return graph_model([*operands[:count], *traced], [n.op for n in body.program.nodes], write)


def jit(f: Callable[..., Any], static_argnums: int | Sequence[int] = ()) -> Callable[..., Any]:
    """`f`, compiled: traced once for the shapes and dtypes of its arguments, and run as one graph on ONNX Runtime.

    ``jit(grad(f))``, ``grad(jit(f))``, ``jit(hessian(f))`` and so on all work. Python code of `f` runs in the first
    call with arguments of a structure only; what it reads besides its arguments is a constant, unless it is a variable
    of an enclosing transform. Values of arrays cannot be read in Python: use `cond`, `while_loop`, `fori_loop`, `scan`
    and `map`, or ``numpy.where``. Numbers are arrays of float64 or int64, as in the other transforms.

    Args:
        f: a function of arrays or containers of arrays.
        static_argnums: positions of arguments that are constants: `f` is compiled again for each value. They must be
            hashable. Arguments by name that are hashable (numbers, not arrays) are constants as well.

    Returns:
        A function of the same arguments.

    Raises:
        BadInput: (when it is called) an operation has no form in ONNX.
        NotDifferentiable: `f` reads a value of its arguments in Python.
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    made: Cache = Cache(MOST_SHAPES)

    @functools.wraps(f)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        names = {i % len(args) for i in static if -len(args) <= i < len(args)} | {
            n for n in kwargs if _is_hashable(kwargs[n])
        }
        fixed = {n: a for n, a in given.items() if n in names}
        free = {n: a for n, a in given.items() if n not in names}
        if not _is_hashable(tuple(fixed.values())):
            raise BadInput("arguments of `static_argnums` must be hashable\n  hint: a tuple for a list")
        given_leaves = [x for _, x in trees.leaves(free)]
        is_plain = not exporting.get() and not any(isinstance(x, Array) and x._node is not None for x in given_leaves)
        leaves = [_borrow(x) if is_plain else as_array(x) for x in given_leaves]
        constants = tuple((n, type(a), repr(a) if isinstance(a, _FLOATS) else a) for n, a in fixed.items())
        key = (trees.structure(free), tuple([(x._data.dtype, x._data.shape) for x in leaves]), constants)

        def call(free: dict[int | str, Any]) -> Any:
            whole = fixed | free
            return f(*(whole[i] for i in range(len(args))), **{n: whole[n] for n in kwargs})

        call.__name__ = getattr(f, "__name__", "the function")

        @without_collection()
        def build() -> tuple[_Compiled, list[Array]]:
            body = trace(call, (free,), [x._data for x in leaves])
            return _Compiled(body), [x for x in body.captured if x._node is not None]

        run: _Compiled | None = made.peek(key)
        captured: list[Array] = []
        if run is None:
            run, captured = fresh = build()
            if not captured:  # else of variables of an enclosing transform: others in the next call
                made.get(key, lambda: fresh[0])
        if captured:
            leaves = [as_array(x) for x in given_leaves]
        if run.custom and (exporting.get() or any(x._node is not None for x in (*leaves, *captured))):
            return f(*args, **kwargs)  # whose derivative a graph does not have
        return run([*leaves, *captured])

    return compiled


def _borrow(x: Any) -> Array:
    """`x` as an array that is not kept, so that large ones need no copy."""
    return Array(x) if type(x) is np.ndarray and x.dtype.isnative else as_array(x)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def vmap(f: Callable[..., Any], in_axes: Any = 0, out_axes: int = 0) -> Callable[..., Any]:
    """`f` over a batch: each leaf of its arguments has one more axis, and so has each leaf of the result.

    The function is traced for one row, and its graph is batched: products, convolutions and elementwise operations
    process all rows at once (see `onnxgrad.vmap`).

    Args:
        f: a function of arrays or containers of arrays.
        in_axes: the batch axis of all arguments, or of each argument in a tuple; None: the argument is the same for
            all rows. For an argument that is a container, also a container of axes.
        out_axes: the batch axis of the results.

    Returns:
        A function of the same arguments. Arguments by name have their rows along the first axis.

    Raises:
        BadInput: (when it is called) no argument has a batch axis, or their numbers of rows differ.
    """
    made: Cache = Cache(MOST_SHAPES)

    @functools.wraps(f)
    def batched(*args: Any, **kwargs: Any) -> Any:
        axes = list(in_axes) if isinstance(in_axes, (tuple, list)) else [in_axes] * len(args)
        if len(axes) != len(args):
            raise BadInput(f"in_axes has {len(axes)} entries for {len(args)} arguments")
        pairs = [pair for a, axis in zip([*args, kwargs], [*axes, 0]) for pair in _axes_of_leaves(a, axis)]
        leaves = [(as_array(x), axis) for x, axis in pairs]
        for x, axis in leaves:
            if axis is not None and not -x.ndim <= axis < x.ndim:
                raise BadInput(f"in_axes names axis {axis} of an array of shape {x.shape}")
        rows = {x.shape[axis] for x, axis in leaves if axis is not None}
        if len(rows) != 1:
            raise BadInput(
                f"the arguments have {', '.join(map(str, sorted(rows)))} rows"
                if rows
                else "no argument has a batch axis"
            )
        (count,) = rows
        examples = [x._data if axis is None else _row(x._data, axis) for x, axis in leaves]
        call = functools.wraps(f)(lambda args, kwargs: f(*args, **kwargs))
        body = trace(call, (args, kwargs), examples)
        if not count:
            shapes = [(y.shape, y.dtype) for y in body.results]
            empty = [np.zeros((*s[: (at := out_axes % (len(s) + 1))], 0, *s[at:]), dtype) for s, dtype in shapes]
            return trees.rebuilt(body.output, [Array(y) for y in empty])
        captured = body.captured
        key = (body.key, tuple(axis if axis is None else axis % x.ndim for x, axis in leaves), count, out_axes)

        def build() -> EagerModel:
            inputs = [*examples, *(x._data for x in captured)]
            model = graph_model(inputs, [n.op for n in body.program.nodes], body.write)
            names = [v.name or "" for v in model.graph.inputs]
            mapped: dict[str, int | None] = dict.fromkeys(names)
            mapped |= {n: axis if axis is None else axis % x.ndim for n, (x, axis) in zip(names, leaves)}
            return EagerModel(vmap_model(model, mapped, out_axes, axis_size=count), body.custom)

        operands = [*(x for x, _ in leaves), *captured]
        refuse_custom([body], operands)
        model = made.get(key, build)
        results = model.results(tuple(model.inputs), operands)
        return trees.rebuilt(body.output, list(results.values()))

    return batched


def _axes_of_leaves(tree: Any, axis: Any) -> list[tuple[Any, int | None]]:
    """The leaves of an argument, each with its batch axis; `axis` may be a container like `tree`."""
    if axis is None or isinstance(axis, int):
        return [(x, axis) for _, x in trees.leaves(tree)]
    if not trees.is_leaf(tree):
        children, axes = trees.children(tree), trees.children(axis)
        if type(axis) is type(tree) and dict(axes).keys() == dict(children).keys():
            return [pair for step, child in children for pair in _axes_of_leaves(child, dict(axes)[step])]
    raise BadInput("an entry of in_axes is an axis, None, or a container of these like the argument")


def _row(x: np.ndarray, axis: int) -> np.ndarray:
    """The first row, or zeros where there is none."""
    shape = [n for a, n in enumerate(x.shape) if a != axis % x.ndim]
    return np.take(x, 0, axis) if x.shape[axis] else np.zeros(shape, x.dtype)
