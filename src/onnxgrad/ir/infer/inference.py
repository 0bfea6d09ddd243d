"""Types and shapes: of whole models when they are opened, of one node at a time while a derivative is written.

The work is done by ``onnx-shape-inference``, with corrections and further operators that the modules beside this one
register.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import onnx
import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.infer import classical, corrections, limits, loops, ranks, sequences
from onnxgrad.ir.infer.calls import Calls, calls_known
from onnxgrad.ir.infer.corrections import FLOATS, alike
from onnxgrad.ir.infer.limits import check_shapes
from onnxgrad.ir.infer.onnx_fallback import ask_onnx
from onnxgrad.ir.schemas import schema_of

for _module in (corrections, limits, loops, sequences, classical, ranks):
    _module.register()
logging.getLogger("onnx_shape_inference").setLevel(logging.ERROR)


def is_unversioned(op_type: str) -> bool:
    """Whether an operator of the standard domain is known to inference and to no version of the specification.

    ONNX Runtime keeps one there (SimplifiedLayerNormalization), which means the same at every opset.
    """
    unknown = schema_of("", op_type, onnx.defs.onnx_opset_version()) is None
    return unknown and osi.registry.get("", op_type, 1) is not None


def forget_values(graph: ir.Graph) -> None:
    """Remove the notes about values of shapes that inference leaves in the metadata."""
    for g in scopes(graph):
        for node in g:
            for value in node.outputs:
                value.metadata_props.pop(osi.SYM_DATA_KEY, None)


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
            osi.infer_symbolic_shapes(model, warn_on_missing=False, adopt_declared_symbols=False)
    except (osi.ShapeInferenceError, osi.OpUsageError) as error:
        if isinstance(error.__cause__, BadInput):
            raise error.__cause__ from None
        raise BadInput(f"the model does not fit together: {error}") from error
    check_shapes(model.graph)


def _symbols(value: ir.Value) -> list[str]:
    """The names of dimensions in the shape of `value`."""
    return [] if value.shape is None else [d.value for d in value.shape if not isinstance(d, int) and d.value]


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
        self._known: dict[object, tuple[ir.DataType, ir.Shape]] = {}

    @classmethod
    def of(cls, graph: ir.Graph, calls: Calls | None = None) -> Inference:
        """For nodes that will be emitted into `graph`; new symbols never clash with those it has.

        `calls` are the local functions that stay functions.
        """
        dims: set[str] = set()
        shapes: list[ir.Node] = []  # so that the values of shapes computed in the graph are known here too
        for g in scopes(graph):
            for value in g.inputs:
                dims.update(_symbols(value))
            for node in g:
                for value in node.outputs:
                    dims.update(_symbols(value))
                    if value.dtype == ir.DataType.INT64 and value.shape is not None and len(value.shape) < 2:
                        shapes.append(node)
        inference = cls(dict(graph.opset_imports), sorted(dims), calls)
        for node in dict.fromkeys(shapes):
            inference(node)
        return inference

    @property
    def _made(self) -> int | None:
        """How many symbols there are for dimensions nobody knows; None in a context of others, which does not count."""
        context = self.context
        return context.made if type(context) is _Counting else None

    def __call__(self, node: ir.Node) -> None:
        """Set type and shape of `node`'s outputs; what cannot be known stays ``None``."""
        if node.outputs and node.outputs[0].shape is None and alike(node):
            return
        made = self._made
        kind = None if made is None else _kind(node)
        if kind is not None and kind in self._known:
            dtype, node.outputs[0].shape = self._known[kind]
            node.outputs[0].type = ir.TensorType(dtype)
            return
        opset = self.context.get_opset_version(node.domain)
        infer = osi.registry.get(node.domain, node.op_type, opset)
        if infer is not None:
            try:
                if self.calls is None:
                    infer(self.context, node)
                else:
                    with calls_known(self.calls):
                        infer(self.context, node)
            except Exception:
                logging.getLogger(__name__).debug("inference failed on %s", node, exc_info=True)
        if any(v.type is None for v in node.outputs):
            ask_onnx(node, opset)
        if kind is not None and made == self._made:
            (out,) = node.outputs
            if _is_array(out):
                assert out.dtype is not None
                assert out.shape is not None
                self._known[kind] = out.dtype, out.shape


def _is_array(value: ir.Value) -> bool:
    """Whether it is a tensor of floats with two axes or more; a sequence of them has a dtype and a shape as well."""
    tensor = isinstance(value.type, ir.TensorType) and value.dtype in FLOATS
    return tensor and value.shape is not None and len(value.shape) > 1


def _kind(node: ir.Node) -> object | None:
    """What the type and shape of the one output of `node` depend on, where it is a standard operator; else None.

    Tensors of floats with two axes or more are their type and shape; others are themselves, for the sake of their
    elements.
    """
    if node.domain or len(node.outputs) != 1 or node.outputs[0].type is not None or node.outputs[0].shape is not None:
        return None
    operands = [v if v is None or not _is_array(v) else (v.dtype, v.shape.dims) for v in node.inputs]  # type: ignore[union-attr]
    held = []
    for a in node.attributes.values():
        if a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS, ir.AttributeType.TENSOR):
            return None
        held.append((a.name, tuple(a.value) if isinstance(a.value, (list, tuple)) else a.value))
    return node.op_type, *operands, *held
