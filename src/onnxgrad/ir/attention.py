"""The scores of attention in the form that kernels compute: scale · Q·Kᵀ + mask, of floats.

Training looks for this form in a model, to leave it to a kernel (`training.graph.attention_blocks`). A session looks
for it in a derived graph, to call the kernel (`runtime.kernels.attention`). Both must see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.ir.match import is_op, is_single, not_none, producer, rank
from onnxgrad.ir.shapes import same_dim

#: The numbers of axes of operands that kernels support.
RANKS = (3, 4)


@dataclass(frozen=True)
class Scores:
    """Scores of attention.

    Attributes:
        q, kt: queries and transposed keys.
        scale: a factor of their product, or None.
        divides: True if the product is divided by it.
        mask: a summand, or None.
        made: the values that are computed on the way, the scores included.
    """

    q: ir.Value
    kt: ir.Value
    scale: ir.Value | None
    divides: bool
    mask: ir.Value | None
    made: Sequence[ir.Value]

    @classmethod
    def of(cls, value: ir.Value | None) -> Scores | None:
        """Match the scores `value`. Returns None if they are of another form."""
        value = _before_idle(value)
        add = producer(value, "Add")
        for end, mask in [(value, None)] if add is None else [add.inputs, add.inputs[::-1]]:
            scaled = _before_idle(end)
            scale, divides, product = None, False, scaled
            for kind in ("Mul", "Div"):
                node = producer(scaled, kind)
                for a, b in [] if node is None else [node.inputs, node.inputs[::-1]][: 2 if kind == "Mul" else 1]:
                    first = _before_idle(a)
                    if b is not None and producer(first, "MatMul") is not None and is_single(b):
                        scale, divides, product = b, kind == "Div", first
            matmul = producer(product, "MatMul")
            if matmul is not None and scaled is not None and product is not None:
                q, kt = map(not_none, matmul.inputs)
                made = list(dict.fromkeys([product, scaled, *([] if add is None else add.outputs)]))
                return cls(q, kt, scale, divides, mask, made)
        return None

    def fits(self, *operands: ir.Value) -> bool:
        """True if types and shapes are those that kernels support, in every run; `operands` besides `q` and `kt`."""
        every = [self.q, self.kt, *operands]
        floats = [*every, *(x for x in (self.scale, self.mask) if x is not None)]
        if any(x.dtype != ir.DataType.FLOAT or x.shape is None for x in floats):
            return False
        first = not_none(self.q.shape)
        if len(first) not in RANKS:
            return False
        for x in every:
            if rank(x) != len(first) or not all(same_dim(a, b) for a, b in zip(not_none(x.shape)[:-2], first[:-2])):
                return False
        if self.mask is None:
            return True
        mask, keys = not_none(self.mask.shape), not_none(self.kt.shape)
        whole = [*first[:-1], keys[-1]]
        return len(mask) <= len(whole) and all(
            m == 1 or same_dim(m, n) or (isinstance(n, int) and n > 1) for m, n in zip(mask[::-1], whole[::-1])
        )


def is_idle(node: ir.Node) -> bool:
    """True if a node is an Identity, or a Cast that does not change the type."""
    x = node.inputs[0] if node.inputs else None
    if is_op(node, "Identity"):
        return True
    return is_op(node, "Cast") and x is not None and x.dtype is not None and x.dtype == node.outputs[0].dtype


def _before_idle(value: ir.Value | None) -> ir.Value | None:
    """The value that idle nodes hand on as `value`."""
    while value is not None and (node := value.producer()) is not None and is_idle(node):
        value = node.inputs[0]
    return value
