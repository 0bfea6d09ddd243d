"""Bodies: a Python function of arrays, traced once, to be written into a graph.

`jit` writes a body as a graph of its own, `cond`, `scan` and the loops as a graph inside a node. A body reads its
parameters and, like a Python function, arrays from outside: the captured ones, which are operands as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.plans import write_into
from onnxgrad.eager.core.released import value_of
from onnxgrad.eager.core.tape import (
    Node,
    Program,
    Source,
    compiling,
    computing,
    exporting,
    history,
    is_differentiated,
    parameter,
    program,
)
from onnxgrad.errors import BadInput, NotDifferentiable
from onnxgrad.ir import Builder, Var


@dataclass
class TracedBody:
    """A traced function.

    Attributes:
        name: of the function, for messages.
        program: its operations, from the parameters and the captured arrays.
        places: where each leaf of the result is (see `Program`).
        sources: the parameters, then the captured nodes and arrays.
        count: the number of parameters.
        output: the result, as a tree.
        results: the leaves of the result in the traced call.
    """

    name: str
    program: Program
    places: tuple[int, ...]
    sources: list[Source]
    count: int
    output: Any
    results: list[Array]

    @property
    def custom(self) -> bool:
        """True if a call in it has a custom derivative, which its graph has not."""
        return any(node.op.custom for node in self.program.nodes)

    @property
    def captured(self) -> list[Array]:
        """The arrays from outside that the function reads."""
        return [Array(value_of(s), s) if isinstance(s, Node) else Array(s) for s in self.sources[self.count :]]

    @property
    def key(self) -> tuple[Any, ...]:
        """The structure: functions with the same key are written alike."""
        kinds = [(x.dtype.num, x.shape) for x in self.captured]
        return self.program.key, self.places, tuple(kinds)

    def write(self, b: Builder, operands: Sequence[Var]) -> list[Var]:
        """Write the operations by `b`, which may be that of a graph inside the one that has the `operands`.

        Args:
            b: the builder.
            operands: for the parameters, then for the captured arrays.

        Returns:
            The leaves of the result.
        """
        written = write_into(b, self.program, [b.var(x.value) for x in operands], reused=True)
        return [written.at(place) for place in self.places]


def refuse_custom(bodies: Sequence[TracedBody], operands: Sequence[Array]) -> bool:
    """Raise NotDifferentiable if a custom derivative in `bodies` would be lost. Returns True if there is one."""
    custom = [body.name for body in bodies if body.custom]
    if custom and any(is_differentiated(x._node) for x in operands):
        raise NotDifferentiable(
            f"{custom[0]} calls a function with a custom derivative, and is differentiated as a graph\n"
            "  hint: a loop in Python, or the derivative inside: vmap(grad(f)) for grad(vmap(f))"
        )
    return bool(custom)


def call_on_variables(
    f: Callable[..., Any], name: str, args: Sequence[Any], variables: Sequence[Node], since: float | None = None
) -> tuple[Any, list[Array], list[Node]]:
    """Call `f`, named `name`, with `variables` for the leaves of `args`, and record everything as ONNX.

    Returns:
        The result, its leaves, and the operations that compute them, in order, from number `since` of the tape on.

    Raises:
        BadInput: `f` returns no array, or does something that has no form in ONNX.
    """
    token = exporting.set(True)
    try:
        output = f(*trees.rebuilt(tuple(args), [Array(n.value, n) for n in variables]))
    finally:
        exporting.reset(token)
    results = [as_array(y) for _, y in trees.leaves(output, f"the result of {name}")]
    if not results:
        raise BadInput(f"{name} returned no array")
    nodes = history([y._node for y in results if y._node is not None], variables, discrete=True, since=since)
    if any(node.op.opaque and not node.op.writable for node in nodes):
        raise BadInput(f"{name} calls a function whose derivative is written in Python, which ONNX cannot hold")
    return output, results, nodes


def trace(
    f: Callable[..., Any],
    args: Sequence[Any],
    examples: Sequence[np.ndarray],
    once: bool = False,
    optional: bool = False,
) -> TracedBody:
    """Call `f` once on variables, and return what it did.

    Args:
        f: a function of arrays or containers of arrays.
        args: its arguments; their leaves become parameters.
        examples: an array for each leaf, of which dtype and shape count.
        once: the program is for these numbers, so that Python may read them, unless it could not before.
        optional: the body may not run, so operations on captured arrays alone belong to it as well: a logarithm of a
            number that is 0 when the body does not run has no derivative.

    Raises:
        BadInput: `f` returns no array, or does something that has no form in ONNX.
        NotDifferentiable: `f` reads a value of its parameters in Python.
    """
    name = getattr(f, "__name__", "the function")
    for x in examples:
        if x.dtype.kind == "c":
            raise BadInput(f"an argument of {name} is {x.dtype}; ONNX has no complex numbers\n  hint: pass its parts")
    since = parameter(np.zeros(0)).serial
    parameters = [parameter(x) for x in examples]
    is_open = once and not compiling.get()
    tokens = compiling.set(() if is_open else (*compiling.get(), *parameters)), computing.set(is_open)
    try:
        with np.errstate(all="ignore"):
            output, results, nodes = call_on_variables(f, name, args, parameters, since)
    finally:
        compiling.reset(tokens[0])
        computing.reset(tokens[1])
    ends = [y._node for y in results if y._node is not None]
    p = program(ends, parameters, nodes, stopped=True, since=since if optional else -1)
    sources, places, values = list(p.sources), [], iter(p.key[1])
    for y in results:
        place = None if y._node is None else next(values)
        if place is None:  # a constant, or something from outside
            place = ~len(sources)
            sources.append(y._data if y._node is None else y._node)
        places.append(place)
    return TracedBody(name, p, tuple(places), sources, len(parameters), output, results)
