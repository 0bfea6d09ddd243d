"""Tracing of one call of a Python function on variables, and derivatives of the recorded operations.

Where the tape holds calls whose derivative is a Python function, the backward pass alternates: one plan for each
stretch between two such calls, then the Python function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.plans import pull, push
from onnxgrad.eager.core.recording import cotangent_of_pairs, of_pairs, pairs_of_cotangent, real_form
from onnxgrad.eager.core.tape import Node, Program, carries_derivative, leaf, program, reaches_outside
from onnxgrad.errors import BadInput

Function = Callable[..., Any]
Argnums = int | tuple[int, ...]


class Traced:
    """One call of a function on variables.

    Attributes:
        chosen: the arguments to differentiate with respect to, as one tree.
        variables: their leaves, as arrays on the tape (a complex one is made of its pairs there).
        output: the result; with `has_aux`, its first element.
        aux: the second element.
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
        real = [real_form(x) for x in primals]
        self.leaves: list[Node] = [leaf(x._data, x._node) for x in real]
        fresh_arrays = [Array(n.value, n) for n in self.leaves]
        self.variables = [of_pairs(v) if x.dtype.kind == "c" else v for v, x in zip(fresh_arrays, primals)]
        fresh = list(args)
        for i, a in zip(several, trees.rebuilt(picked, self.variables)):
            fresh[i] = a
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
        """The recording, from the variables to the ends."""
        if self._program is None:
            nodes = [None if y._node is None else real_form(y)._node for y in map(_carrying, self.ends)]
            self._program = program([n for n in nodes if n is not None], self.leaves)
            at = iter(self._program.key[1])
            self._places = [None if n is None else next(at) for n in nodes]
        return self._program

    def scalar(self) -> Array:
        """The output, which must be one floating-point number."""
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
        self._ends = [self.real(y)]
        return y

    def real(self, y: Array) -> Array:
        """`y`, checked to be real, as a gradient requires."""
        if y.dtype.kind == "c":
            raise BadInput(
                f"{self.name} returned {y.dtype}; a gradient is that of real numbers\n"
                "  hint: real(z), imag(z) or abs(z) of it; holomorphic_grad; vjp for a complex cotangent"
            )
        return y

    def detached(self, tree: Any) -> Any:
        """`tree` detached from the tape, unless an enclosing transform needs it."""

        def detach(x: Array) -> Array:
            return x if x._node is None or reaches_outside([x._node], self.leaves) else Array(x._data)

        return trees.mapped(detach, tree)

    def gradient(self) -> Any:
        """The gradient of the sum of all elements of the output, as a tree like `chosen`."""
        ones = [Array(np.ones(y.shape, y.dtype)) for y in self.ends]
        return trees.derivative(self.chosen, self.pull_back(ones))

    def pull_back(self, seeds: Sequence[Array], directions: bool = False) -> list[Array]:
        """The cotangents of the variables, given those of the leaves of the output."""
        return self._pulled(range(len(self.ends)), seeds, directions)

    def pull_back_one(self, i: int, seeds: Array) -> list[Array]:
        """The cotangents of the variables, given those of leaf `i` of the output, with an axis of directions."""
        return self._pulled([i], [seeds], True)

    def _pulled(self, which: Sequence[int], given: Sequence[Array], directions: bool) -> list[Array]:
        p = self.program
        seeds = [pairs_of_cotangent(s, self.ends[i].dtype) for i, s in zip(which, given)]
        cotangents = self.detach(pull_through(p, [self._places[i] for i in which], seeds, directions), seeds)
        count = seeds[0].shape[:1] if directions and seeds else ()
        made = [cotangent_of_pairs(g, x.dtype) for x, g in zip(self.variables, cotangents)]
        return [Array(np.zeros(count + x.shape, x.dtype)) if g is None else g for x, g in zip(self.variables, made)]

    def push_forward(self, tangents: Sequence[Array], directions: bool = False) -> list[Array]:
        """The tangents of the leaves of the output, given those of the variables."""
        p, tangents = self.program, [real_form(t) for t in tangents]
        if any(n.op.opaque for n in p.nodes):
            pushed = self._push_by_pulling(tangents, directions)
        else:
            pushed = push(p, self._places, tangents, directions)
        count = tangents[0].shape[:1] if directions else ()
        pushed = self.detach(pushed, tangents)
        made = [of_pairs(t) if t is not None and y.dtype.kind == "c" else t for y, t in zip(self.ends, pushed)]
        return [Array(np.zeros(count + y.shape, y.dtype)) if t is None else t for y, t in zip(self.ends, made)]

    def detach(self, found: Sequence[Array | None], seeds: Sequence[Array]) -> list[Array | None]:
        """`found` detached from the tape that Python derivatives leave, unless an enclosing transform needs it."""
        if self.program.tracked or any(s._node is not None for s in seeds):
            return list(found)
        return [None if x is None else Array(x._data) for x in found]

    def _push_by_pulling(self, tangents: Sequence[Array], directions: bool) -> list[Array | None]:
        """A JVP from two VJPs: the pullback is linear in the cotangents, and its own pullback maps tangents forward.

        (Townsend 2017, "A new trick for calculating Jacobian vector products".)
        """
        if directions:
            rows = [self._push_by_pulling([t[i] for t in tangents], False) for i in range(len(tangents[0]))]
            return [None if column[0] is None else _stack_rows(column) for column in zip(*rows)]
        zeros = [np.zeros(y.shape, y.dtype) for y in map(real_form, self.ends)]
        probes = [Array(z, leaf(z)) for z in zeros]
        pulled = pull_through(self.program, self._places, probes)
        moved = [(g._node, t) for g, t in zip(pulled, tangents) if g is not None and g._node is not None]
        p = program([n for n, _ in moved], [q._node for q in probes if q._node is not None])
        return pull_through(p, p.key[1], [t for _, t in moved])


