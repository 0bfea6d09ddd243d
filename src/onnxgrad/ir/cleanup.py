"""The last pass over a derived graph: dead code is eliminated, and what ONNX Runtime misreads is rewritten.

A Pad that names its axes, next to a Transpose, is misread by ONNX Runtime's transpose optimizer (found in
1.31): it permutes the pads as if there were one pair for each axis, so that the model fails to run or, where the
numbers happen to fit, pads the wrong axes. Derivatives put Transposes next to everything, so every Pad is made
to name none.

Its fusion of MatMul with a Transpose on the left forgets the transposition where the right operand is a vector (1.31
and 1.32, level "extended"): so a vector becomes a matrix of one column there.

Where the strides of a window with ``auto_pad="SAME_…"`` leave gaps, its padding comes out negative: ONNX Runtime skips
the first rows then (and refuses a MaxPool), where TensorFlow, whose rule it is, pads with nothing. So these pads are
written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import prune, scopes
from onnxgrad.ir.infer.inference import forget_values
from onnxgrad.ir.match import constant, is_standard
from onnxgrad.ir.names import Names


def finish(graph: ir.Graph, keep: Iterable[ir.Value] = (), names: Names | None = None) -> None:
    """Clean up a derived `graph`, in place; values of `keep` stay even if no output needs them."""
    graphs = scopes(graph)
    write_otherwise(graph, names, graphs)
    forget_values(graph, graphs)
    prune(graph, keep)


def write_otherwise(graph: ir.Graph, names: Names | None = None, graphs: Sequence[ir.Graph] = ()) -> None:
    """Rewrite, in place, the nodes of `graph`, whose scopes are `graphs`, that ONNX Runtime misreads."""
    windows = ("AveragePool", "Conv", "LpPool", "MaxPool")
    found: dict[str, list[ir.Node]] = {name: [] for name in ("Pad", "MatMul", "Transpose", *windows)}
    for g in graphs or scopes(graph):
        for node in g:
            if (op_type := node.op_type) in found:
                found[op_type].append(node)
    for node in found["Pad"]:
        if is_standard(node) and len(node.inputs) > 3 and node.inputs[3] is not None:
            names = names or Names.of_graph(graph)
            _Rewriting(node, names).name_no_axes()
    for node in found["MatMul"] if found["Transpose"] else ():
        if _has_vector(node) and node.inputs[1] is not None and node.inputs[1].shape is not None:
            names = names or Names.of_graph(graph)
            _Rewriting(node, names).make_a_column()
    for node in (n for name in windows for n in found[name]):
        _write_same_pads(node)


def _write_same_pads(node: ir.Node) -> None:
    """Write the pads of a window whose strides leave gaps and whose padding is that of SAME, where sizes are known."""
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    if node.domain or mode not in ("SAME_UPPER", "SAME_LOWER"):
        return
    x, w = node.inputs[0], node.inputs[1] if node.op_type == "Conv" else None
    kernel = node.attributes.get_ints("kernel_shape") or (w.shape[2:] if w is not None and w.shape is not None else ())
    count = len(kernel)
    strides = node.attributes.get_ints("strides") or [1] * count
    dilations = node.attributes.get_ints("dilations") or [1] * count
    sizes = [None] * count if x is None or x.shape is None else list(x.shape[2:])
    heads, tails, leaves_gaps = [], [], False
    for h, k, s, d in zip(sizes, kernel, strides, dilations):
        reach = (k - 1) * d + 1 if isinstance(k, int) else None
        if reach is None or (not isinstance(h, int) and reach > 1):
            return
        total = (-(-h // s) - 1) * s + reach - h if isinstance(h, int) else 0
        leaves_gaps |= reach < s
        total = max(total, 0)
        heads.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
        tails.append(total - heads[-1])
    if leaves_gaps:
        node.attributes.pop("auto_pad")
        node.attributes["pads"] = ir.AttrInt64s("pads", [*heads, *tails])


def has_transpose(graph: ir.Graph) -> bool:
    """True if a node anywhere in `graph` exchanges axes."""
    return any(node.op_type == "Transpose" for g in scopes(graph) for node in g)


def vector_products(graph: ir.Graph) -> list[ir.Node]:
    """Each MatMul anywhere in `graph` whose right operand is a vector, or is not known not to be one."""
    return [node for g in scopes(graph) for node in g if node.op_type == "MatMul" and _has_vector(node)]


def _has_vector(product: ir.Node) -> bool:
    """True if the right operand of `product` may be a vector and the left operand is a matrix."""
    if product.domain or len(product.inputs) != 2:
        return False
    a, b = product.inputs
    return _rank(b) in (None, 1) and _rank(a) not in (0, 1)


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


class _Rewriting:
    """One node that ONNX Runtime misreads."""

    def __init__(self, node: ir.Node, names: Names) -> None:
        assert isinstance(node.graph, ir.Graph)
        self.graph, self.node, self.names = node.graph, node, names

    def make_a_column(self) -> None:
        """Have a product of a matrix with a vector be one with a matrix of one column."""
        a, x = self.node.inputs
        (out,) = self.node.outputs
        assert x is not None
        assert x.shape is not None
        axis = self.constant(np.array([-1], np.int64))
        column = self.emit("Unsqueeze", x, axis)
        product = self.emit("MatMul", a, column)
        for value, like in ((column, x), (product, out)):
            value.type = like.type
            value.shape = None if like.shape is None else ir.Shape([*like.shape, 1])
        self.node.op_type = "Squeeze"
        self.node.replace_input_with(0, product)
        self.node.replace_input_with(1, axis)

    def name_no_axes(self) -> None:
        """Give a Pad a pair of pads for every axis, where the rank is known."""
        x, pads, _, axes = self.node.inputs[:4]
        assert x is not None
        assert pads is not None
        assert axes is not None
        if x.shape is None:
            return
        rank = len(x.shape)
        named, amounts = constant(axes), constant(pads)
        places = None if named is None else np.concatenate([named % rank, named % rank + rank]).astype(np.int64)
        whole = np.zeros(2 * rank, np.int64)
        if places is not None and amounts is not None:
            whole[places] = amounts
            new = self.constant(whole)
        else:
            at = self.places(axes, rank) if places is None else self.constant(places)
            new = self.emit("ScatterElements", self.constant(whole), at, pads, axis=0)
        self.node.replace_input_with(1, new)
        self.node.resize_inputs(3)

    def places(self, axes: ir.Value, rank: int) -> ir.Value:
        """The indices of the pads for `axes`; an axis below 0 counts from the end."""
        count = self.constant(np.array(rank, np.int64))
        first = self.emit("Mod", self.emit("Cast", axes, to=int(ir.DataType.INT64)), count)
        return self.emit("Concat", first, self.emit("Add", first, count), axis=0)

    def constant(self, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=self.names.fresh("const"))
        value = ir.Value(
            name=tensor.name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype)
        )
        self.graph.register_initializer(value)
        return value

    def emit(self, op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        node = ir.Node("", op_type, inputs, [ir.AttrInt64(name, number) for name, number in attributes.items()])
        (value,) = node.outputs
        value.name = node.name = self.names.fresh(f"d_{op_type}")
        value.type = ir.TensorType(ir.DataType.INT64)
        value.shape = ir.Shape([None])
        self.graph.insert_before(self.node, node)
        return value
