"""The tape: an immutable graph of nodes, each holding its operands.

There is no list of nodes. An array holds the node that produced it and a node holds the nodes of its operands, so what
no array depends on is garbage-collected. Nodes are numbered as they are created: operands come before results, and
nothing older than a variable can depend on it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.eager.core.primitives import LEAF, PARAMETER, STOP, Primitive
from onnxgrad.eager.core.released import value_of

_count = itertools.count().__next__

#: Whether a program is being exported: then integers, booleans and operations without a derivative are recorded too.
exporting: ContextVar[bool] = ContextVar("exporting", default=False)

#: The parameters of the functions that are being compiled: Python cannot read values that depend on them.
compiling: ContextVar[tuple[Node, ...]] = ContextVar("compiling", default=())

#: Whether values that depend on these parameters are computed; if not, operations whose results have known shapes may
#: return any numbers.
computing: ContextVar[bool] = ContextVar("computing", default=True)


class Node:
    """One executed operation.

    Attributes:
        op: the primitive.
        inputs: its operands: nodes, and arrays that depend on no variable.
        value: its result: an array, or a tuple of arrays if `op` has several outputs.
        serial: its number, in order of creation.
    """

    __slots__ = ("__weakref__", "inputs", "op", "serial", "value")

    def __init__(self, op: Primitive, inputs: tuple[Any, ...], value: Any) -> None:
        self.op = op
        self.inputs = inputs
        self.value = value
        self.serial: float = _count()


Source = Node | np.ndarray


def leaf(value: np.ndarray, parent: Node | None = None) -> Node:
    """A new variable; `parent` is its node on the tape of the enclosing transforms."""
    return Node(LEAF, () if parent is None else (parent,), value)


def parameter(value: np.ndarray) -> Node:
    """A new input of a function that is compiled or exported."""
    return Node(PARAMETER, (), value)


def carries_derivative(value: Any) -> bool:
    """True if `value` can carry a derivative: a tuple, or an array that is not of integers or booleans."""
    return isinstance(value, tuple) or value.dtype.kind not in "biu"


def history(
    results: Iterable[Node], leaves: Iterable[Node], discrete: bool = False, since: float | None = None
) -> list[Node]:
    """The ancestors of `results` back to number `since` (default: the oldest of `leaves`), without the leaves.

    Integers and booleans carry no derivative and are followed only if `discrete`.
    """
    seen = set(leaves)
    first = min((n.serial for n in seen), default=-1) if since is None else since
    nodes: list[Node] = []
    stack = list(results)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.serial < first or not (discrete or carries_derivative(node.value)):
            continue
        nodes.append(node)
        for p in node.inputs:
            if type(p) is Node:
                stack.append(p)
    nodes.sort(key=operator.attrgetter("serial"))
    return nodes


def varies(node: Node, discrete: bool = False, on: Sequence[Primitive] = (LEAF, PARAMETER)) -> bool:
    """True if `node` depends on a variable (or what else is `on`): read as a constant, its derivative is lost.

    Integers, booleans and results of `stop_gradient` have no derivative to lose; with `discrete` they count too.
    """
    seen: set[Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n in seen or not (discrete or (n.op is not STOP and carries_derivative(n.value))):
            continue
        if any(n.op is op for op in on):
            return True
        seen.add(n)
        stack.extend(p for p in n.inputs if type(p) is Node)
    return False


def is_differentiated(node: Node | None) -> bool:
    """True if `node` depends on a variable of a transform; parameters of an exported program are none."""
    return node is not None and (not exporting.get() or varies(node, on=(LEAF,)))


def differs_between_calls(nodes: Iterable[Node | None]) -> bool:
    """True if `nodes` depend on a parameter of a function being compiled."""
    parameters = set(compiling.get())
    return bool(parameters) and _reaches(nodes, min(n.serial for n in parameters), parameters.__contains__)


def reaches_outside(nodes: Iterable[Node | None], leaves: Sequence[Node]) -> bool:
    """True if `nodes` depend on more than `leaves`: on an older node, or on the parent of a leaf."""
    first = min((n.serial for n in leaves), default=0)
    return _reaches(nodes, 0, lambda n: n.serial < first, discrete=exporting.get())


def _reaches(nodes: Iterable[Node | None], first: float, found: Callable[[Node], bool], discrete: bool = True) -> bool:
    """True if `found` holds for one of `nodes` or their ancestors back to number `first`."""
    seen: set[Node] = set()
    stack = [n for n in nodes if n is not None]
    while stack:
        node = stack.pop()
        if node in seen or not (discrete or carries_derivative(node.value)):
            continue
        if found(node):
            return True
        seen.add(node)
        if node.serial > first:
            stack.extend(p for p in node.inputs if type(p) is Node)
    return False


@dataclass(slots=True)
class Program:
    """A part of the tape in canonical form: the same structure has the same key.

    Attributes:
        key: the structure: primitives, wiring, dtypes and shapes (of sources, and of results that these do not decide).
        nodes: the nodes, in order.
        wiring: for each node the places of its operands: ``i`` is node i, ``~k`` is source k.
        sources: the operands from outside, the variables first.
        tracked: whether a source, or the parent of a variable, depends on variables of an enclosing transform.
    """

    key: tuple[Any, ...]
    nodes: list[Node]
    wiring: list[tuple[int, ...]]
    sources: list[Source]
    tracked: bool

    def source(self, place: int) -> Source:
        """The node or array at a place."""
        return self.nodes[place] if place >= 0 else self.sources[~place]

    def value(self, place: int, part: int | None = None) -> np.ndarray:
        """The array at a place."""
        source = self.source(place)
        held: Any = value_of(source) if type(source) is Node else source
        return held if part is None else held[part]


def program(
    results: Sequence[Node],
    leaves: Sequence[Node],
    nodes: Sequence[Node] | None = None,
    stopped: bool = False,
    since: float = -1,
) -> Program:
    """The program of those of `nodes` (default: the history of `results`) that depend on `leaves`.

    With `stopped`, the program computes all values of the results, and not only their derivatives: it contains the
    results of `stop_gradient`. Nodes that depend on one before number `since` are in it as well.
    """
    place: dict[Any, int] = {node: ~k for k, node in enumerate(leaves)}
    moving = set(leaves)
    free: set[Node] = set()  # depend on no variable, not even of an enclosing transform
    sources: list[Source] = list(leaves)
    kept: list[Node] = []
    wiring: list[tuple[int, ...]] = []
    operators: list[Any] = []
    tracked = any(node.inputs for node in leaves)
    for node in history(results, leaves) if nodes is None else nodes:
        parents = [p for p in node.inputs if type(p) is Node]
        moves = not moving.isdisjoint(parents) or any(p.serial < since for p in parents)
        if (node.op is STOP and not stopped) or not moves:
            is_constant = node.op is STOP and not exporting.get()
            if is_constant or all(p in free or not carries_derivative(p.value) for p in parents):
                free.add(node)
            continue
        refs = []
        for p in node.inputs:
            held = p if type(p) is Node else id(p)
            at = place.get(held)
            if at is None:
                at = place[held] = ~len(sources)
                sources.append(value_of(p) if type(p) is Node and p in free else p)
                tracked = tracked or (type(p) is Node and p not in free and carries_derivative(p.value))
            refs.append(at)
        place[node] = len(kept)
        moving.add(node)
        kept.append(node)
        wiring.append(tuple(refs))
        op = node.op
        operators.append((op, node.value.shape) if op.open and type(node.value) is not tuple else op)
    if exporting.get():  # integers and booleans matter as well
        tracked = reaches_outside(results, leaves)
    ends = tuple(place.get(node) for node in results)
    values = [s.value if type(s) is Node else s for s in sources]
    kinds = [(v.dtype.num, v.shape) for v in values]  # type: ignore[union-attr]
    key = (len(leaves), ends, tuple(operators), tuple(wiring), tuple(kinds))
    return Program(key, kept, wiring, sources, tracked)
