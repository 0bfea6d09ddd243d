"""The nodes of adapters: they add the adapter's term to the output of each node that reads an adapted weight.

| | gives, of y = x·W + c |
|---|---|
| LoRA | y + s·(x·A)·B |
| VeRA | y + ((x·A)∘d)·B∘b |
| LoHa, LoKr | y + x·D, with D = s·(the change of W) |
| (IA)³ | l∘y; of a feedforward weight (l∘x)·W + c |
| DoRA | z + (g − 1)∘(z − c), with z = y + s·(x·A)·B and g = m/‖W + s·A·B‖; without c: g∘z |

The norm is computed once per weight, and no gradient passes through it. For a part of a weight, A·B is zero and g is
one for the other outputs, which stay bit-identical. Each node has the name of the weight as metadata, by which `merge`
finds it: from the last one, the first inputs lead to y (or x). The last node's output takes the name of the adapted
node's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.engine.resolve import CONSTANT
from onnxgrad.ir import Names
from onnxgrad.ir.match import not_none
from onnxgrad.training.adapters.forms import weight_change
from onnxgrad.training.adapters.parts import WeightPart, outputs
from onnxgrad.training.adapters.sites import CONV, EMBEDDING, Site, Weight, bias_of
from onnxgrad.training.adapters.values import NO_LENGTH, lengths
from onnxgrad.training.metadata import ADAPTER


@dataclass
class Factors:
    """The tensors of a branch.

    Attributes:
        a, b: A and B; of a part, with zeros for the other outputs.
        scale: of their product.
        ratio: g of DoRA.
        between, after: d and b of VeRA.
    """

    a: ir.Value
    b: ir.Value
    scale: float
    ratio: ir.Value | None = None
    between: ir.Value | None = None
    after: ir.Value | None = None


@dataclass
class Change:
    """The change of a weight as a whole (LoHa, LoKr): a kernel, or a matrix as A·B.

    Attributes:
        value: D without its scale.
        scale: its factor.
    """

    value: ir.Value
    scale: float


@dataclass
class Scaling:
    """The factors of (IA)³.

    Attributes:
        value: the vector l.
        feedforward: it scales the inputs.
    """

    value: ir.Value
    feedforward: bool


class _Nodes:
    """Nodes of one weight's adapter, in order."""

    def __init__(self, weight: Weight, names: Names) -> None:
        self.weight, self.names = weight, names
        self.nodes: list[ir.Node] = []

    def emit(self, op_type: str, *inputs: ir.Value, attributes: Sequence[ir.Attr] = ()) -> ir.Value:
        """The output of a new node."""
        hint = f"{self.weight.module}.lora_{op_type}"
        node = ir.Node("", op_type, inputs, attributes, name=self.names.fresh(hint))
        node.metadata_props[ADAPTER] = self.weight.name
        (value,) = node.outputs
        value.name = self.names.fresh(f"{hint}_out")
        value.type = ir.TensorType(self.weight.dtype)
        self.nodes.append(node)
        return value

    def constant(self, array: np.ndarray) -> ir.Value:
        """A new constant."""
        value = self.emit("Constant", attributes=[ir.AttrTensor("value", ir.tensor(array))])
        value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
        return value

    def integers(self, *numbers: int) -> ir.Value:
        """A new constant of int64."""
        return self.constant(np.array(numbers, np.int64))

    def multiply(self, value: ir.Value, scale: float) -> ir.Value:
        """`value` times the number `scale`."""
        if scale == 1:
            return value
        return like(self.emit("Mul", value, self.constant(np.array(scale, self.weight.dtype.numpy()))), value)

    def transpose_last(self, value: ir.Value) -> ir.Value:
        """`value` with its last axes exchanged."""
        shape = _sizes(value)
        axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        out = self.emit("Transpose", value, attributes=[ir.AttrInt64s("perm", axes)])
        out.shape = ir.Shape([shape[i] for i in axes])
        return out

    def shaped(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """`value` in another shape; -1 is the rest."""
        out = self.emit("Reshape", value, self.integers(*shape))
        if -1 in shape:
            rest = math.prod(_sizes(value)) // -math.prod(shape)
            shape = [rest if d < 0 else d for d in shape]
        out.shape = ir.Shape(shape)
        return out


def _sizes(value: ir.Value) -> list[int]:
    return [int(d) for d in value.shape or ()]  # type: ignore[arg-type]


def like(value: ir.Value, other: ir.Value) -> ir.Value:
    """`value`, which has the shape of `other`."""
    if other.shape is not None:
        value.shape = ir.Shape(list(other.shape))
    return value


class Beforehand(_Nodes):
    """Nodes that depend only on an adapter's own tensors; they run once, at the beginning of the graph."""

    def matmul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The product of two matrices, or of stacks of them."""
        out, left, right = self.emit("MatMul", a, b), _sizes(a), _sizes(b)
        out.shape = ir.Shape([*np.broadcast_shapes(tuple(left[:-2]), tuple(right[:-2])), left[-2], right[-1]])
        return out

    def multiply_elements(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The elementwise product."""
        out = self.emit("Mul", a, b)
        out.shape = ir.Shape(np.broadcast_shapes(tuple(_sizes(a)), tuple(_sizes(b))))
        return out

    def change(self, tensors: Mapping[str, ir.Value], scale: float) -> Change:
        """The change of the weight by LoHa or LoKr."""
        weight, change = self.weight, weight_change(self, tensors)
        if weight.kind == CONV:
            return Change(self.shaped(change, weight.shape), scale)
        return Change(self.transpose_last(self.shaped(change, weight.ends[::-1])), scale)

    def spread(self, b: ir.Value, part: WeightPart, rest: float = 0.0) -> ir.Value:
        """B, or a vector, of a part with `rest` for the other outputs."""
        shape = _sizes(b)
        axis, size = 0 if self.weight.kind == CONV else len(shape) - 1, outputs(self.weight)
        cut = [*shape[:axis], size // part.every, part.stop - part.start, *shape[axis + 1 :]]
        groups = self.shaped(b, cut)
        sides = []
        for width in (part.start, part.every - part.stop):
            given = np.full([*cut[: axis + 1], width, *cut[axis + 2 :]], rest, self.weight.dtype.numpy())
            sides.append([self.constant(given)] if width else [])
        whole = self.emit("Concat", *sides[0], groups, *sides[1], attributes=[ir.AttrInt64("axis", axis + 1)])
        return self.shaped(whole, [*shape[:axis], size, *shape[axis + 1 :]])

    def take_part(self, vector: ir.Value, part: WeightPart) -> ir.Value:
        """The numbers of a part, of one for each output."""
        rows = self.shaped(vector, [outputs(self.weight) // part.every, part.every])
        cut = self.emit("Slice", rows, self.integers(part.start), self.integers(part.stop), self.integers(1))
        return self.shaped(cut, [outputs(self.weight) // part.every * (part.stop - part.start)])

    def concatenate(self, value: ir.Value, other: ir.Value, axis: int) -> ir.Value:
        """Two matrices, one behind the other."""
        shape = _sizes(value)
        shape[axis] += int(other.shape[axis])  # type: ignore[index,arg-type]
        out = self.emit("Concat", value, other, attributes=[ir.AttrInt64("axis", axis)])
        out.shape = ir.Shape(shape)
        return out

    def first(self, value: ir.Value, count: int, axis: int) -> ir.Value:
        """The first rows, or columns, of a matrix that is shared."""
        shape = _sizes(value)
        if shape[axis] == count:
            return value
        out = self.emit("Slice", value, self.integers(0), self.integers(count), self.integers(axis))
        shape[axis] = count
        out.shape = ir.Shape(shape)
        return out

    def ratio(self, factors: Factors, m: ir.Value, part: WeightPart | None) -> ir.Value:
        """g = m/‖W + s·A·B‖; 1 for outputs outside the part."""
        a, b = factors.a, factors.b
        weight = self.weight
        if weight.kind == CONV:
            groups, rank = weight.groups, int(b.shape[1])  # type: ignore[index,arg-type]
            outs = self.shaped(b, [groups, weight.shape[0] // groups, rank])
            product = self.shaped(self.emit("MatMul", outs, self.shaped(a, [groups, rank, -1])), weight.shape)
            axes = list(range(1, len(weight.shape)))
        elif weight.transposed:
            product, axes = self.emit("MatMul", self.transpose_last(b), self.transpose_last(a)), [1]
        else:
            product, axes = self.emit("MatMul", a, b), [0]
        moved = self.emit("Add", self.multiply(product, factors.scale), weight.value)
        norm = self.emit("ReduceL2", moved, self.integers(*axes), attributes=[ir.AttrInt64("keepdims", 0)])
        norm.producer().metadata_props[CONSTANT] = "section 4.3 of DoRA: the norm is a constant"  # type: ignore[union-attr]
        if (lengths(weight.value, weight) <= NO_LENGTH).any():
            least, most = (self.constant(np.array(n, weight.dtype.numpy())) for n in (NO_LENGTH, np.inf))
            longer = self.emit("Greater", norm, least)
            longer.type = ir.TensorType(ir.DataType.BOOL)
            norm = self.emit("Where", longer, norm, most)
        if part is None:
            return like(self.emit("Div", m, like(norm, m)), m)
        norm.shape = ir.Shape([outputs(weight)])
        return self.spread(like(self.emit("Div", m, self.take_part(norm, part)), m), part, 1.0)

    def write(self, graph: ir.Graph) -> None:
        """Put them at the beginning of `graph`."""
        if self.nodes:
            graph.insert_before(graph[0], self.nodes)


class Branch(_Nodes):
    """The nodes of one adapter at one site."""

    def __init__(self, site: Site, weight: Weight, names: Names) -> None:
        super().__init__(weight, names)
        self.site = site
        self.is_turned = site.transposed != weight.transposed

    def write(self, factors: Factors | Change | Scaling, dropout: float) -> None:
        """Put them behind the node of the site, or before it."""
        node, x = self.site.node, self.site.data
        if isinstance(factors, Scaling):
            self._scale(factors)
            return
        base = node.outputs[0]
        if dropout and self.weight.kind != EMBEDDING:
            x = like(self.emit("Dropout", x, self.constant(np.array(dropout, np.float32))), x)
        delta = like(self._delta(x, factors), base)
        self._replace(base, lambda: self._sum(base, delta, factors.ratio if isinstance(factors, Factors) else None))

    def _scale(self, scaling: Scaling) -> None:
        """Multiply the inputs or the outputs of the layer, which are those behind its bias."""
        node, x = self.site.node, self.site.data
        if scaling.feedforward:
            size = _sizes(scaling.value)[0]
            trailing = (
                len(self.weight.shape) - 2
                if self.weight.kind == CONV
                else int(self.site.is_left or self._reads_columns())
            )
            factor = self.shaped(scaling.value, [size, *(1 for _ in range(trailing))]) if trailing else scaling.value
            scaled = like(self.emit("Mul", x, factor), x)
            node.replace_input_with(1 if self.site.at == 0 else 0, scaled)
            node.graph.insert_before(node, self.nodes)  # type: ignore[union-attr]
            return
        bias = bias_of(self.site, outputs(self.weight))
        base = (node if bias is None else bias[0]).outputs[0]
        factor = self._broadcast_outputs(scaling.value)
        self._replace(base, lambda: like(self.emit("Mul", base, factor), base))

    def _replace(self, base: ir.Value, build: Callable[[], ir.Value]) -> None:
        """Put what `build` makes of `base` in its place, under its name."""
        name, users, is_output = base.name or "", list(base.uses()), base.is_graph_output()
        base.name = self.names.exactly(f"{name}_base")
        total = build()
        total.name = name
        node = not_none(base.producer())
        assert node.graph is not None
        for user, at in users:
            user.replace_input_with(at, total)
        if is_output:
            outs = node.graph.outputs
            outs[:] = [total if v is base else v for v in outs]
        node.graph.insert_after(node, self.nodes)

    def _sum(self, base: ir.Value, delta: ir.Value, ratio: ir.Value | None) -> ir.Value:
        total = like(self.emit("Add", base, delta), base)
        if ratio is None:
            return total
        bias, g = self._bias(), self._broadcast_outputs(ratio)
        if bias is None:
            return like(self.emit("Mul", total, g), base)
        one = self.constant(np.array(1, self.weight.dtype.numpy()))
        moved = like(self.emit("Mul", like(self.emit("Sub", total, bias), base), self.emit("Sub", g, one)), base)
        return like(self.emit("Add", total, moved), base)

    def _bias(self) -> ir.Value | None:
        """The bias that the node adds to the product; None without one."""
        node = self.site.node
        if node.op_type not in ("Conv", "Gemm") or len(node.inputs) < 3 or node.inputs[2] is None:
            return None
        if node.op_type == "Conv":
            return self._broadcast_outputs(node.inputs[2])
        return self.multiply(node.inputs[2], node.attributes.get_float("beta", 1.0))

    def _broadcast_outputs(self, vector: ir.Value) -> ir.Value:
        """A vector with an element per output, shaped to broadcast with the node's output."""
        trailing = len(self.weight.shape) - 2 if self.weight.kind == CONV else int(self.site.is_left)
        return self.shaped(vector, [outputs(self.weight), *(1 for _ in range(trailing))]) if trailing else vector

    def _delta(self, x: ir.Value, factors: Factors | Change) -> ir.Value:
        node = self.site.node
        scale = factors.scale * node.attributes.get_float("alpha", 1.0)
        given = list(node.attributes.values())
        if isinstance(factors, Change):
            change = self.multiply(factors.value, scale)
            if self.weight.kind == CONV:
                return self.emit("Conv", x, change, attributes=given)
            change = self.transpose_last(change) if self.is_turned else change
            if self.site.is_left:
                return self.emit("MatMul", self.transpose_last(change), x)
            return self.emit("MatMul", self._rows(x), change)
        a, b = factors.a, factors.b
        if self.weight.kind == CONV:
            inner = self.multiply(self.emit("Conv", x, a, attributes=given), scale)
            groups = [ir.AttrInt64("group", self.weight.groups)] if self.weight.groups > 1 else []
            return self.emit("Conv", inner, b, attributes=groups)
        if self.is_turned:
            a, b = self.transpose_last(b), self.transpose_last(a)
        if node.op_type == "Gather":
            return self.emit("MatMul", self.multiply(self.emit("Gather", a, x), scale), b)
        if self.site.is_left:
            return self.emit(
                "MatMul", self.transpose_last(b), self.multiply(self.emit("MatMul", self.transpose_last(a), x), scale)
            )
        inner = self.multiply(self.emit("MatMul", self._rows(x), a), scale)
        if factors.between is None or factors.after is None:
            return self.emit("MatMul", inner, b)
        return self.emit("Mul", self.emit("MatMul", self.emit("Mul", inner, factors.between), b), factors.after)

    def _reads_columns(self) -> bool:
        """True if the node reads x transposed."""
        return bool(self.site.node.attributes.get_int("transA", 0))

    def _rows(self, x: ir.Value) -> ir.Value:
        """`x` with its rows in order."""
        return self.emit("Transpose", x, attributes=[ir.AttrInt64s("perm", [1, 0])]) if self._reads_columns() else x
