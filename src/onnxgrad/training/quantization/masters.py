"""Masters: trainable floats in place of stored integers, W → QuantizeLinear → DequantizeLinear.

The graph computes the same: rounding restores the stored integers. The biases of integer kernels are int32 with a step
of s_x·s_w, far finer than the sums that they are added to; they are plain floats in training.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Names
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import add_initializer, named_values
from onnxgrad.ir.match import constant, not_none, producer
from onnxgrad.training.graph.rounding import is_rounding
from onnxgrad.training.quantization.numbers import dequantize
from onnxgrad.training.quantization.record import Bias, Storage, record_in

#: Integers that QuantizeLinear gives.
STORED = frozenset({
    *(ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT16, ir.DataType.UINT16),
})  # fmt: skip
#: The suffix that ONNX Runtime's quantizers append to the name of a weight.
_SUFFIXES = ("_quantized", "_DQ_Q4", "_DQ_Q8")


def with_masters(
    model: ir.Model, known: Mapping[str, np.ndarray] | None = None, opened: Storage | None = None
) -> Storage | None:
    """Replace the integers that `model` stores by floats, in place. Returns a record of them.

    None if no node in its main graph is quantized.

    Args:
        model: may be one to which that was done before.
        known: the weights before they were quantized, by the names that they had.
        opened: a record to add to, of operators that were opened.
    """
    graph = model.graph
    nodes = [n for n in graph if is_rounding(n)]
    if not nodes:
        return None
    record = record_in(model) or opened or Storage()
    names = Names.of_graph(graph)
    for node in nodes:
        for at in range(len(node.inputs)):
            _lift(graph, node, at, names)
    for value in dict.fromkeys(n.inputs[0] for n in nodes if n.op_type == "DequantizeLinear"):
        if value is not None and value.is_initializer() and not value.is_graph_input():
            _Stored(graph, value, names, known or {}).unfold(record)
    record.write(model)
    return record


def _lift(graph: ir.Graph, node: ir.Node, at: int, names: Names) -> None:
    """Make an initializer of an operand from a Constant node."""
    value = node.inputs[at]
    maker = producer(value, "Constant")
    if value is None or maker is None:
        return
    array = constant(value)
    if array is None or value.is_graph_output():
        return
    value.replace_all_uses_with(add_initializer(graph, ir.tensor(array, dtype=value.dtype, name=value.name)))
    graph.remove(maker, safe=True)


class _Stored:
    """Stored integers, and the nodes that dequantize them."""

    def __init__(self, graph: ir.Graph, value: ir.Value, names: Names, known: Mapping[str, np.ndarray]) -> None:
        self.graph, self.value, self.names, self.known = graph, value, names, known
        self.nodes = [node for node, _ in value.uses()]

    def unfold(self, record: Storage) -> None:
        """Write the float; nothing where that could not be undone."""
        node = self.nodes[0]
        operands = [(*n.inputs[1:], None)[:2] for n in self.nodes]
        own = all(is_rounding(n) and n.inputs[0] is self.value and n.graph is self.graph for n in self.nodes)
        scale, point = operands[0]
        if not own or any(o != operands[0] for o in operands) or scale is None or self.value.is_graph_output():
            return
        steps, zero = constant(scale), constant(point)
        if steps is None or scale.dtype not in FLOATS or (point is not None and zero is None):
            return
        if not np.isfinite(steps.astype(np.float32)).all():
            return
        if not steps.all():  # the values stored there are 0 with any scale
            if any(n not in self.nodes for n, _ in scale.uses()):
                return
            scale.const_value = ir.tensor(np.where(steps == 0, steps.dtype.type(1), steps), name=scale.name)
        held = not_none(constant(self.value))
        axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
        array = dequantize(held, steps, np.zeros((), np.int64) if zero is None else zero, axis, block)
        if self.value.dtype == ir.DataType.INT32:
            self._bias(record, array, scale, point, axis)
        elif self.value.dtype in STORED:
            self._weight(record, array, node)

    def _master(self, array: np.ndarray) -> tuple[str, ir.Value]:
        """The name of the replaced integers, and the float that replaces them, under its original name."""
        stored = self.value.name or ""
        name = stored
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        before = self.known.get(name)
        if before is not None and before.shape == array.shape:
            array = before.astype(array.dtype)
        del self.graph.initializers[stored]
        tensor = ir.tensor(array, name=stored if name in named_values(self.graph) else name)
        held = add_initializer(self.graph, tensor)
        self.names.reserve([held.name])
        return stored, held

    def _weight(self, record: Storage, array: np.ndarray, node: ir.Node) -> None:
        dtype = self.value.dtype
        stored, master = self._master(array)
        scale, point = (*node.inputs[1:], None)[:2]
        assert dtype is not None
        assert scale is not None
        if point is None:
            zeros = np.zeros([int(d) for d in scale.shape or ()], dtype.numpy())  # type: ignore[arg-type]
            tensor = ir.tensor(zeros, dtype=dtype, name=self.names.fresh(f"{stored}_zero_point"))
            point = add_initializer(self.graph, tensor)
        attributes = [a for n, a in node.attributes.items() if n in ("axis", "block_size")]
        rounding = ir.Node(
            "",
            "QuantizeLinear",
            [master, scale, point],
            attributes,
            name=self.names.exactly(f"{stored}_QuantizeLinear"),
        )
        (given,) = rounding.outputs
        given.name = self.names.exactly(f"{stored}_rounded")
        given.type, given.shape = ir.TensorType(dtype), master.shape
        self.value.replace_all_uses_with(given)
        self.graph.insert_before(next(n for n in self.graph if n in self.nodes), rounding)
        record.weights[master.name or ""] = stored

    def _bias(self, record: Storage, array: np.ndarray, scale: ir.Value, point: ir.Value | None, axis: int) -> None:
        steps = constant(scale)
        pairs = {_factors(node.outputs[0]) for node in self.nodes}
        product = pairs.pop() if len(pairs) == 1 else None
        if product is not None:
            x, w = (constant(v) for v in product)
            if x is None or w is None or steps is None or not _is_product(x, w, steps):
                product = None
        outputs = [node.outputs[0] for node in self.nodes]
        if any(v.is_graph_output() for v in outputs):
            return
        for node in self.nodes:
            node.outputs[0].name = None
        stored, master = self._master(array)
        for node in self.nodes:
            node.outputs[0].replace_all_uses_with(master)
            self.graph.remove(node, safe=True)
        x_name, w_name = ("", "") if product is None else (product[0].name or "", product[1].name or "")
        own = "" if point is None else point.name or ""
        record.biases[master.name or ""] = Bias(stored, scale.name or "", own, x_name, w_name, axis)


def _factors(bias: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The scales of the input and of the weight of the one kind of node that adds `bias`."""
    found = set()
    for node, at in bias.uses():
        makers = [None if v is None else v.producer() for v in node.inputs[:2]]
        scales = [m.inputs[1] for m in makers if m is not None and is_rounding(m) and m.op_type == "DequantizeLinear"]
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or at != 2 or len(scales) != 2 or None in scales:
            return None
        found.add((scales[0], scales[1]))
    return found.pop() if len(found) == 1 else None  # type: ignore[return-value]


def _is_product(x: np.ndarray, w: np.ndarray, steps: np.ndarray) -> bool:
    """True if `steps` are those of an integer kernel: steps of x times steps of w."""
    found = np.ravel(x) * np.ravel(w)
    return found.size == steps.size and np.allclose(found, np.ravel(steps), rtol=1e-3, atol=0)
