"""Types and shapes: of whole models when they are opened, of one node at a time while a derivative is written.

The work is done by ``onnx-shape-inference``, with corrections and further operators that the modules beside this one
register.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import scopes, subgraphs
from onnxgrad.ir.infer import classical, corrections, limits, loops, ranks, sequences
from onnxgrad.ir.infer.calls import Calls, calls_known
from onnxgrad.ir.infer.corrections import FLOATS, alike
from onnxgrad.ir.infer.limits import check_shapes
from onnxgrad.ir.infer.onnx_fallback import ask_onnx
from onnxgrad.ir.notes import properties
from onnxgrad.ir.schemas import schema_of

for _module in (corrections, limits, loops, sequences, classical, ranks):
    _module.register()
logging.getLogger("onnx_shape_inference").setLevel(logging.ERROR)


Typed = tuple[ir.TypeProtocol, ir.Shape]
_HASHED = frozenset(
    {ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.FLOAT, ir.AttributeType.FLOATS}
    | {ir.AttributeType.STRING, ir.AttributeType.STRINGS}
)
#: Operators that make shapes of the elements of floats, or elements that shapes may be made of.
_READING = frozenset({"Constant", "OneHot", "Range", "Resize", "Upsample"})


def is_unversioned(op_type: str) -> bool:
    """Whether an operator of the standard domain is known to inference and to no version of the specification.

    ONNX Runtime keeps one there (SimplifiedLayerNormalization), which means the same at every opset.
    """
    unknown = schema_of("", op_type, onnx.defs.onnx_opset_version()) is None
    return unknown and osi.registry.get("", op_type, 1) is not None


def forget_values(graph: ir.Graph, graphs: Sequence[ir.Graph] = ()) -> None:
    """Remove the notes about values of shapes that inference leaves in `graph`, whose scopes are `graphs`."""
    for g in graphs or scopes(graph):
        for node in g:
            for value in node.outputs:
                if noted := properties(value):
                    noted.pop(osi.SYM_DATA_KEY, None)


def infer_model(model: ir.Model, calls: Calls | None = None) -> None:
    """Fill in types and shapes of every value of `model`, in place, where they can be known.

    `calls` tells what calls of local functions give.

    Raises:
        BadInput: shapes or inputs that no node of their kind can have.
    """
    check_shapes(model.graph)
    loops.remember_declared(model.graph)
    try:
        with calls_known(calls):
            if not _infer_flat(model):
                osi.infer_symbolic_shapes(model, warn_on_missing=False, adopt_declared_symbols=False)
    except (osi.ShapeInferenceError, osi.OpUsageError) as error:
        if isinstance(error.__cause__, BadInput):
            raise error.__cause__ from None
        raise BadInput(f"the model does not fit together: {error}") from error
    check_shapes(model.graph)


def _infer_flat(model: ir.Model) -> bool:
    """`infer_model` of a graph without graphs in it and calls, as the library goes about it, but each kind once.

    Whether it is one, and the library knows all of its operators.
    """
    graph = model.graph
    inference = Inference(dict(graph.opset_imports), _symbols(_values(graph)))
    opset = inference.context.get_opset_version
    operators = {(node.domain, node.op_type) for node in graph}
    flat = not model.functions and all(osi.registry.get(d, o, opset(d)) is not None for d, o in operators)
    if not flat or any(subgraphs(node) for node in graph if node.attributes.data):
        return False
    for value in graph.initializers.values():
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None and value.shape != tensor.shape:
            value.shape = ir.Shape(tensor.shape)  # type: ignore[arg-type]
    for value in graph.inputs:
        inference.context.name_anonymous_dims(value)
    named: set[int] = set()  # values share shapes
    for node in graph:
        for v in node.inputs:
            if v is not None and id(v.shape) not in named:
                inference.context.name_anonymous_dims(v)
                named.add(id(v.shape))
        try:
            inference.ask(node)
        except (osi.ShapeInferenceError, osi.OpUsageError):
            raise
        except Exception as error:
            what = {"node_name": node.name, "op_type": node.op_type, "domain": node.domain}
            message = f"Shape inference failed for {node.domain}::{node.op_type}"
            raise osi.ShapeInferenceError(**what, message=message) from error
    return True


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _symbols(values: Iterable[ir.Value]) -> list[str]:
    """The names of dimensions in the shapes of `values`, sorted."""
    shapes = {id(v.shape): v.shape for v in values if v.shape is not None}  # many share one
    return sorted({d.value for shape in shapes.values() for d in shape if not isinstance(d, int) and d.value})


class _Counting(osi.ShapeInferenceContext):
    """Counts the symbols that are made for dimensions nobody knows: what has them is like nothing else."""

    made = 0

    def new_symbolic_dim(self) -> ir.SymbolicDim:
        """As the base does."""
        self.made += 1
        return super().new_symbolic_dim()


class Inference:
    """Infers the outputs of nodes as they are emitted into one model.

    Equal layers make nodes whose operands have equal types and shapes: each kind of node is inferred once.
    """

    def __init__(
        self, opset_imports: dict[str, int], taken_dims: Sequence[str] = (), calls: Calls | None = None
    ) -> None:
        self.context: osi.ShapeInferenceContext = _Counting(opset_imports)
        self.context.reserve_symbol_names(taken_dims)
        self.calls = calls
        self._known: dict[object, Typed] = {}

    @classmethod
    def of(cls, graph: ir.Graph, calls: Calls | None = None) -> Inference:
        """For nodes that will be emitted into `graph`; new symbols never clash with those it has.

        `calls` are the local functions that stay functions.
        """
        graphs = scopes(graph)
        inference = cls(dict(graph.opset_imports), _symbols(v for g in graphs for v in _values(g)), calls)
        shapes: list[ir.Node] = []  # so that the values of shapes computed in the graph are known here too
        for node in (node for g in graphs for node in g):
            for value in node.outputs:
                if value.dtype == ir.DataType.INT64 and value.shape is not None and len(value.shape) < 2:
                    shapes.append(node)
        for node in dict.fromkeys(shapes):
            inference(node)
        return inference

    @property
    def _made(self) -> int | None:
        """How many symbols there are for dimensions nobody knows; None in a context of others, which does not count."""
        context = self.context
        return context.made if type(context) is _Counting else None

    def known(self, op_type: str, operands: Sequence[ir.Value | None], held: Sequence[Any]) -> Typed | None:
        """Type and shape of the one output of a standard operator, where nobody has to be asked.

        Args:
            op_type: the operator.
            operands: what it reads.
            held: its attributes, as `held_by` tells them.
        """
        found = alike(op_type, operands)
        if found is None and (kind := _kind(op_type, operands, held)) is not None:
            found = self._known.get((*kind, None, None))
        return found

    def __call__(self, node: ir.Node) -> None:
        """Set type and shape of `node`'s outputs; what cannot be known stays ``None``."""
        try:
            self.ask(node)
        except Exception:
            logging.getLogger(__name__).debug("inference failed on %s", node, exc_info=True)
        if any(v.type is None for v in node.outputs):
            ask_onnx(node, self.context.get_opset_version(node.domain))

    def ask(self, node: ir.Node) -> None:
        """Set type and shape of `node`'s outputs as the library says, and remember it for nodes of this kind.

        Raises whatever the library does over a node that is not valid.
        """
        made = self._made
        kind = kind_of(node) if made is not None else None
        if kind is not None:
            out = node.outputs[0]
            kind = *kind, out.dtype, None if out.shape is None else out.shape.dims
            found = self._known.get(kind)
            if found is not None:
                out.type, out.shape = found
                return
        infer = osi.registry.get(node.domain, node.op_type, self.context.get_opset_version(node.domain))
        if infer is None:
            return
        if self.calls is None:
            infer(self.context, node)
        else:
            with calls_known(self.calls):
                infer(self.context, node)
        if kind is not None and made == self._made and _is_array(node.outputs[0]):
            out = node.outputs[0]
            assert out.type is not None
            assert out.shape is not None
            self._known[kind] = out.type, out.shape


