"""Derivatives of Python functions, with the names of HIPS autograd.

A transform calls the function on variables, which leaves a tape; a plan for the structure of the tape gives the
derivative. The plan runs as one operation, which transforms around it see on their tapes: derivatives nest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager import trees
from onnxgrad.eager.array import Array, as_array
from onnxgrad.eager.plans import pull, push
from onnxgrad.eager.tape import Node, Program, carries_derivative, exporting, leaf, program
from onnxgrad.errors import BadInput

Function = Callable[..., Any]
Argnums = int | tuple[int, ...]


class Traced:
    """One call of a function on variables.

    Attributes:
        chosen: the arguments that are differentiated, as one tree.
        variables: their leaves, on the tape.
        output: what came out; with `aux`, the first part of it.
        aux: the second part.
    """

    def __init__(
        self, f: Function, args: Sequence[Any], kwargs: dict[str, Any], argnums: Argnums, has_aux: bool = False
    ) -> None:
        several = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        name = getattr(f, "__name__", "the function")
        for i in several:
            if not -len(args) <= i < len(args):
                raise BadInput(f"`argnums` names argument {i}, and {name} was given {len(args)}")
        picked = [args[i] for i in several]
        self.chosen = picked[0] if isinstance(argnums, int) else tuple(picked)
        primals = [x for i, a in zip(several, picked) for x in trees.float_leaves(a, f"argument {i} of {name}")]
        if not primals:
            raise BadInput(f"argument {argnums} of {name} holds no array")
        self.variables = [Array(x._data, leaf(x._data, x._node)) for x in primals]
        self.leaves: list[Node] = [v._node for v in self.variables if v._node is not None]
        rest = iter(self.variables)
        fresh = list(args)
        for i, a in zip(several, picked):
            fresh[i] = trees.rebuilt(a, [next(rest) for _ in trees.leaves(a)])
        result = f(*fresh, **kwargs)
        self.aux: Any = None
        if has_aux:
            if not isinstance(result, tuple) or len(result) != 2:
                raise BadInput(f"with has_aux, {name} returns a pair; this is a {type(result).__name__}")
            result, self.aux = result
        self.name = name
        self.output = result
        self._ends: list[Array] | None = None
        self._program: Program | None = None
        self._places: list[int | None] = []

    @property
    def ends(self) -> list[Array]:
        """The leaves of the output."""
        if self._ends is None:
            self._ends = [as_array(y) for _, y in trees.leaves(self.output, f"the result of {self.name}")]
        return self._ends

    @property
    def program(self) -> Program:
        """What led from the variables to the ends."""
        if self._program is None:
            nodes = [y._node if carries_derivative(y._data) else None for y in self.ends]
            self._program = program([n for n in nodes if n is not None], self.leaves)
            at = iter(self._program.key[1])
            self._places = [None if n is None else next(at) for n in nodes]
        return self._program

    def scalar(self) -> Array:
        """The output, which must be one float."""
        if not trees.is_leaf(self.output):
            raise BadInput(
                f"{self.name} returned a {type(self.output).__name__}; a gradient is that of one number\n"
                "  hint: has_aux=True for a pair of it and anything else; jacobian for several"
            )
        y = as_array(self.output)
        if y.size != 1:
            raise BadInput(
                f"{self.name} returned an array of shape {y.shape}; a gradient is that of one number\n"
                "  hint: sum or mean of it; elementwise_grad, jacobian or vjp for all its elements"
            )
        if y._node is not None and not carries_derivative(y._data):
            raise BadInput(f"{self.name} returned {y.dtype}, which has no derivative")
        return y

    def detached(self, tree: Any) -> Any:
        """`tree` without the tape of these variables, unless a transform around needs it."""
        outside = self.program.tracked or exporting.get()

        def detach(x: Array) -> Array:
            if x._node is None or outside or program([x._node], self.leaves).tracked:
                return x
            return Array(x._data)

        return trees.mapped(detach, tree)

    def pull_back(self, seeds: Sequence[Array], directions: bool = False) -> list[Array]:
        """The cotangents of the variables, given those of the leaves of the output."""
        found = self.settled(pull_through(self.program, self._places, seeds, directions), seeds)
        count = seeds[0].shape[:1] if directions and seeds else ()
        return [Array(np.zeros(count + x.shape, x.dtype)) if g is None else g for x, g in zip(self.variables, found)]

    def push_forward(self, tangents: Sequence[Array], directions: bool = False) -> list[Array]:
        """The tangents of the leaves of the output, given those of the variables."""
        p = self.program
        if any(n.op.opaque for n in p.nodes):
            found = self._push_by_pulling(tangents, directions)
        else:
            found = push(p, self._places, tangents, directions)
        count = tangents[0].shape[:1] if directions else ()
        found = self.settled(found, tangents)
        return [Array(np.zeros(count + y.shape, y.dtype)) if t is None else t for y, t in zip(self.ends, found)]

    def settled(self, found: Sequence[Array | None], seeds: Sequence[Array]) -> list[Array | None]:
        """`found` without a tape that no transform around needs: derivatives that are Python functions leave one."""
        if self.program.tracked or exporting.get() or any(s._node is not None for s in seeds):
            return list(found)
        return [None if x is None else Array(x._data) for x in found]

    def _push_by_pulling(self, tangents: Sequence[Array], directions: bool) -> list[Array | None]:
        """The pullback is linear in the cotangents; its own pullback, at the tangents, pushes them forward.

        (Townsend 2017, "A new trick for calculating Jacobian vector products".)
        """
        if directions:
            from onnxgrad.eager.shaping import stack

            rows = [self._push_by_pulling([t[i] for t in tangents], False) for i in range(len(tangents[0]))]
            return [None if column[0] is None else stack(column) for column in zip(*rows)]
        zeros = [np.zeros(y.shape, y.dtype) for y in self.ends]
        probes = [Array(z, leaf(z)) for z in zeros]
        pulled = pull_through(self.program, self._places, probes)
        moved = [(g._node, t) for g, t in zip(pulled, tangents) if g is not None and g._node is not None]
        p = program([n for n, _ in moved], [q._node for q in probes if q._node is not None])
        return pull_through(p, p.key[1], [t for _, t in moved])


def pull_through(
    p: Program, places: Sequence[int | None], seeds: Sequence[Array], directions: bool = False
) -> list[Array | None]:
    """The cotangents of the variables of `p`, given those of `places`: by one plan, if no node is opaque."""
    if not any(n.op.opaque for n in p.nodes):
        return pull(p, places, seeds, directions)
    if directions:
        from onnxgrad.eager.shaping import stack

        rows = [pull_through(p, places, [s[i] for s in seeds]) for i in range(len(seeds[0]))]
        return [None if column[0] is None else stack(column) for column in zip(*rows)]
    given = [(p.source(at), s) for at, s in zip(places, seeds) if at is not None]
    return _pull_in_stretches(p, given)  # type: ignore[arg-type]


def _pull_in_stretches(p: Program, given: Sequence[tuple[Node, Array]]) -> list[Array | None]:
    """One plan for each stretch between opaque nodes, whose own derivatives are Python functions."""
    leaves: list[Any] = p.sources[: p.key[0]]
    moving = set(p.nodes) | set(leaves)
    totals: dict[Node, Any] = {}

    def add(node: Node, term: Any) -> None:
        if term is not None and node in moving:
            totals[node] = _sum(totals[node], term) if node in totals else term

    for node, seed in given:
        add(node, seed)
    for stop in [*[n for n in reversed(p.nodes) if n.op.opaque], None]:
        last = -1 if stop is None else stop.serial
        stretch = [n for n in p.nodes if n.serial > last and not n.op.opaque]
        inside = set(stretch)
        results = [n for n in totals if n in inside]
        if results:
            # what the stretch reads of what came before it, in the order of creation
            before = {q for n in stretch for q in n.inputs if type(q) is Node and q in moving and q not in inside}
            sources = sorted(before, key=lambda n: n.serial)
            part = program(results, sources, stretch)
            for source, term in zip(sources, pull(part, part.key[1], [totals.pop(r) for r in results])):
                add(source, term)
            moving -= inside
        if stop is not None and stop in totals:
            for source, term in zip(stop.inputs, stop.op.pull_back(totals.pop(stop))):  # type: ignore[attr-defined]
                if type(source) is Node:
                    add(source, term)
    return [totals.get(x) for x in leaves]


def _sum(a: Any, b: Any) -> Any:
    """The sum of two cotangents; of an operation with several outputs, of each that there is."""
    if isinstance(a, list):
        return [_sum(x, y) if x is not None and y is not None else y if x is None else x for x, y in zip(a, b)]
    return a + b


def _transform(make: Callable[..., Function]) -> Callable[..., Function]:
    """Name what `make` makes after the function that it is made of."""

    @functools.wraps(make)
    def transform(f: Function, *how: Any, **options: Any) -> Function:
        if not callable(f):
            raise BadInput(f"{make.__name__} takes a function, not a {type(f).__name__}; it returns one")
        made = make(f, *how, **options)
        made.__name__ = f"{make.__name__}({getattr(f, '__name__', 'function')})"
        made.__dict__["__wrapped__"] = f  # its signature
        return made

    return transform


@_transform
def value_and_grad(f: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """A function that returns what `f` does, and its gradient.

    Args:
        f: a function of arrays, or of containers of arrays, that returns one number.
        argnums: which argument, or tuple of arguments, to differentiate by.
        has_aux: whether `f` returns a pair: the number, and something else that is handed through.

    Returns:
        A function of the same arguments that gives ``(value, gradient)``; with `has_aux`, ``((value, aux), gradient)``.
        The gradient has the containers, shapes and dtypes of the argument.

    Raises:
        BadInput: `f` returns something else than one number, or an argument holds no floats.
        NotDifferentiable: an operation on the way has no derivative.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums, has_aux)
        y = t.scalar()
        t._ends = [y]
        gradient = t.pull_back([Array(np.ones(y.shape, y.dtype))])
        value = (y, t.aux) if has_aux else y
        return t.detached(value), trees.derivative(t.chosen, gradient)

    return wrapped


