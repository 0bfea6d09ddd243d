"""Products of two matrices to calls of ``source/products.c``: xᵀ·g, the cotangents of weights, and layers.

They need no name: any float32 Gemm or MatMul of the right sizes is one. For xᵀ·g, ONNX Runtime's own kernel reads the
left operand in an order that the processor cannot prefetch; for x·W it is slower per row with many rows (`python -m
benchmarks.products`). A bias and a ReLU behind a layer are part of the call, and so is a running sum that a cotangent
is added to: a step of a Scan then has no matrix of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.ir.graph import prune, scopes
from onnxgrad.ir.literals import attributes_of
from onnxgrad.ir.match import exchanged, is_constant, is_op, not_none, producer
from onnxgrad.ir.passes import Pass
from onnxgrad.runtime.kernels.elementwise import PHASE
from onnxgrad.runtime.kernels.substitute import DOMAIN
from onnxgrad.runtime.setting import Setting

#: Of a cotangent of weights, and of the weights of a layer: the fewest numbers that are worth a copy, the columns of a
#: tile, and how many times the columns that there are tiles may have.
_COTANGENT, _WEIGHTS = (128, 16, 1.1), (4096, 32, 1.15)
#: Of a layer: the shortest and longest rows, the most weights, and the fewest rows where their number is known; the
#: shortest rows of a transposed operand, which ONNX Runtime would read in an order that the processor cannot prefetch.
_SHORTEST, _LONGEST, _MOST, _ROWS, _SHORTEST_TURNED = 96, 1024, 1 << 19, 64, 48


def _call_products(model: ir.Model, setting: Setting) -> int:
    """Replace products of `model` by calls. Returns the count."""
    places = 0
    for graph in scopes(model.graph):
        for node in list(graph):
            found = _call(node)
            if found is not None:
                old, last = found.result, found.result.producer()
                turns = {"left": int(found.left), "right": int(found.right), "relu": int(found.relu)}
                attributes = attributes_of(turns)
                call = ir.Node(DOMAIN, found.kernel, found.inputs, attributes, num_outputs=1, name=node.name)
                graph.insert_after(not_none(last), call)
                ir.convenience.replace_all_uses_with(old, call.outputs[0], replace_graph_outputs=True)
                (new,) = call.outputs
                new.type, new.shape, new.name = old.type, old.shape, old.name
                old.name = f"{old.name}.operators"
                places += 1
        prune(graph)
    model.opset_imports[DOMAIN] = 1
    return places


@dataclass(frozen=True)
class _Call:
    """A call under construction: its operands, the result, and which operands it transposes."""

    inputs: tuple[ir.Value | None, ...]
    result: ir.Value
    left: bool = False
    right: bool = False
    relu: bool = False
    kernel: str = "Product"


def _call(node: ir.Node) -> _Call | None:
    """The call for the product `node`, perhaps with the operators behind it."""
    if not is_op(node, ("Gemm", "MatMul")):
        return None
    x, w = node.inputs[:2]
    if x is None or w is None or x.dtype != ir.DataType.FLOAT or w.dtype != ir.DataType.FLOAT:
        return None
    left = right = False
    if node.op_type == "Gemm":
        if any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
            return None
        left, right = (bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB"))
    x, left = _skip_transpose(x, left)
    w, right = _skip_transpose(w, right)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if not left:
        return _layer(node.outputs[0], x, w, right, bias)
    size = _dims(node.outputs[0])
    if right or bias is not None or len(size) != 2 or not _is_worth_it(size[0], size[1], *_COTANGENT):
        return None
    y, total = node.outputs[0], _only_user(node.outputs[0], "RunningSumAdd", DOMAIN)
    if total is None:
        return _Call((x, w), y, left=True)
    return _Call((x, w, None, *total.inputs[:2]), total.outputs[0], left=True, kernel="RunningSumProduct")


def match_cotangent(node: ir.Node | None) -> tuple[ir.Value, ir.Value] | None:
    """The operands of a product xᵀ·g, as an operator or a call; None for another node."""
    if node is not None and node.domain == DOMAIN and node.op_type == "Product":
        left, right, relu = (node.attributes.get_int(name, 0) for name in ("left", "right", "relu"))
        inputs = node.inputs if left and not right and not relu and node.inputs[2:] in ((), (None,)) else ()
    else:
        call = None if node is None else _call(node)
        inputs = call.inputs if call is not None and call.left else ()
    x, g = inputs[:2] or (None, None)
    return None if x is None or g is None else (x, g)


def _layer(y: ir.Value, x: ir.Value, w: ir.Value, turned: bool, bias: ir.Value | None) -> _Call | None:
    """`y` = x·W, or x·Wᵀ if `turned`, with the operators behind it, unless ONNX Runtime is as fast."""
    size = _dims(w)
    if len(size) != 2 or x.shape is None or len(x.shape) < 2 or is_constant(w):
        return None  # constant weights are laid out once by the runtime
    k, n = size[::-1] if turned else size
    shortest = _SHORTEST_TURNED if exchanged(x) is not None and len(x.uses()) > 1 else _SHORTEST
    if k is None or n is None or not shortest <= k <= _LONGEST or not _is_worth_it(k, n, *_WEIGHTS) or k * n > _MOST:
        return None
    rows = [d for d in _dims(x)[:-1] if d is not None]
    if len(rows) == len(x.shape) - 1 and math.prod(rows) < _ROWS:
        return None
    if bias is not None and _dims(bias) != (n,):
        return None
    after = _only_user(y, "Add")
    if bias is None and after is not None:
        others = [v for v in after.inputs if v is not y and v is not None]
        if len(others) == 1 and _dims(others[0]) == (n,):
            bias, y = others[0], after.outputs[0]
    after = _only_user(y, "Relu")
    y = y if after is None else after.outputs[0]
    return _Call((x, w, bias), y, right=turned, relu=after is not None)


def _is_worth_it(rows: int | None, columns: int | None, fewest: int, tile: int, most: float) -> bool:
    """True for a matrix of `fewest` numbers or more whose columns tiles cover well."""
    if rows is None or columns is None or rows * columns < fewest:
        return False
    return -(-columns // tile) * tile <= most * columns


def _dims(value: ir.Value) -> tuple[int | None, ...]:
    """The sizes of `value`, None for those known only at run time; empty if nothing is known."""
    return tuple(d if isinstance(d, int) else None for d in value.shape or ())


def _only_user(value: ir.Value, op_type: str, domain: str = "") -> ir.Node | None:
    """The only reader of `value`, if it is this operator; else None."""
    users, maker = value.consumers(), value.producer()
    if len(value.uses()) != 1 or value.is_graph_output() or maker is None or users[0].graph is not maker.graph:
        return None
    return users[0] if (users[0].domain, users[0].op_type) == (domain, op_type) else None


def _skip_transpose(value: ir.Value, transposed: bool) -> tuple[ir.Value, bool]:
    """The operand of the Transpose that makes the matrix `value`, if one does; True if the product then transposes."""
    node = producer(value, "Transpose")
    if node is None or node.inputs[0] is None:
        return value, transposed
    if value.shape is None or len(value.shape) != 2 or node.attributes.get_ints("perm", (1, 0)) != (1, 0):
        return value, transposed
    return node.inputs[0], not transposed


PRODUCTS = Pass(
    "products",
    PHASE,
    "products of matrices, with the bias and the ReLU behind them",
    "Gemm and MatMul in float32 of weights that change, and cotangents of weights",
    lambda model, _: any(_call(node) for graph in model.graphs() for node in graph),
    _call_products,
    Setting.keeps_operators,
)