def kind_of(node: ir.Node) -> tuple[object, ...] | None:
    """What nodes share that are alike but for names and elements; None for what is like nothing else.

    That is: one output, of a standard operator, the same attributes, and operands of the same types and shapes.
    """
    if node.domain or len(node.outputs) != 1:
        return None
    held = held_by(node.attributes.data.values()) if node.attributes.data else ()
    return None if held is None else _kind(node.op_type, node.inputs, held)


def held_by(attributes: Iterable[ir.Attr]) -> list[Any] | None:
    """Names and values of `attributes`, to compare; None where one holds more than numbers and text."""
    held = []
    for a in attributes:
        if a.type not in _HASHED:
            return None
        held.append((a.name, tuple(a.value) if isinstance(a.value, (list, tuple)) else a.value))
    return held


def _is_array(value: ir.Value) -> bool:
    """Whether it is a tensor of floats of known shape; a sequence of them has a dtype and a shape as well."""
    return isinstance(value.type, ir.TensorType) and value.dtype in FLOATS and value.shape is not None


def _kind(op_type: str, operands: Sequence[ir.Value | None], held: Sequence[Any]) -> tuple[object, ...] | None:
    """What the type and shape of the one output of a standard operator depend on; None if it cannot be told.

    Tensors of floats are their type and shape; others are themselves, for the sake of their elements.
    """
    if op_type in _READING:
        return None
    told = [v if v is None or not _is_array(v) else (v.dtype, v.shape.dims) for v in operands]  # type: ignore[union-attr]
    return op_type, *told, *held
