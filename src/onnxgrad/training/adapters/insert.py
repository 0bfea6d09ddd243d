"""Adapters written into a graph: s·(x·A)·B beside every node that reads the weight, added to what it gives.

Each added node carries the name of the weight as metadata, by which `merge` finds it again. What the node gave keeps
its name for the sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Names
from onnxgrad.training.adapters.config import LoRA
from onnxgrad.training.adapters.record import Entry, Record, base_fingerprint, record_in
from onnxgrad.training.adapters.sites import CONV, EMBEDDING, Site, Weight, weights
from onnxgrad.training.adapters.targets import chosen
from onnxgrad.training.graph.lift_weights import initializer
from onnxgrad.training.metadata import ADAPTER


@dataclass(frozen=True)
class Factors:
    """A and B of one weight, and the factor of their product."""

    a: np.ndarray
    b: np.ndarray
    scale: float


def adapted(model: ir.Model, lora: LoRA | None) -> Record | None:
    """The adapter of `model`: the one that it has, or the one that `lora` asks for, written into it in place.

    Raises:
        BadInput: it has one and shall have another, or what `adapt` refuses.
    """
    known = record_in(model)
    if lora is None:
        return known
    if known is not None:
        raise BadInput("the model has an adapter, which is trained on as it is\n  hint: merge it, or give no `adapter`")
    if not isinstance(lora, LoRA):
        raise BadInput(f"an adapter is a LoRA, not a {type(lora).__name__}")
    record = adapt(model.graph, lora)
    record.write(model)
    return record


def adapt(graph: ir.Graph, lora: LoRA) -> Record:
    """Write fresh adapters, as `lora` asks for them, into `graph`, in place.

    Raises:
        UnknownName, BadInput: targets that match nothing, or a rank that is larger than that of a weight.
    """
    found = chosen(lora.patterns, weights(graph), graph)
    for weight in found:
        if lora.rank > min(weight.ends):
            size = " × ".join(map(str, weight.ends))
            raise BadInput(
                f"rank {lora.rank} is larger than that of {weight.name!r}, which is {size}"
                + (" in each group" if weight.groups > 1 else "")
                + f"\n  hint: a lower rank, or targets without it ('!{weight.name}')"
            )
        if lora.dropout and any(s.node.graph is not graph for s in weight.sites):
            raise BadInput(
                f"{weight.name!r} is read in a branch or loop body, where an adapter has no dropout\n"
                f"  hint: dropout=0, or targets without it ('!{weight.name}')"
            )
    factors = {w.name: Factors(*_drawn(w, lora), lora.scale) for w in found}
    record = Record(lora.rank, lora.strength, lora.dropout, lora.rslora, base_fingerprint(graph))
    insert(graph, found, factors, record)
    return record


def insert(graph: ir.Graph, found: Sequence[Weight], factors: Mapping[str, Factors], record: Record) -> None:
    """Write adapters with the given `factors` beside `found`, and note them in `record`."""
    names = Names.of_graph(graph)
    for weight in found:
        own = factors[weight.name]
        held = []
        for letter, array in (("A", own.a), ("B", own.b)):
            tensor = ir.tensor(array.astype(weight.dtype.numpy()), name=names.exactly(f"{weight.module}.lora_{letter}"))
            held.append(initializer(tensor))
            graph.register_initializer(held[-1])
        a, b = held
        record.weights[weight.name] = Entry(
            a.name or "", b.name or "", weight.kind, weight.module, own.scale, weight.transposed, weight.groups,
            weight.quantized,
        )  # fmt: skip
        for site in weight.sites:
            _Branch(site, weight, names).write(a, b, own.scale, record.dropout)


def factor_shapes(weight: Weight, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and B."""
    shape = weight.shape
    if weight.kind == CONV:
        return (rank * weight.groups, *shape[1:]), (shape[0], rank, *(1 for _ in shape[2:]))
    rows, columns = weight.ends
    return (*shape[:-2], rows, rank), (*shape[:-2], rank, columns)


