"""Inference of types and shapes: for whole models when opened, node by node while a derivative is written.

The work is done by ``onnx-shape-inference``, with the corrections and further operators of `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import BadInput, RuleError, close_to
from onnxgrad.ir.graph import subgraphs, values_in, walk
from onnxgrad.ir.infer import corrections, loops
from onnxgrad.ir.infer.common import SIZES
from onnxgrad.ir.infer.context import Calls, InferenceContext
from onnxgrad.ir.infer.limits import check_shapes, distinct_shapes, is_possible, symbols_in
from onnxgrad.ir.infer.onnx_fallback import ask_onnx
from onnxgrad.ir.infer.registry import registry
from onnxgrad.ir.known_branches import known_branches
from onnxgrad.ir.match import FLOATS, Dim, not_none
from onnxgrad.ir.names import described
from onnxgrad.ir.operators import traits_of
from onnxgrad.ir.schemas import schema_of

Typed = tuple[ir.TypeProtocol, ir.Shape]
Kind = tuple[object, ...]
_HASHED = frozenset(
    {ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.FLOAT, ir.AttributeType.FLOATS}
    | {ir.AttributeType.STRING, ir.AttributeType.STRINGS}
)
#: Operators that make shapes of the elements of floats, or elements that shapes may be made of.
_READING = frozenset({"Constant", "OneHot", "Range", "Resize", "Upsample"})


def is_unversioned(op_type: str) -> bool:
    """Return True if an operator of the standard domain is known to inference and to no version of the specification.

    ONNX Runtime keeps one there (SimplifiedLayerNormalization), which means the same at every opset.
    """
    unknown = schema_of("", op_type, onnx.defs.onnx_opset_version()) is None
    return unknown and registry.get("", op_type, 1) is not None


def infer_model(
    model: ir.Model, calls: Calls | None = None, after: Callable[[ir.Node], None] | None = None
) -> Inference:
    """Infer the type and shape of every value of `model`, in place, as far as they can be known.

    Returns the inference, for nodes that will be added.

    Calls of local functions are inferred by `calls`. `after` gets each node of the graph itself once it is inferred,
    and may replace it.

    Raises:
        BadInput: shapes or inputs that no node of their kind can have.
    """
    graph = model.graph
    shapes = check_shapes(graph)
    loops.remember_declared(graph)
    for node, taken in known_branches(graph):
        for inner in (n for g in subgraphs(node) if g is not taken for n in walk(g)):
            inner.meta[corrections.DEAD] = True
    inference = Inference(dict(graph.opset_imports), symbols_in(shapes), calls)
    try:
        inference.infer_graph(graph, after)
    except (osi.ShapeInferenceError, osi.OpUsageError) as error:
        if isinstance(error.__cause__, BadInput):
            raise error.__cause__ from None
        raise BadInput(f"the model does not fit together: {error}") from error
    check_shapes(graph)
    return inference


class Inference:
    """Infers the outputs of nodes of one model.

    Equal layers have nodes whose operands have equal types and shapes: each kind of node is inferred once.
    """

    def __init__(
        self, opset_imports: dict[str, int], taken_dims: Sequence[str] = (), calls: Calls | None = None
    ) -> None:
        self.context = InferenceContext(opset_imports, registry, calls)
        self.context.reserve_symbol_names(taken_dims)
        self._known: dict[object, Typed] = {}
        self._shapes: dict[tuple[Dim, ...], ir.Shape] = {}  # of `_typed`

    @classmethod
    def of(cls, graph: ir.Graph, calls: Calls | None = None, elements: bool = True) -> Inference:
        """For nodes that will be emitted into `graph`; new symbols never clash with those it has.

        `calls` are the local functions that stay functions. Without `elements`, those of computed shapes are not known.
        """
        values = values_in(graph)
        inference = cls(dict(graph.opset_imports), symbols_in(distinct_shapes(values)), calls)
        if not elements:
            return inference
        vectors = [v for v in values if v.dtype == ir.DataType.INT64 and v.shape is not None and len(v.shape) < 2]
        for node in dict.fromkeys(v.producer() for v in vectors):  # so that elements of shapes are known here too
            if node is not None:
                inference(node)
        return inference

    @classmethod
    def in_context(cls, context: osi.ShapeInferenceContext) -> Inference:
        """The inference for the nodes of a lowering, while the operator itself is inferred in `context`."""
        assert isinstance(context, InferenceContext)
        inference = cls({})
        inference.context = context
        return inference

    @property
    def calls(self) -> Calls | None:
        """The local functions that stay functions, or None."""
        return self.context.calls

    def look_up(
        self, op_type: str, operands: Sequence[ir.Value | None], held: Sequence[Any]
    ) -> tuple[Kind | None, Typed | None]:
        """The kind of a standard operator with one output, and its type and shape, if one of its kind was inferred.

        Args:
            op_type: the operator.
            operands: what it reads.
            held: its attributes, as `held_by` tells them.
        """
        if (typed := self._typed(op_type, operands, held)) is not None:
            return None, typed
        kind = _kind(op_type, operands, held)
        return kind, None if kind is None else self._known.get((*kind, None, None))

    def _typed(self, op_type: str, operands: Sequence[ir.Value | None], held: Sequence[Any]) -> Typed | None:
        """The type and shape of a common operator on floats of known shape; None for others.

        Results of equal sizes share a shape: no code changes a shape in place.
        """
        infer, x = SIZES.get(op_type), operands[0] if operands else None
        if infer is None or x is None:
            return None
        shape, type_ = x.shape, x.type
        if shape is None or type(type_) is not ir.TensorType or type_.dtype not in FLOATS or self.context.reads(x):
            return None
        dims = shape.dims
        sizes = infer(dims, operands, dict(held), self.context.get_symbolic_value)
        if sizes is None:
            return None
        if sizes is not dims:
            sizes = tuple(sizes)
            shared = self._shapes.get(sizes)
            if shared is None and is_possible(sizes):
                shared = self._shapes[sizes] = ir.Shape(sizes)
            if shared is None:
                return None
            shape = shared
        else:
            for d in dims:
                if not isinstance(d, int) and d.value is None:
                    return None
        return ir.TensorType(type_.dtype) if type_.denotation else type_, shape

    def infer_graph(self, graph: ir.Graph, after: Callable[[ir.Node], None] | None = None) -> None:
        """Infer every value of `graph` and of the graphs in it, in order; see `infer_model` for `after`.

        Raises:
            ShapeInferenceError, OpUsageError: a node is not valid.
        """
        for value in graph.initializers.values():
            tensor = ir.convenience.get_const_tensor(value)
            if tensor is not None and value.shape != tensor.shape:
                value.shape = ir.Shape(tensor.shape)  # type: ignore[arg-type]
        for value in graph.inputs:
            self.context.name_anonymous_dims(value)
        for node in graph:
            if node.attributes.data and (inner := subgraphs(node)):
                if self.context.function(node) in (loops.infer_loop, loops.infer_scan):
                    loops.enter_body(node)
                for body in inner:
                    self.infer_graph(body)
            self.infer_node(node)
            if after is not None:
                after(node)

    def __call__(self, node: ir.Node, kind: Kind | None = None) -> None:
        """Set type and shape of the outputs of a node, of a `kind` that may be known; unknown ones stay ``None``.

        Raises:
            RuleError: there is no such operator, or it does not take these operands and attributes.
        """
        try:
            self.infer_node(node, kind)
        except (osi.ShapeInferenceError, osi.OpUsageError) as error:
            reason = error.__cause__ or error.message
            if not isinstance(reason, BadInput):  # a bound of `limits`: the operands are too large, the rule is right
                raise RuleError(f"{described(node)} is not valid: {reason}") from error
        if any(v.type is None for v in node.outputs):
            self._check_name(node)
            ask_onnx(node, self.context)

    def _check_name(self, node: ir.Node) -> None:
        """Raise RuleError for an operator that no version of a known domain has."""
        context = self.context
        version = context.get_opset_version(node.domain)
        if context.function(node) is not None or schema_of(node.domain, node.op_type, version) is not None:
            return
        known = sorted({*operators(node.domain, version)})
        if not known:
            return
        close = close_to(node.op_type, known)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        where = f"the domain {node.domain!r}" if node.domain else f"opset {version}"
        raise RuleError(f"{where} has no operator {node.op_type!r}{hint}")

    def infer_node(self, node: ir.Node, kind: Kind | None = None) -> None:
        """Set type and shape of `node`'s outputs, and remember them for nodes of this kind.

        Raises:
            ShapeInferenceError, OpUsageError: the node is not valid.
        """
        context = self.context
        made = context.made
        if kind is None and not node.domain and len(node.outputs) == 1:
            held = held_by(node.attributes.data.values())
            out = node.outputs[0]
            if held is not None:
                kind, typed = self.look_up(node.op_type, node.inputs, held)
                fits = typed is not None and (out.shape is None or out.shape.dims == typed[1].dims)
                if typed is not None and fits and out.dtype in (None, typed[0].dtype):
                    out.type, out.shape = out.type or typed[0], out.shape or typed[1]
                    return
        if kind is not None:
            out = node.outputs[0]
            kind = *kind, out.dtype, None if out.shape is None else out.shape.dims
            known_types = self._known.get(kind)
            if known_types is not None:
                out.type, out.shape = known_types
                return
        for value in node.inputs:
            if value is not None:
                context.name_anonymous_dims(value)
        infer = context.function(node)
        if infer is None:
            if node.domain and traits_of(node).is_elementwise:
                corrections.infer_elementwise(context, node)
            else:
                ask_onnx(node, context)
            return
        context.run(infer, node)
        if kind is not None and made == context.made and _is_array(node.outputs[0]):
            out = node.outputs[0]
            self._known[kind] = not_none(out.type), not_none(out.shape)


class WithoutTypes(Inference):
    """Leaves the types of nodes open, which are inferred with the whole model."""

    def look_up(
        self, op_type: str, operands: Sequence[ir.Value | None], held: Sequence[Any]
    ) -> tuple[Kind | None, Typed | None]:
        """Return no kind and no type."""
        return None, None

    def __call__(self, node: ir.Node, kind: Kind | None = None) -> None:
        """Do nothing."""


def operators(domain: str, version: int) -> Iterator[str]:
    """Yield the operators of `domain` at `version`: those of the specification, and those known to inference."""
    yield from registry.names(domain)
    for schema in onnx.defs.get_all_schemas():
        if schema.domain == domain and schema.since_version <= version:
            yield schema.name


def kind_of(node: ir.Node) -> Kind | None:
    """A hashable key, equal for nodes whose outputs have equal types and shapes; None for no such key.

    Nodes with one output of a standard operator, equal attributes, and operands of equal types and shapes share a key.
    """
    if node.domain or len(node.outputs) != 1:
        return None
    held = held_by(node.attributes.data.values()) if node.attributes.data else ()
    return None if held is None else _kind(node.op_type, node.inputs, held)


def held_by(attributes: Iterable[ir.Attr]) -> list[Any] | None:
    """Names and values of `attributes` in a comparable form; None if one is neither number nor text."""
    values = []
    for a in attributes:
        if a.type not in _HASHED:
            return None
        values.append((a.name, tuple(a.value) if isinstance(a.value, (list, tuple)) else a.value))
    return values


def _is_array(value: ir.Value) -> bool:
    """True if `value` is a tensor of floats of known shape."""
    return isinstance(value.type, ir.TensorType) and value.dtype in FLOATS and value.shape is not None


def _kind(op_type: str, operands: Sequence[ir.Value | None], held: Sequence[Any]) -> Kind | None:
    """The key of a standard operator with one output (see `kind_of`).

    Float tensors enter by type and shape. Other operands enter as themselves: their elements may decide the shape.
    """
    if op_type in _READING:
        return None
    keys = [v if v is None or not _is_array(v) else (v.dtype, v.shape.dims) for v in operands]  # type: ignore[union-attr]
    return op_type, *keys, *held
