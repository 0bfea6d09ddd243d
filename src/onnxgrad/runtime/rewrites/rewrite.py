"""What a rewrite is, and what rewrites share: recognising operators, writing others in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.shapes import same_dim


@dataclass(frozen=True)
class Rewrite:
    """Operators in place of others, which give the same numbers sooner.

    Attributes:
        name: what `Options(without=…)` calls it.
        what: what is written, in a line.
        where: in place of what.
        applies: whether a graph holds anything for it; looks only.
        apply: write it into a graph, in place. What nobody reads then is removed by whoever calls.
    """

    name: str
    what: str
    where: str
    applies: Callable[[ir.Graph], bool]
    apply: Callable[[ir.Graph], object]


class Writer:
    """Nodes before the one at hand, with names that begin with that of the rewrite."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self.graph, self.prefix = graph, prefix
        self.at: ir.Node | None = None
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], ir.Value] = {}
        self._serial = 0

    def name(self, what: str) -> str:
        """A name that nothing has."""
        self._serial += 1
        return f"{self.prefix}.{what}.{self._serial}"

    def emit(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: object) -> ir.Value:
        """A node before the one at hand; its output."""
        return self.emit_all(op_type, *inputs, domain=domain, outputs=1, **attributes)[0]

    def emit_all(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", outputs: int, **attributes: object
    ) -> list[ir.Value]:
        """A node of several outputs before the one at hand."""
        attrs = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]  # type: ignore[arg-type]
        node = ir.Node(domain, op_type, inputs, attrs, num_outputs=outputs, name=self.name(op_type))
        for value in node.outputs:
            value.name = self.name(op_type)
        assert self.at is not None
        self.graph.insert_before(self.at, node)
        return list(node.outputs)

    def constant(self, array: np.ndarray) -> ir.Value:
        """A tensor, held once."""
        key = (array.tobytes(), str(array.dtype), array.shape)
        if key not in self._constants:
            self._constants[key] = held(self.graph, self.name("const"), array)
        return self._constants[key]

    def ints(self, *numbers: int) -> ir.Value:
        """A vector of integers."""
        return self.constant(np.array(numbers, np.int64))

    def view(self, x: ir.Value, *dims: int) -> ir.Value:
        """`x` reshaped."""
        return self.emit("Reshape", x, self.ints(*dims))


def held(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """An initializer."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    graph.register_initializer(value)
    return value


def put(y: ir.Value, old: ir.Value) -> None:
    """`y` in the place of `old`, with its name, type and shape; what made `old` then makes something unread."""
    y.type, y.shape = old.type, old.shape
    old.replace_all_uses_with(y, replace_graph_outputs=old.is_graph_output())
    y.name, old.name = old.name, y.name


def is_op(node: ir.Node | None, op_type: str) -> bool:
    """Whether `node` is the standard operator of that name."""
    return node is not None and node.op_type == op_type and node.domain == ""


def made(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The standard operator of that name that makes `value`; None if something else does."""
    node = value.producer() if value is not None else None
    return node if is_op(node, op_type) else None


def known(value: ir.Value | None) -> np.ndarray | None:
    """A constant as an array; None for anything else."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None or (value is not None and value.is_graph_input()) else tensor.numpy()


def ints(node: ir.Node, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """An attribute that holds integers."""
    given = node.attributes.get(name)
    return default if given is None else tuple(given.as_ints())


def sizes(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of `value` if every axis is known."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(d) for d in value.shape.numpy())


def repeated(indices: ir.Value | None, rank: int, axis: int) -> ir.Value | None:
    """What `indices`, of `rank` axes, repeats along all of them but `axis`; None if it does not."""
    spread = made(indices, "Expand")
    column = indices if spread is None else spread.inputs[0]
    if column is None or column.shape is None or indices is None or indices.shape is None or len(column.shape) > rank:
        return None
    dims = (1,) * (rank - len(column.shape)) + column.shape.dims
    alone = all(d == 1 for i, d in enumerate(dims) if i != axis)
    return column if alone and same_dim(indices.shape[axis], dims[axis]) else None


def same_but(axis: int, one: ir.Shape, other: ir.Shape) -> list[int] | None:
    """The sizes of all axes but `axis`, equal in both shapes (-1: without a number); None if not certain."""
    found = []
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if i != axis:
            if not same_dim(a, b):
                return None
            found.append(a if isinstance(a, int) else -1)
    return found
