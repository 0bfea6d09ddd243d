"""Sites of adapters: products, convolutions and embeddings that read a weight, also in branches and bodies.

A weight may be read by several nodes, also by way of a Transpose, an Identity or a DequantizeLinear. It can be adapted
if each of them is a site: then all of them are, with the same factors, and the adapted weight can be merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.exporter_names import module_names
from onnxgrad.ir.match import is_standard, not_none, permutation

LINEAR, CONV, EMBEDDING = "linear", "conv", "embedding"
#: Standard operators that read a weight which an adapter fits, and as which of their inputs.
OPERANDS = {"MatMul": (0, 1), "Gemm": (1,), "Conv": (1,), "Gather": (0,)}


@dataclass
class Site:
    """A node that reads a weight W.

    Attributes:
        node: a MatMul, Gemm, Conv, Gather or MatMulNBits.
        at: by which of its inputs.
        transposed: y = x·Wᵀ (or W·x), not x·W.
        data: the input by which x, or the indices of rows, enter.
    """

    node: ir.Node
    at: int
    transposed: bool

    @property
    def data(self) -> ir.Value:
        """The operand that the weight is combined with."""
        return not_none(self.node.inputs[1 if self.at == 0 else 0])

    @property
    def is_left(self) -> bool:
        """True if the weight is the left operand of a product."""
        return self.node.op_type == "MatMul" and self.at == 0


@dataclass
class Weight:
    """A weight that can be adapted.

    Attributes:
        value: the initializer.
        kind: ``linear``, ``conv`` or ``embedding``.
        sites: all nodes that read it.
        dtype: of what they read.
        quantized: it is an integer tensor, dequantized on the way, so that no adapter can be merged into it.
        packed: the shape of the matrix that the integers of a MatMulNBits stand for.
        is_tied: another weight belongs to the module that this one is named after.
    """

    value: ir.Value
    kind: str
    dtype: ir.DataType
    sites: list[Site] = field(default_factory=list)
    quantized: bool = False
    packed: tuple[int, int] | None = None
    is_tied: bool = False

    @property
    def name(self) -> str:
        """The name of the initializer."""
        return self.value.name or ""

    @property
    def transposed(self) -> bool:
        """True if A·B has the layout of Wᵀ, in which the first site reads the weight."""
        return self.sites[0].transposed

    @property
    def groups(self) -> int:
        """The number of groups of the convolutions."""
        return self.sites[0].node.attributes.get_int("group", 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, or of the kernel."""
        if self.packed is not None:
            return self.packed
        return tuple(int(d) for d in not_none(self.value.const_value).shape)  # type: ignore[arg-type]

    @property
    def ends(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of a site per row (of a convolution: per group and position)."""
        shape = self.shape
        if self.kind == CONV:
            size = 1
            for d in shape[1:]:
                size *= d
            return size, shape[0] // self.groups
        rows, columns = shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def module(self) -> str:
        """The module of the exported model that it belongs to, as ``model.layers.0.self_attn.q_proj``."""
        if self.name.endswith(".weight") and "::" not in self.name and not self.is_tied:
            return self.name.removesuffix(".weight")
        node = self.sites[0].node
        modules = module_names(node)
        if len(modules) > 1:
            return modules[-2]
        parts = (node.name or "").split("/")
        if len(parts) > 2 and not parts[0]:
            return ".".join(parts[1:-1])
        return self.name


def weights(graph: ir.Graph) -> dict[str, Weight]:
    """The initializers of `graph` that can be adapted, by name, in the order in which they are read."""
    found: dict[str, Weight] = {}
    refused: set[str] = set()
    for node in graph.all_nodes():
        for at in _operands(node):
            source = _source(node.inputs[at])
            if source is None or source[0].name in refused or graph.initializers.get(source[0].name or "") is None:
                continue
            value, turned, quantized = source
            weight = _weight(node, at, value, turned, quantized, found.get(value.name or ""))
            if weight is None:
                refused.add(value.name or "")
                found.pop(value.name or "", None)
            else:
                found[weight.name] = weight
    fit = {n: w for n, w in found.items() if set(_readers(w.value)) == {(s.node, s.at) for s in w.sites}}
    several = Counter(w.module for w in fit.values())
    for weight in fit.values():  # an exporter that turns a tied matrix once for all writes two, with one name
        weight.is_tied = several[weight.module] > 1
    return fit


def bias_of(site: Site, size: int) -> tuple[ir.Node, int] | None:
    """The node that adds the bias of a layer, and the operand that the bias is; None without a bias.

    It is the site itself, or an Add of a vector, which exporters write behind products.

    Args:
        site: reads the weight of the layer.
        size: the number of outputs of the layer.
    """
    node = site.node
    if node.op_type in ("Gemm", "Conv"):
        return (node, 2) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    (product, *_), uses = node.outputs, list(node.outputs[0].uses())
    if site.is_left or node.op_type == "Gather" or product.is_graph_output() or len(uses) != 1:
        return None
    (user, at), *_ = uses
    other = user.inputs[1 - at] if user.op_type == "Add" and is_standard(user) else None
    held = None if other is None or not other.is_initializer() else other.const_value
    return (user, 1 - at) if held is not None and tuple(held.shape) == (size,) else None


def _operands(node: ir.Node) -> tuple[int, ...]:
    if not is_standard(node):
        return (1,) if _is_packed(node) else ()
    return OPERANDS.get(node.op_type, ())


def _is_packed(node: ir.Node) -> bool:
    """True for a contributed product with a matrix in blocks of few bits."""
    return (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits") and {"K", "N"} <= node.attributes.keys()


def _source(value: ir.Value | None) -> tuple[ir.Value, bool, bool] | None:
    """The initializer behind `value`, with True if it is transposed, and True if it is dequantized."""
    turned = quantized = False
    while value is not None and (node := value.producer()) is not None:
        if _passes(node) is None:
            return None
        turned ^= node.op_type == "Transpose"
        quantized |= node.op_type == "DequantizeLinear"
        value = node.inputs[0]
    if value is None or not value.is_initializer() or value.is_graph_input() or value.const_value is None:
        return None
    return value, turned, quantized


def _passes(node: ir.Node) -> ir.Value | None:
    """The output of a node that only renames, transposes or dequantizes a weight; None for other nodes."""
    if not is_standard(node):
        return None
    if node.op_type in ("Identity", "DequantizeLinear"):
        return node.outputs[0]
    if node.op_type == "Transpose" and node.inputs[0] is not None and node.inputs[0].shape is not None:
        rank = len(node.inputs[0].shape)
        if permutation(node) == (*range(rank - 2), rank - 1, rank - 2):
            return node.outputs[0]
    return None


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node | None, int]]:
    """The readers of `value`, also through nodes that only pass it on; None as node for an output."""
    if value.is_graph_output():
        yield None, 0
    for node, at in value.uses():
        passed = _passes(node) if at == 0 else None
        if passed is None:
            yield node, at
        else:
            yield from _readers(passed)


def _weight(
    node: ir.Node, at: int, value: ir.Value, turned: bool, quantized: bool, known: Weight | None
) -> Weight | None:
    """`value` as a weight with `node` as a further site; None if it cannot be adapted there."""
    if _is_packed(node):
        packed = node.attributes["K"].as_int(), node.attributes["N"].as_int()
        x = node.inputs[0]
        if known is not None or turned or x is None or x.dtype not in FLOATS:
            return None
        return Weight(value, LINEAR, x.dtype, [Site(node, at, False)], True, packed)
    read, rank = node.inputs[at], len(value.const_value.shape)  # type: ignore[union-attr]
    dtype = read.dtype if read is not None and read.dtype is not None else value.dtype
    if dtype not in FLOATS or rank < 2 or node.outputs[0].dtype not in (None, dtype):
        return None
    kind, transposed = LINEAR, turned
    if node.op_type == "Conv":
        kind = CONV
        if turned:
            return None
    elif node.op_type == "Gather":
        kind = EMBEDDING
        if rank != 2 or turned or node.attributes.get_int("axis", 0) != 0:
            return None
    elif node.op_type == "Gemm":
        transposed ^= bool(node.attributes.get_int("transB", 0))
    elif at == 0:
        transposed = not transposed
    weight = Weight(value, kind, dtype, [Site(node, at, transposed)], quantized)
    if known is None:
        return weight
    if CONV in (kind, known.kind) and (kind != known.kind or weight.groups != known.groups):
        return None
    known.sites += weight.sites
    return known
