"""Forms of adapters without factors A and B: LoHa, LoKr and (IA)³, with the tensors of PEFT, by its names and layouts.

| | trains | W (outputs × inputs) becomes |
|---|---|---|
| LoHa | two pairs of factors | W + s·(W₁ₐ·W₁ᵦ)∘(W₂ₐ·W₂ᵦ) |
| LoKr | two matrices, each as a product if that is smaller | W + s·W₁⊗W₂ |
| (IA)³ | a vector l | diag(l)·W, with the bias; of a feedforward weight W·diag(l) |

`weight_change` is written once, for arrays and for values of a graph. The kernel of a convolution is a matrix whose
rows are the outputs; PEFT may have its last axes apart (``hada_t1``, ``lokr_t2``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from onnxgrad.training.adapters.sites import CONV, Weight

LORA, DORA, VERA = "lora", "dora", "vera"
LOHA, LOKR, IA_3 = "loha", "lokr", "ia3"
#: Some outputs of weights, which train as they are: A is their change, and B, a constant, puts it in their places.
CHANNELS = "channels"
_PAIRS = frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"})
_SIDES = (
    (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b")),
    (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"), ("lokr_t2", "lokr_w2_a", "lokr_w2_b")),
)
#: The sets of tensors that a weight may have, by form.
TENSORS: Mapping[str, Collection[frozenset[str]]] = {
    LOHA: (_PAIRS, _PAIRS | {"hada_t1", "hada_t2"}),
    LOKR: [frozenset((*one, *other)) for one, other in itertools.product(*_SIDES)],
    IA_3: (frozenset({"ia3_l"}),),
}
#: The names of all these tensors.
NAMES = frozenset(name for sets in TENSORS.values() for names in sets for name in names)
#: For each form of adapter, the tensor to multiply where the whole change is scaled; adapters.mjs has the same.
SCALED = frozenset({"B", "hada_w1_a", "lokr_w1", "lokr_w1_a"})
#: Tensors that start as zeros, so that the weight starts unchanged.
_ZERO = {"hada_w2_b", "lokr_w1", "lokr_w1_a"}

T = TypeVar("T")


class Operations(Protocol[T]):
    """The operations of `weight_change`."""

    def matmul(self, a: T, b: T) -> T:
        """The product of two matrices, or of stacks of them."""

    def multiply_elements(self, a: T, b: T) -> T:
        """The elementwise product."""

    def shaped(self, value: T, shape: Sequence[int]) -> T:
        """`value` reshaped; one size may be -1, which follows from the others."""

    def transpose_last(self, value: T) -> T:
        """`value` with its last axes exchanged."""


class Arrays:
    """The operations of arrays."""

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The product of two matrices, or of stacks of them."""
        return a @ b

    def multiply_elements(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The elementwise product."""
        return a * b

    def shaped(self, value: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """`value` in another shape."""
        return value.reshape(shape)

    def transpose_last(self, value: np.ndarray) -> np.ndarray:
        """`value` with its last axes exchanged."""
        return np.swapaxes(value, -1, -2)


def weight_change(op: Operations[T], tensors: Mapping[str, T]) -> T:
    """The change of a weight of LoHa or LoKr, with the outputs first, without its scale."""
    if "hada_w1_a" in tensors:
        return op.multiply_elements(*(_product(op, tensors, f"hada_w{i}", f"hada_t{i}") for i in (1, 2)))
    first = tensors["lokr_w1"] if "lokr_w1" in tensors else _product(op, tensors, "lokr_w1")
    second = tensors["lokr_w2"] if "lokr_w2" in tensors else _product(op, tensors, "lokr_w2", "lokr_t2")
    left, right = _sizes(first), _sizes(second)
    ones = [1] * (len(right) - len(left))
    left = [*ones, *left] if len(right) == 3 else [*left, *ones]  # a Conv1d as torch.kron fills up axes, in PEFT
    spread = op.multiply_elements(op.shaped(first, _alternate(left, 0)), op.shaped(second, _alternate(right, 1)))
    return op.shaped(spread, [a * b for a, b in zip(left, right)])


def _product(op: Operations[T], tensors: Mapping[str, T], name: str, core: str = "") -> T:
    """The product of two factors; with a `core`, as PEFT has it for kernels (proposition 3 of FedPara)."""
    a, b = tensors[f"{name}_a"], tensors[f"{name}_b"]
    if core not in tensors:
        return op.matmul(a, b)
    rank, _, *kernel = _sizes(tensors[core])
    rows = op.matmul(op.transpose_last(a), op.shaped(tensors[core], [rank, -1]))
    outs, ins = _sizes(a)[1], _sizes(b)[1]
    whole = op.matmul(op.transpose_last(b), op.shaped(rows, [outs, rank, math.prod(kernel)]))
    return op.shaped(whole, [outs, ins, *kernel])


def _sizes(value: Any) -> list[int]:
    return [int(d) for d in value.shape]


def _alternate(sizes: Sequence[int], place: int) -> list[int]:
    """`sizes`, each with a 1 behind it (`place` 0) or before it (1)."""
    return [d for size in sizes for d in ((1, size) if place else (size, 1))]


# --- the tensors of a weight ------------------------------------------------------------------------


def tensor_shapes(
    form: str, weight: Weight, rank: int = 1, *, feedforward: bool = False, both: bool = False, factor: int = -1
) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained tensors, which are those of PEFT.

    Args:
        form: of the adapter.
        weight: what is adapted.
        rank: of factors.
        feedforward: (IA)³ scales the inputs.
        both: LoKr also has W₁ as a product.
        factor: rows and columns of W₁; -1: near the square root.
    """
    kernel = weight.shape[2:] if weight.kind == CONV else ()
    outs = weight.shape[0] if weight.kind == CONV else weight.ends[1]
    ins = weight.shape[1] if weight.kind == CONV else weight.ends[0]
    if form == IA_3:
        if weight.kind == CONV:
            return {"ia3_l": (1, ins * weight.groups if feedforward else outs, *(1 for _ in kernel))}
        return {"ia3_l": (1, ins) if feedforward else (outs, 1)}
    flat = ins * math.prod(kernel)
    if form == LOHA:
        return {f"hada_w{i}_{side}": (outs, rank) if side == "a" else (rank, flat) for i in (1, 2) for side in "ab"}
    (a, b), (c, d) = _divisors(outs, factor), _divisors(ins, factor)
    found: dict[str, tuple[int, ...]] = {}
    if both and rank < max(a, c) / 2:
        found |= {"lokr_w1_a": (a, rank), "lokr_w1_b": (rank, c)}
    else:
        found["lokr_w1"] = (a, c)
    if rank < max(b, d) / 2:
        return found | {"lokr_w2_a": (b, rank), "lokr_w2_b": (rank, d * math.prod(kernel))}
    return found | {"lokr_w2": (b, d, *kernel)}


def _divisors(size: int, factor: int) -> tuple[int, int]:
    """Two numbers with the product `size`, as in PEFT: the first is `factor`, or the largest up to it and √size."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = min(math.isqrt(size), size if factor < 1 else factor)
    first = max(n for n in range(1, most + 1) if size % n == 0)
    return first, size // first


def initial_tensors(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """First values of tensors of these `shapes`, by which the weight is unchanged."""
    found = {}
    for name, shape in shapes.items():
        bound = math.prod(shape[1:]) ** -0.5
        if name == "ia3_l":
            found[name] = np.ones(shape)
        else:
            found[name] = np.zeros(shape) if name in _ZERO else rng.uniform(-bound, bound, shape)
    return found


def fits(form: str, weight: Weight, tensors: Mapping[str, np.ndarray], feedforward: bool) -> bool:
    """True if `tensors` are an adapter of `weight`."""
    if form == IA_3:
        return {n: a.shape for n, a in tensors.items()} == tensor_shapes(form, weight, feedforward=feedforward)
    try:
        change = weight_change(Arrays(), tensors)
    except (ValueError, IndexError, TypeError):
        return False
    return change.size == math.prod(weight.shape)


def adapt_array(
    old: np.ndarray,
    tensors: Mapping[str, np.ndarray],
    scale: float,
    *,
    kernel: bool,
    transposed: bool,
    feedforward: bool,
) -> np.ndarray:  # fmt: skip
    """The adapted weight in the layout of `old`.

    Args:
        old: the weight.
        tensors: in double precision.
        scale: s.
        kernel: `old` is of a convolution.
        transposed: `old` has the outputs first.
        feedforward: (IA)³ scales the inputs.

    Raises:
        ValueError, IndexError: they do not fit.
    """
    outs_first = kernel or transposed
    if "ia3_l" not in tensors:
        change = scale * weight_change(Arrays(), tensors)
        if outs_first:
            return old + change.reshape(old.shape)
        return old + change.reshape(old.shape[::-1]).T
    vector = tensors["ia3_l"].reshape(-1)
    rest = [1] * (old.ndim - 2)
    if not feedforward:
        return old * (vector.reshape(-1, 1, *rest) if outs_first else vector)
    if not kernel:
        return old * (vector if transposed else vector[:, None])
    groups = len(vector) // old.shape[1]
    return old * np.repeat(vector.reshape(groups, -1, *rest), len(old) // groups, axis=0)