def _carrying(y: Array) -> Array:
    """`y`, without its node if it cannot carry a derivative."""
    return y if carries_derivative(y._data) else Array(y._data)


def _stack_rows(slices: Sequence[Any]) -> Array:
    return slices[0].__array_namespace__().stack(slices)


def pull_through(
    p: Program, places: Sequence[int | None], seeds: Sequence[Array], directions: bool = False
) -> list[Array | None]:
    """The cotangents of the variables of `p`, given those of `places`; one plan suffices if no node is opaque."""
    if not any(n.op.opaque for n in p.nodes):
        return pull(p, places, seeds, directions)
    if directions:
        rows = [pull_through(p, places, [s[i] for s in seeds]) for i in range(len(seeds[0]))]
        return [None if column[0] is None else _stack_rows(column) for column in zip(*rows)]
    seeded = [(p.source(at), s) for at, s in zip(places, seeds) if at is not None]
    return _pull_in_stretches(p, seeded)  # type: ignore[arg-type]


def _pull_in_stretches(p: Program, given: Sequence[tuple[Node, Array]]) -> list[Array | None]:
    """Pull cotangents through, like `pull_through`, by one plan per stretch between opaque nodes."""
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
            # the inputs of the stretch, in order of creation
            before = {q for n in stretch for q in n.inputs if type(q) is Node and q in moving and q not in inside}
            sources = sorted(before, key=lambda n: n.serial)
            part = program(results, sources, stretch)
            for source, term in zip(sources, pull(part, part.key[1], [totals.pop(r) for r in results])):
                add(source, term)
            moving -= inside
        if stop is not None and stop in totals:
            for source, term in zip(stop.inputs, stop.op.pull_back(stop, totals.pop(stop))):  # type: ignore[attr-defined]
                if type(source) is Node:
                    add(source, term)
    return [totals.get(x) for x in leaves]


def _sum(a: Any, b: Any) -> Any:
    """The sum of two cotangents; for several outputs, a list with None for zero."""
    if isinstance(a, list):
        return [_sum(x, y) if x is not None and y is not None else y if x is None else x for x, y in zip(a, b)]
    return a + b