@_transform
def grad(f: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """A function that returns the gradient of `f`; with `has_aux`, the pair of it and what `f` hands through.

    Arguments and errors are those of `value_and_grad`.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums, has_aux)
        y = t.scalar()
        t._ends = [y]
        gradient = trees.derivative(t.chosen, t.pull_back([Array(np.ones(y.shape, y.dtype))]))
        return (gradient, t.detached(t.aux)) if has_aux else gradient

    return wrapped


@_transform
def elementwise_grad(f: Function, argnums: Argnums = 0) -> Function:
    """A function that returns the derivative of `f` at each element: the gradient of the sum of its result."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums)
        return trees.derivative(t.chosen, t.pull_back([Array(np.ones(y.shape, y.dtype)) for y in t.ends]))

    return wrapped


def vjp(f: Function, *primals: Any) -> tuple[Any, Function]:
    """What `f` returns, and its pullback: a function from a cotangent of that to one of each argument.

    The pullback uses what the one call of `f` recorded, as often as it is called. It returns a tuple, or for one
    argument that argument's cotangent.
    """
    t = Traced(f, primals, {}, tuple(range(len(primals))))
    ends = t.ends

    def pullback(cotangent: Any) -> Any:
        seeds = _seeds(cotangent, t.output, ends, "cotangent")
        found = trees.derivative(t.chosen, t.pull_back(seeds))
        return found[0] if len(primals) == 1 else found

    return t.detached(t.output), pullback


def jvp(f: Function, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """What `f` returns, and the tangent of it for tangents of the arguments (forward mode).

    Args:
        f: a function of arrays, or of containers of arrays.
        primals: the tuple of its arguments (one argument may stand alone).
        tangents: one for each, in the same containers.
    """
    if not isinstance(primals, tuple):
        primals, tangents = (primals,), (tangents,)
    t = Traced(f, primals, {}, tuple(range(len(primals))))
    seeds = _seeds(tangents, primals, t.variables, "tangent")
    pushed = t.push_forward(seeds)
    return t.detached(t.output), trees.derivative(t.output, pushed)


def _seeds(given: Any, like: Any, arrays: Sequence[Array], what: str) -> list[Array]:
    """The leaves of `given` in the dtypes of `arrays`, whose shapes they must have."""
    parts = [x for _, x in trees.leaves(given)]
    if len(parts) != len(arrays):
        raise BadInput(f"{len(parts)} arrays of {what}s for {len(arrays)} arrays")
    found = []
    for x, y in zip(parts, arrays):
        from onnxgrad.eager.elementwise import cast

        s = cast(as_array(x), y.dtype if carries_derivative(y._data) else np.float64)
        if s.shape != y.shape:
            raise BadInput(f"a {what} of shape {s.shape} for an array of shape {y.shape}")
        found.append(s)
    return found


@_transform
def jacobian(f: Function, argnums: Argnums = 0, mode: str = "auto") -> Function:
    """A function that returns the derivative of every element of the result by every element of the argument.

    Args:
        f: a function of arrays, or of containers of arrays.
        argnums: which argument, or tuple of arguments, to differentiate by.
        mode: "reverse" pulls a unit cotangent back for each element of the result, "forward" pushes a unit tangent
            for each element of the argument, all at once; "auto" takes what is fewer.

    Returns:
        A function of the same arguments. For one array of one array: an array of shape ``y.shape + x.shape``. In
        general, the containers of the result, and in place of each array the containers of the argument.
    """
    if mode not in ("auto", "reverse", "forward"):
        raise BadInput(f"mode is 'auto', 'reverse' or 'forward', not {mode!r}")

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        t = Traced(f, args, kwargs, argnums)
        rows, columns = (sum(x.size for x in xs) for xs in (t.ends, t.variables))
        blocks = _rows(t) if mode == "reverse" or (mode == "auto" and rows <= columns) else _columns(t)
        return trees.derivative(t.output, [trees.derivative(t.chosen, row) for row in blocks])

    return wrapped


def _rows(t: Traced) -> list[list[Array]]:
    """For each end, its Jacobian by each variable, by pulling back."""
    blocks = []
    p = t.program
    for y, place in zip(t.ends, t._places):
        unit = Array(np.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape))
        found = t.settled(pull_through(p, [place], [unit], True), []) if y.size else [None] * len(t.variables)
        blocks.append([_block(g, y, x) for g, x in zip(found, t.variables)])
    return blocks


def _block(g: Array | None, y: Array, x: Array) -> Array:
    shape = y.shape + x.shape
    return Array(np.zeros(shape, x.dtype)) if g is None else g.reshape(shape)


def _columns(t: Traced) -> list[list[Array]]:
    """For each end, its Jacobian by each variable, by pushing forward."""
    count = sum(x.size for x in t.variables)
    if not count:
        return [[Array(np.zeros(y.shape + x.shape, y.dtype)) for x in t.variables] for y in t.ends]
    units = np.split(np.eye(count), np.cumsum([x.size for x in t.variables])[:-1], axis=1)
    seeds = [Array(u.reshape(count, *x.shape).astype(x.dtype)) for u, x in zip(units, t.variables)]
    pushed = t.push_forward(seeds, directions=True)
    blocks = []
    for y, stack in zip(t.ends, pushed):
        row, at = [], 0
        for x in t.variables:
            piece = stack[at : at + x.size].reshape(x.size, y.size).T
            row.append(piece.reshape(y.shape + x.shape))
            at += x.size
        blocks.append(row)
    return blocks


@_transform
def hessian(f: Function, argnums: Argnums = 0) -> Function:
    """A function that returns the second derivatives of `f`, which returns one number: of shape ``x.shape + x.shape``.

    For an argument of several arrays: its containers, and in place of each array its containers again.
    """
    return jacobian(grad(f, argnums), argnums, mode="forward")


@_transform
def hvp(f: Function, argnums: Argnums = 0) -> Function:
    """A function of the arguments of `f` and a vector like the one differentiated: the Hessian times the vector."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        *primals, vector = args
        gradient = grad(f, argnums)
        t = Traced(lambda *a: gradient(*a, **kwargs), primals, {}, argnums)
        pushed = t.push_forward(_seeds(vector, t.chosen, t.variables, "vector"))
        return trees.derivative(t.output, pushed)

    return wrapped
