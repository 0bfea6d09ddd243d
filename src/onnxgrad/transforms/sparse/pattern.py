"""Sparsity patterns of derivatives, from the dependences of elements composed along the nodes.

A pattern has the entries that can be nonzero for some input: it is valid at every point, and may have more entries than
necessary. It requires known sizes, and constants where an operator moves elements by indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxgrad.engine.activity import is_differentiable
from onnxgrad.engine.resolve import rule_of
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder
from onnxgrad.ir.constants import is_repeatable
from onnxgrad.ir.graph import ancestors, captured, subgraphs
from onnxgrad.ir.match import constant
from onnxgrad.ir.names import described
from onnxgrad.rules.rule import Zero
from onnxgrad.transforms.sparse.dependence import MOST_ENTRIES, Operand, Shape, SizedNode, Unknown
from onnxgrad.transforms.sparse.rules import dependence_of
from onnxgrad.wording import shape_text

if TYPE_CHECKING:
    from scipy.sparse import csr_array


def pattern_of(builder: Builder, nodes: Sequence[ir.Node], of: ir.Value, wrt: ir.Value) -> csr_array:
    """The boolean matrix of (elements of `of`, elements of `wrt`) whose derivative `nodes` may make nonzero.

    Raises:
        BadInput: a size on the way is not known, or the pattern has too many entries to be called sparse.
    """
    from scipy.sparse import csr_array, eye_array

    size = math.prod(shape_of(wrt))
    if size > MOST_ENTRIES:
        raise BadInput(
            f"{wrt.name!r} has {size} elements: more than {MOST_ENTRIES} unknowns are too many for a pattern"
        )
    walk = _Walk(builder, {wrt: csr_array(eye_array(size, dtype=bool, format="csr"))})
    for node in ancestors(list(nodes), [of], {wrt}):
        walk.propagate(node)
    pattern = walk.patterns.get(of)
    if pattern is None:
        return csr_array((math.prod(shape_of(of)), size), dtype=bool)
    pattern.sum_duplicates()
    pattern.sort_indices()
    return pattern


def shape_of(value: ir.Value) -> Shape:
    """The sizes of `value`, all of which must be known."""
    dims = value.shape
    if dims is None or not all(isinstance(d, int) for d in dims):
        hint = "a sparsity pattern takes sizes that are known: give `shapes` for the inputs, or use Function"
        raise BadInput(f"the shape of {value.name!r} is not known: {shape_text(dims)}\n  hint: {hint}")
    return tuple(d for d in dims if isinstance(d, int))


class _Walk:
    """Patterns and constants of the values met so far."""

    def __init__(self, builder: Builder, patterns: dict[ir.Value, csr_array]) -> None:
        self.b, self.patterns = builder, patterns
        self.constants: dict[ir.Value, np.ndarray | None] = {}

    def propagate(self, node: ir.Node) -> None:
        """Record the patterns of the results of `node`."""
        rule = rule_of(node, self.b)
        asked = {
            i
            for i, v in enumerate(node.inputs)
            if v in self.patterns and not isinstance(rule, Zero) and (rule is None or rule.carries(i))
        }
        inner = [v for v in captured(node) if v in self.patterns]
        if not asked and not inner:
            self._fold(node)
            return
        moved = [v for v in node.outputs if v.name and is_differentiable(v)]
        for value in moved:
            self._refuse(node, math.prod(shape_of(value)))
        try:
            write = None if inner else dependence_of(node, rule)
            if write is None:
                raise Unknown
            opset = self.b.infer.context.get_opset_version("")
            operands = [None if v is None else self._operand(v, i in asked) for i, v in enumerate(node.inputs)]
            matrices = write(SizedNode(node, opset, operands, [shape_of(v) for v in node.outputs if v.name]))
            for value, parts in zip(node.outputs, matrices):
                self._note(node, value, [self._composed(node.inputs[i], m) for i, m in parts.items() if i in asked])
        except Unknown:
            sources = [self.patterns[v] for v in {*inner, *(node.inputs[i] for i in asked)} if v is not None]
            for value in moved:
                self._note(node, value, [self._everything(node, p, math.prod(shape_of(value))) for p in sources])

    def _composed(self, value: ir.Value | None, made: csr_array | None) -> csr_array:
        pattern = self.patterns[value]  # type: ignore[index]
        return pattern if made is None else made @ pattern

    def _everything(self, node: ir.Node, p: csr_array, rows: int) -> csr_array:
        """A pattern in which each of `rows` elements depends on everything that any element of `p` depends on."""
        from scipy.sparse import csr_array

        columns = np.unique(p.indices)
        self._refuse(node, columns.size * rows)
        starts = np.arange(rows + 1, dtype=np.int64) * columns.size
        entries = np.ones(columns.size * rows, bool)
        return csr_array((entries, np.tile(columns, rows), starts), shape=(rows, p.shape[1]))

    def _note(self, node: ir.Node, value: ir.Value, parts: list[csr_array]) -> None:
        if not parts or not is_differentiable(value):
            return
        total = parts[0]
        for p in parts[1:]:
            total = total + p
        self._refuse(node, total.nnz)
        self.patterns[value] = total

    def _refuse(self, node: ir.Node, entries: int) -> None:
        if entries > MOST_ENTRIES:
            raise BadInput(
                f"the Jacobian is not sparse: {described(node)} has {entries} entries or more\n"
                "  hint: use jacobian, or jvp"
            )

    # --- constants ---------------------------------------------------------------------------------

    def _operand(self, value: ir.Value, asked: bool) -> Operand:
        return Operand(shape_of(value), None if asked else self._constant(value), asked)

    def _constant(self, value: ir.Value) -> np.ndarray | None:
        if value not in self.constants:
            self.constants[value] = constant(value)
        return self.constants[value]

    def _fold(self, node: ir.Node) -> None:
        """Record the constant results of `node`, which have no more elements than a pattern may have."""
        value, opset = node.outputs[0], self.b.infer.context.get_opset_version("")
        dims = None if node.inputs[:1] == () or node.inputs[0] is None else node.inputs[0].shape
        if node.op_type == "Shape" and dims is not None and all(isinstance(d, int) for d in dims):
            start, end = (node.attributes.get_int(k, None) for k in ("start", "end"))
            self.constants[value] = np.array(list(dims)[start:end], np.int64)
            return
        shape = value.shape
        if node.domain or len(node.outputs) != 1 or subgraphs(node) or shape is None or node.op_type == "Constant":
            return
        if not all(isinstance(d, int) for d in shape) or math.prod(shape_of(value)) > MOST_ENTRIES >> 4:
            return
        feeds = {v.name or "": self._constant(v) for v in node.inputs if v is not None}
        if any(a is None for a in feeds.values()) or not is_repeatable(node.op_type, "", opset):
            return
        try:
            results: Any = ReferenceEvaluator(ir.to_proto(node), opsets={"": opset}).run(None, feeds)
        except Exception:  # the evaluator does not know the operator: nothing is known
            return
        if isinstance(results[0], (np.ndarray, np.generic)):
            self.constants[value] = np.asarray(results[0])
