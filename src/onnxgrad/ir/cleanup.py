"""The end of every derivation: fold constants, rewrite nodes that ONNX Runtime is bad at, eliminate dead code.

A Pad that names its axes, next to a Transpose, is misread by ONNX Runtime's transpose optimizer (found in
1.31): it permutes the pads as if there were one pair for each axis, so that the model fails to run or, where the
numbers happen to fit, pads the wrong axes. Derivatives put Transposes next to everything, so every Pad is made
to name none.

A MatMul whose right operand is a vector it computes with a product for each row: that of a 1000×1000 matrix takes 30
times as long as with a matrix of one column. So a vector becomes a column where there are more than a few rows, and
everywhere in graphs with a Transpose: a fusion with one on the left forgets the transposition of a product with a
vector (1.31 and 1.32, level "extended").

If the strides of a window with ``auto_pad="SAME_…"`` leave gaps, its padding is negative by the formula. ONNX Runtime
then skips the first rows (and refuses a MaxPool), whereas TensorFlow, the origin of the rule, pads with nothing. So
these pads are made explicit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.fold import fold_constants
from onnxgrad.ir.graph import prune, walk
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.match import constant, is_standard, not_none, rank, sizes
from onnxgrad.ir.names import Names

#: From as many rows on, a product with a column is faster than one with a vector.
_MANY_ROWS = 8


def end_derivation(b: Builder, keep: Iterable[ir.Value] = ()) -> None:
    """Clean up the graph of `b`, in place: fold the constants that `b` wrote, then `finish`."""
    fold_constants(b.graph, b.written())
    finish(b.graph, keep, b.names)


def finish(graph: ir.Graph, keep: Iterable[ir.Value] = (), names: Names | None = None) -> None:
    """Clean up a derived `graph`, in place; values of `keep` stay even if no output needs them."""
    write_otherwise(graph, names, slow=True)
    prune(graph, keep)


def write_otherwise(graph: ir.Graph, names: Names | None = None, slow: bool = False) -> None:
    """Rewrite, in place, the nodes of `graph` that ONNX Runtime misreads, and with `slow` those that it runs slowly."""
    windows = ("AveragePool", "Conv", "LpPool", "MaxPool")
    nodes_of: dict[str, list[ir.Node]] = {name: [] for name in ("Pad", "MatMul", "Transpose", *windows)}
    for node in walk(graph):
        if (op_type := node.op_type) in nodes_of:
            nodes_of[op_type].append(node)
    pads = [n for n in nodes_of["Pad"] if is_standard(n) and len(n.inputs) > 3 and n.inputs[3] is not None]
    products = [n for n in nodes_of["MatMul"] if _has_vector(n) and rank(n.inputs[1])]
    if not nodes_of["Transpose"]:
        products = [n for n in products if slow and not has_few_rows(n.inputs[0])]
    if pads or products:
        names, infer = names or Names.of_graph(graph), Inference(dict(graph.opset_imports))
        for nodes, write in ((pads, _name_no_axes), (products, _make_a_column)):
            for node in nodes:
                assert isinstance(node.graph, ir.Graph)
                write(Builder(node.graph, names, infer, before=node), node)
    for node in (n for name in windows for n in nodes_of[name]):
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


def vector_products(graph: ir.Graph) -> list[ir.Node]:
    """Each MatMul anywhere in `graph` whose right operand is a vector, or is not known not to be one."""
    return [node for node in walk(graph) if node.op_type == "MatMul" and _has_vector(node)]


def _has_vector(product: ir.Node) -> bool:
    """True if the right operand of `product` may be a vector and the left operand is a matrix."""
    if product.domain or len(product.inputs) != 2:
        return False
    a, b = product.inputs
    return rank(b) in (None, 1) and rank(a) not in (0, 1)


def has_few_rows(matrix: ir.Value | None) -> bool:
    """True if products with `matrix` take no longer than the two views that make a vector a column."""
    shape = sizes(matrix)
    return shape is not None and math.prod(shape[:-1]) < _MANY_ROWS


def _make_a_column(b: Builder, product: ir.Node) -> None:
    """Have a `product` of a matrix with a vector be one with a matrix of one column."""
    a, x = map(not_none, product.inputs)
    axis = b.const(np.array([-1], np.int64))
    column = b.MatMul(b.var(a), b.Unsqueeze(b.var(x), axis))
    product.op_type = "Squeeze"
    product.replace_input_with(0, column.value)
    product.replace_input_with(1, axis.value)


def _name_no_axes(b: Builder, pad: ir.Node) -> None:
    """Extend the pads of `pad` to a pair for every axis, if the rank is known."""
    x, pads, _, axes = pad.inputs[:4]
    assert pads is not None
    assert axes is not None
    count = rank(x)
    if count is None:
        return
    named, amounts = constant(axes), constant(pads)
    places = None if named is None else np.concatenate([named % count, named % count + count]).astype(np.int64)
    whole = np.zeros(2 * count, np.int64)
    if places is not None and amounts is not None:
        whole[places] = amounts
        new = b.const(whole)
    else:
        at = _places(b, b.var(axes), count) if places is None else b.const(places)
        new = b.ScatterElements(b.const(whole), at, b.var(pads), axis=0)
    pad.replace_input_with(1, new.value)
    pad.resize_inputs(3)


def _places(b: Builder, axes: Var, count: int) -> Var:
    """The indices of the pads for `axes`, which are of `count`; an axis below 0 counts from the end."""
    first = b.Mod(b.Cast(axes, to=int(ir.DataType.INT64)), count)
    return b.Concat(first, b.Add(first, count), axis=0)