def _drawn(weight: Weight, lora: LoRA) -> tuple[np.ndarray, np.ndarray]:
    """Fresh factors, whose product is zero: the same for the same weight and seed, whatever else is adapted."""
    rng = np.random.default_rng([lora.seed, zlib.crc32(weight.name.encode())])
    a, b = factor_shapes(weight, lora.rank)
    if weight.kind == EMBEDDING:
        return np.zeros(a), rng.standard_normal(b)
    bound = weight.ends[0] ** -0.5
    return rng.uniform(-bound, bound, a), np.zeros(b)


class _Branch:
    """The nodes of one adapter beside one site."""

    def __init__(self, site: Site, weight: Weight, names: Names) -> None:
        self.site, self.weight, self.names = site, weight, names
        self.turned = site.transposed != weight.transposed
        self.nodes: list[ir.Node] = []

    def write(self, a: ir.Value, b: ir.Value, scale: float, dropout: float) -> None:
        """Put them behind the node of the site."""
        node, base = self.site.node, self.site.node.outputs[0]
        name, users, is_output = base.name or "", list(base.uses()), base.is_graph_output()
        x = self.site.data
        if dropout and self.weight.kind != EMBEDDING:
            x = self._like(self._emit("Dropout", x, self._number(dropout, np.dtype(np.float32))), x)
        strength = scale * (node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0)
        delta = self._like(self._delta(x, a, b, strength), base)
        base.name = self.names.exactly(f"{name}_base")
        total = self._like(self._emit("Add", base, delta), base)
        total.name = name
        for user, at in users:
            user.replace_input_with(at, total)
        if is_output:
            outputs = node.graph.outputs  # type: ignore[union-attr]
            outputs[:] = [total if v is base else v for v in outputs]
        node.graph.insert_after(node, self.nodes)  # type: ignore[union-attr]

    def _delta(self, x: ir.Value, a: ir.Value, b: ir.Value, scale: float) -> ir.Value:
        node = self.site.node
        if self.weight.kind == CONV:
            given = [v for n, v in node.attributes.items()]
            inner = self._scaled(self._emit("Conv", x, a, attributes=given), scale)
            groups = [ir.AttrInt64("group", self.weight.groups)] if self.weight.groups > 1 else []
            return self._emit("Conv", inner, b, attributes=groups)
        if self.turned:
            a, b = self._turned(b), self._turned(a)
        if node.op_type == "Gather":
            return self._emit("MatMul", self._scaled(self._emit("Gather", a, x), scale), b)
        if self.site.is_left:
            return self._emit("MatMul", self._turned(b), self._scaled(self._emit("MatMul", self._turned(a), x), scale))
        if "transA" in node.attributes and node.attributes["transA"].as_int():
            x = self._emit("Transpose", x, attributes=[ir.AttrInt64s("perm", [1, 0])])
        return self._emit("MatMul", self._scaled(self._emit("MatMul", x, a), scale), b)

    def _scaled(self, value: ir.Value, scale: float) -> ir.Value:
        if scale == 1:
            return value
        return self._like(self._emit("Mul", value, self._number(scale, self.weight.dtype.numpy())), value)

    def _turned(self, value: ir.Value) -> ir.Value:
        shape = [int(d) for d in value.shape or ()]  # type: ignore[arg-type]
        rank = len(shape)
        axes = [*range(rank - 2), rank - 1, rank - 2]
        out = self._emit("Transpose", value, attributes=[ir.AttrInt64s("perm", axes)])
        out.shape = ir.Shape([shape[i] for i in axes])
        return out

    def _number(self, number: float, dtype: np.dtype) -> ir.Value:
        value = self._emit("Constant", attributes=[ir.AttrTensor("value", ir.tensor(np.array(number, dtype)))])
        value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(dtype)), ir.Shape([])
        return value

    def _like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        if like.shape is not None:
            value.shape = ir.Shape(list(like.shape))
        return value

    def _emit(self, op_type: str, *inputs: ir.Value, attributes: Sequence[ir.Attr] = ()) -> ir.Value:
        hint = f"{self.weight.module}.lora_{op_type}"
        node = ir.Node("", op_type, inputs, attributes, name=self.names.fresh(hint))
        node.metadata_props[ADAPTER] = self.weight.name
        (value,) = node.outputs
        value.name = self.names.fresh(f"{hint}_out")
        value.type = ir.TensorType(self.weight.dtype)
        self.nodes.append(node)
        return value
