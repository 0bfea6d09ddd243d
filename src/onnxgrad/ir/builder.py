"""Writing nodes: typed variables with operators, constants, inference on emission, scoped names.

A `Builder` appends to one graph. Every emission is typed at once (see `infer`), gets a name that is
unique in the whole model, and is remembered: the same operator on the same operands is the same
variable, so derived graphs have no common subexpressions to eliminate later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir.composites import Part
from onnxgrad.ir.constants import is_repeatable, known_value
from onnxgrad.ir.infer.context import Calls
from onnxgrad.ir.infer.inference import Inference, Kind
from onnxgrad.ir.literals import Attributes, Literals
from onnxgrad.ir.match import FLOATS, HALF, Dim, permutation, producer
from onnxgrad.ir.names import Names, unknown_rank

#: The result of `full_like` and `zeros_like` for a value that is no tensor, by its type; see `containers`.
FULL_LIKE: dict[type, Callable[[Builder, Var, float], Var]] = {}
ZEROS_LIKE: dict[type, Callable[[Builder, Var], Var]] = {}

_NO_ATTRIBUTES: tuple[list[ir.Attr], Sequence[Any]] = [], ()


def _operator(op_type: str, neutral: int | None = None) -> Callable[[Var, Any], Var]:
    """The method for an operator of Python that writes a node `op_type`, unless the other operand is `neutral`."""
    return lambda self, other: self if _is(other, neutral) else self.builder.emit(op_type, self, other)


class Var:
    """A value in the graph that a `Builder` writes, with the usual operators."""

    __array_ufunc__ = None  # numpy scalars on the left defer to the operators below
    __slots__ = ("builder", "value")

    def __init__(self, builder: Builder, value: ir.Value) -> None:
        self.builder = builder
        self.value = value

    def __repr__(self) -> str:
        return f"Var({self.value.name}: {self.dtype and self.dtype.name}{self.value.shape})"

    @property
    def name(self) -> str:
        """The name in the model."""
        return self.value.name or ""

    @property
    def dtype(self) -> ir.DataType | None:
        """Element type, ``None`` if unknown."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[Dim, ...] | None:
        """Dimensions, each an int or a symbol; ``None`` if even the rank is unknown."""
        shape = self.value.shape
        return None if shape is None else shape.dims

    @property
    def rank(self) -> int:
        """Number of dimensions. Raises NotDifferentiable if it is unknown."""
        return len(self.dims)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The `shape`. Raises NotDifferentiable if even the rank is unknown."""
        if self.value.shape is None:
            raise NotDifferentiable(unknown_rank(self.value, self.builder.names))
        return self.value.shape.dims

    @property
    def const(self) -> np.ndarray | None:
        """The value if no input can change it (a constant, or small arithmetic on constants), else None.

        For operands without derivative only (axes, scales, pads): the value is not followed.
        """
        return known_value(self.value, self.builder.opset)

    def __radd__(self, other: Any) -> Var:
        return self if _is(other, 0) else self.builder.emit("Add", other, self)

    def __rsub__(self, other: Any) -> Var:
        return -self if _is(other, 0) else self.builder.emit("Sub", other, self)

    def __mul__(self, other: Any) -> Var:
        if isinstance(other, (int, float)) and not isinstance(other, bool) and other in (1, -1):
            return self if other == 1 else -self
        return self.builder.emit("Mul", self, other)

    def __rmul__(self, other: Any) -> Var:
        return self * other if isinstance(other, (int, float)) else self.builder.emit("Mul", other, self)

    def __rtruediv__(self, other: Any) -> Var:
        return self.builder.emit("Reciprocal", self) if _is(other, 1) else self.builder.emit("Div", other, self)

    def __neg__(self) -> Var:
        return self.builder.emit("Neg", self)

    __add__, __sub__ = _operator("Add", 0), _operator("Sub", 0)
    __truediv__, __pow__ = _operator("Div", 1), _operator("Pow", 1)
    __matmul__, __gt__, __ge__ = _operator("MatMul"), _operator("Greater"), _operator("GreaterOrEqual")
    __lt__, __le__ = _operator("Less"), _operator("LessOrEqual")


def _is(x: Any, number: int | None) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x == number


class Builder:
    """Appends nodes to `graph`. ``builder.Add(x, 1.0)`` emits an Add and returns its output.

    Operands may be variables, values of the graph, numbers (they take the dtype of the
    first float variable beside them, or of the first that is not bool), lists of ints
    (int64), numpy arrays, or ``None`` for an optional input that is left out.
    """

    def __init__(
        self,
        graph: ir.Graph,
        names: Names | None = None,
        infer: Inference | None = None,
        *,
        noting: bool = True,
        digests: bool = True,
        before: ir.Node | None = None,
        prefix: str = "d",
    ) -> None:
        self.graph = graph
        #: the node of the graph that new nodes are inserted before; None: they are appended
        self.before = before
        self.prefix = prefix  #: of the names of new nodes
        #: whether `named` leaves notes: they are lost where a message is made of the graph
        self.noting = noting
        self.digests = digests  #: whether notes have digests, which a file does not keep
        self.names = names or Names.of_graph(graph)
        self.infer = infer or Inference.of(graph)
        self.opset = self.infer.context.opset
        self._emitted: dict[Any, Any] = {}  # the results of `emit`
        self._literals = Literals(graph, self.names)
        self._attributes = Attributes()
        self._shapes: dict[tuple[Dim, ...], Var] = {}
        #: values whose producer was replaced, with their replacements
        self.moved: dict[ir.Value, ir.Value] = {}
        self._recordings: list[list[ir.Node]] = []
        self._own: set[ir.Node] = set()
        self._untouched: tuple[ir.Value, ...] = ()

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        """The function that writes a node `op_type`."""
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        write = self.transpose if op_type == "Transpose" else functools.partial(self.emit, op_type)
        self.__dict__[op_type] = write  # Python finds it there the next time
        return write

    @property
    def functions(self) -> Calls | None:
        """The local functions of the model that stay functions (see `model_io.local_functions`), or None."""
        return self.infer.calls

    def nested(self, graph: ir.Graph) -> Builder:
        """A builder for a graph inside this one (a branch or a loop body) with the same pool of names."""
        return Builder(graph, self.names, self.infer, noting=self.noting, digests=self.digests)

    def now(self, value: ir.Value) -> ir.Value:
        """`value`, or the value that replaced it when its node was lowered, through any number of lowerings."""
        while value in self.moved:
            value = self.moved[value]
        return value

    def var(self, value: ir.Value) -> Var:
        """The variable for a value that is already in the graph."""
        return Var(self, value)

    def const(self, array: Any, dtype: ir.DataType | None = None) -> Var:
        """A constant: an initializer of the graph, shared by all that ask for the same one."""
        return Var(self, self._literals.array(array, dtype))

    def written(self) -> set[ir.Value]:
        """The constants that were written down so far."""
        return self._literals.written()

    def _operand(self, x: Any, beside: ir.DataType | None) -> Var:
        return x if isinstance(x, Var) else Var(self, self._literals.literal(x, beside))

    # --- emission ------------------------------------------------------------------------------

    def emit(self, op_type: str, *inputs: Any, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Append a node; returns its output, or a tuple of them if `outputs` is not 1.

        A ``None`` attribute is omitted; an ``ir.Attr`` is used unchanged.
        """
        values = self._values(inputs)
        attrs, hashable = self._attributes(attributes) if attributes else _NO_ATTRIBUTES
        key: Any = None
        opset = self.infer.context.get_opset_version(domain) if domain else self.opset
        if hashable is not None and is_repeatable(op_type, domain, opset):
            key = (op_type, domain, outputs, *hashable, *map(id, values))
            results = self._emitted.get(key)
            if results is not None and self._has(results):
                return results
        kind = known = None
        if hashable is not None and not domain and outputs == 1:
            kind, known = self.infer.look_up(op_type, values, hashable)
        if known is None:
            results = self.append(ir.Node(domain, op_type, values, attrs, num_outputs=outputs), kind)
            results = results[0] if outputs == 1 else results
        else:
            name = self.names.fresh(f"{self.prefix}_{op_type}")
            value = ir.Value(name=name, type=known[0], shape=known[1])
            self._add(ir.Node("", op_type, values, attrs, outputs=(value,), name=name))
            results = Var(self, value)
        if key:
            self._emitted[key] = results
        return results

    def _values(self, operands: Sequence[Any]) -> list[ir.Value | None]:
        """Convert the operands of `emit` to values; constants become initializers, trailing Nones are dropped."""
        values: list[ir.Value | None] = []
        for x in operands:
            if type(x) is Var:
                values.append(x.value)
            elif x is None or type(x) is ir.Value:  # a number compared with a class of the library takes 1 µs
                values.append(x)
            else:
                dtypes = [v.dtype for v in operands if type(v) is Var or type(v) is ir.Value]
                beside = next((d for d in dtypes if d in FLOATS), None)
                beside = beside or next((d for d in dtypes if d != ir.DataType.BOOL), None)
                values.append(self._literals.literal(x, beside))
        while values and values[-1] is None:
            values.pop()
        return values

    def transpose(self, x: Var, *, perm: Sequence[int] | None = None) -> Var:
        """`x` with its axes in the order `perm` (default: reversed).

        Transposing back cancels. Two consecutive Transposes that were both emitted here are merged; a Transpose of the
        primal graph is followed by another, which the runtime may fuse into the product that reads it. Of a value that
        is `untouched`, neither is done.
        """
        node = None if x.value in self._untouched else producer(x.value, "Transpose")
        before = None if node is None else permutation(node)
        if node is not None and before is not None:
            after = [before[i] for i in (perm if perm is not None else reversed(range(len(before))))]
            source = node.inputs[0]
            if source is not None and after == sorted(after):
                return Var(self, source)
            if source is not None and node in self._own:
                return self.emit("Transpose", Var(self, source), perm=after)
        return self.emit("Transpose", x, perm=perm)

    def _has(self, results: Var | tuple[Var, ...]) -> bool:
        """True if the producer of `results` is still in the graph: it may have been pruned."""
        node = (results[0] if isinstance(results, tuple) else results).value.producer()
        return node is not None and node.graph is self.graph

    def append(self, node: ir.Node, kind: Kind | None = None) -> tuple[Var, ...]:
        """Append `node`; name it and its outputs where they have no names, and infer their types, by its `kind`."""
        for value in node.outputs:
            value.name = value.name or self.names.fresh(f"{self.prefix}_{node.op_type}")
        node.name = node.name or node.outputs[0].name
        self._add(node)
        self.infer(node, kind)
        return tuple([Var(self, v) for v in node.outputs])

    def copy(self, x: Var | ir.Value) -> Var:
        """A new value equal to `x`, of its type and shape: an Identity that, unlike that of `emit`, is never shared."""
        value = x.value if isinstance(x, Var) else x
        (made,) = self.append(ir.Node("", "Identity", [value]))
        made.value.type = made.value.type or value.type
        made.value.shape = made.value.shape if made.value.shape is not None else value.shape
        return made

    def _add(self, node: ir.Node) -> None:
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        self._own.add(node)
        for recording in self._recordings:
            recording.append(node)

    @contextmanager
    def untouched(self, *values: Var) -> Iterator[None]:
        """Let a part that is named `of` `values` read them, not what they are Transposes of."""
        before, self._untouched = self._untouched, tuple([v.value for v in values])
        try:
            yield
        finally:
            self._untouched = before

    @contextmanager
    def record(self) -> Iterator[list[ir.Node]]:
        """Collect the nodes that are appended inside the ``with`` block, in order."""
        nodes: list[ir.Node] = []
        self._recordings.append(nodes)
        try:
            yield nodes
        finally:
            self._recordings.pop()  # not `remove`, which takes an equal list for the same

    def forget(self) -> None:
        """Drop the caches for further nodes: none will be emitted."""
        for notes in (self._emitted, self._literals, self._shapes, self.moved, self._own):
            notes.clear()

    def move(self, nodes: Sequence[ir.Node], inner: Builder) -> None:
        """Move `nodes` of this graph, in order, to the end of the graph of `inner`, and forget them here."""
        self.graph.remove(nodes)
        inner.graph.extend(nodes)
        self._emitted = {key: results for key, results in self._emitted.items() if self._has(results)}
        self._shapes = {dims: shape for dims, shape in self._shapes.items() if self._has(shape)}

    def named(self, name: str, outputs: Sequence[Var | None], *, of: Sequence[Var | None], **attributes: Any) -> None:
        """Note that `outputs` are the function `name` of `of`, for which a runtime may have a kernel: `ir.composites`.

        Nothing is emitted. Every other value that `outputs` are computed from must be a constant, or the shape of a
        value. An unused output may be None.
        """
        if not self.noting:
            return
        inputs, results = ([None if v is None else v.value for v in vs] for vs in (of, outputs))
        part = Part.of if self.digests else Part.without_digests
        part(name, inputs, results, attributes).note()

    # --- small compositions that every rule may use --------------------------------------------

    def shape_of(self, x: Var, start: int = 0, end: int | None = None) -> Var:
        """The dimensions `start` to `end` of `x` as an int64 vector; a constant if they are known.

        Dimensions with the same names are the same, so one Shape serves all that have them.
        """
        dims = None if x.shape is None else x.shape[start:end]
        if dims is None or not all(isinstance(d, int) or d.value for d in dims):
            return self.Shape(x, start=start or None, end=end)
        if all(isinstance(d, int) for d in dims):
            return self.const(np.array(dims, np.int64))
        shape = self._shapes.get(dims)
        if shape is None or not self._has(shape):
            shape = self._shapes[dims] = self.Shape(x, start=start or None, end=end)
        return shape

    def size_of(self, x: Var, axis: int) -> Var:
        """The size of `x` along `axis`, a scalar."""
        return self.Squeeze(self.shape_of(x, axis, axis + 1 or None), [0])

    def places_along(self, x: Var, axis: int) -> Var:
        """The indices of `x` along `axis`: 0, 1, 2, …"""
        return self.Range(0, self.size_of(x, axis), 1)

    def folded(self, x: Var) -> Var:
        """`x` as a constant, if its value is known."""
        return x if (known := x.const) is None else self.const(known)

    def join(self, *parts: Any) -> Var:
        """One int64 vector of `parts`, each a list of ints or a vector; a constant where all of them are."""
        vectors = [v for p in parts if (v := self._operand(p, None)).shape != (0,)]
        known = [v.const for v in vectors]
        if all(k is not None for k in known):
            return self.const(np.concatenate([np.zeros(0, np.int64), *known]))
        return vectors[0] if len(vectors) == 1 else self.Concat(*vectors, axis=0)

    def full_like(self, x: Var, number: float) -> Var:
        """A tensor of `number` with the shape and dtype of `x`; for a sequence or an optional, one of them."""
        if x.dtype is None:
            raise NotDifferentiable(f"the type of {x.name!r} is not known; declare it in the model's value_info")
        if (fill := FULL_LIKE.get(type(x.value.type))) is not None:
            return fill(self, x, number)
        scalar = self.const(number, x.dtype)
        return scalar if x.shape == () else self.Expand(scalar, self.shape_of(x))

    def zeros_like(self, x: Var) -> Var:
        """Zeros with the shape and dtype of `x`; for a sequence, a sequence of them."""
        zeros = ZEROS_LIKE.get(type(x.value.type))
        return self.full_like(x, 0) if zeros is None else zeros(self, x)

    def cast_like(self, x: Var, like: Var) -> Var:
        """`x` with the dtype of `like`; `x` itself if it has it."""
        return x if x.dtype == like.dtype else self.Cast(x, to=int(like.dtype or 0))

    def widen(self, x: Var) -> Var:
        """`x`, in float32 where its type has 16 bits: for long sums, coordinates and comparisons."""
        return self.Cast(x, to=int(ir.DataType.FLOAT)) if x.dtype in HALF else x

    def reshape(self, x: Var | ir.Value, shape: Any) -> Var:
        """`x` with the shape `shape` (a vector or a list, in which 0 means a dimension of size 0)."""
        if not isinstance(shape, (list, tuple)):
            shape = self._operand(shape, ir.DataType.INT64)
        known = shape.const if isinstance(shape, Var) else shape
        exact = known is None or 0 in known  # allowzero forbids -1, and is not needed without a 0
        return self.Reshape(x, shape, allowzero=1 if exact else None)
