"""The numbers of adapters: shapes, initial values, and adapted weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.training.adapters.config import LoRA, VeRA
from onnxgrad.training.adapters.parts import WeightPart, outputs
from onnxgrad.training.adapters.record import DORA, VERA, Entry
from onnxgrad.training.adapters.sites import CONV, EMBEDDING, Weight

#: An output of this length, or less, has no direction: its squares vanish in float32. It stays zero with DoRA.
NO_LENGTH = 1e-18


def shapes(weight: Weight, form: str, rank: int, part: WeightPart | None = None) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained tensors."""
    shape, ends = weight.shape, weight.ends
    size = outputs(weight)
    out = size if part is None else len(part.columns(size))
    if form == VERA:
        return {"d": (rank,), "b": (out,)}
    if weight.kind == CONV:
        found = {"A": (rank * weight.groups, *shape[1:]), "B": (out, rank, *(1 for _ in shape[2:]))}
    else:
        found = {"A": (*shape[:-2], ends[0], rank), "B": (*shape[:-2], rank, out)}
    return found | ({"m": (out,)} if form == DORA else {})


def drawn(weight: Weight, asked: LoRA | VeRA, part: WeightPart | None) -> dict[str, np.ndarray]:
    """Initial values, which leave the model's function unchanged; they depend only on the weight and the seed."""
    if isinstance(asked, VeRA):
        sizes = shapes(weight, VERA, asked.rank, part)
        return {"d": np.full(sizes["d"], asked.d_initial), "b": np.zeros(sizes["b"])}
    sizes = shapes(weight, DORA if asked.dora else "", asked.rank, part)
    place = [] if part is None else [part.start, part.stop]
    rng = np.random.default_rng([asked.seed, zlib.crc32(weight.name.encode()), *place])
    if weight.kind == EMBEDDING:
        found = {"A": np.zeros(sizes["A"]), "B": rng.standard_normal(sizes["B"])}
    else:
        bound = weight.ends[0] ** -0.5
        found = {"A": rng.uniform(-bound, bound, sizes["A"]), "B": np.zeros(sizes["B"])}
    return found | ({"m": lengths(weight.value, weight, part)} if asked.dora else {})


def lengths(held: ir.Value, about: Weight | Entry, part: WeightPart | None = None) -> np.ndarray:
    """‖W‖ for each output, or each of a part."""
    assert held.const_value is not None
    found = _lengths(held.const_value.numpy(), about.kind == CONV, about.transposed)
    return found if part is None else found[part.columns(len(found))]


def _lengths(array: np.ndarray, kernel: bool, transposed: bool) -> np.ndarray:
    axes = tuple(range(1, array.ndim)) if kernel else -1 if transposed else -2
    return np.sqrt(np.square(array.astype(np.float64)).sum(axes))


def projections(ends: Sequence[tuple[int, int]], rank: int, seed: int) -> dict[str, np.ndarray]:
    """A and B of VeRA for weights with these numbers of inputs and outputs, as PEFT draws them.

    Its generator is PyTorch's on the CPU: MT19937, 24 bits for each float32, uniformly within ±√(6/fan_in), by a fused
    multiply-add (which double precision does as well).
    """
    stream = np.random.RandomState(seed)

    def uniform(rows: int, columns: int) -> np.ndarray:
        bits = stream.randint(0, 1 << 32, rows * columns, np.uint32) & 0xFFFFFF
        bound = np.float64(np.float32(math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(columns))))
        return (bits * 2.0**-24 * (2 * bound) - bound).astype(np.float32).reshape(rows, columns)

    a = uniform(rank, max(i for i, _ in ends))
    b = uniform(max(o for _, o in ends), rank)
    return {"A": a.T, "B": b.T}


def adapted_weight(entry: Entry, old: np.ndarray, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The adapted weight in the layout of the weight `old`, in double precision.

    Args:
        entry: says how.
        old: the weight.
        tensors: what trains and what is shared, by their letters.

    Raises:
        ValueError, IndexError, ZeroDivisionError: they do not fit.
    """
    given = {letter: array.astype(np.float64) for letter, array in tensors.items()}
    kernel = entry.kind == CONV
    size = old.shape[0] if kernel else old.shape[-2 if entry.transposed else -1]
    a, b = given["A"], given["B"]
    if "d" in given:
        a, b = a[: old.size // size] * given["d"], b[:, :size] * given["b"]
    if entry.part is not None:
        b = entry.part.spread(b, 0 if kernel else -1, size)
    new = old + _product(entry, a, b)
    if "m" in given:
        norms, ratio = _lengths(new, kernel, entry.transposed), np.ones(size)
        norms[norms <= NO_LENGTH] = np.inf
        norms = norms.astype(tensors["m"].dtype).astype(np.float64)  # as m was at first: then the ratio is 1
        own = slice(None) if entry.part is None else entry.part.columns(size)
        ratio[own] = given["m"] / norms[own]
        axes = range(1, new.ndim) if kernel else (-1,) if entry.transposed else ()
        new *= np.expand_dims(ratio, tuple(axes))
    return new


def _product(entry: Entry, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """s·A·B in the layout of the weight."""
    if entry.kind == CONV:
        parts = a.reshape(entry.groups, -1, *a.shape[1:])  # by group: rank, channels, kernel
        outs = b.reshape(entry.groups, -1, b.shape[1])  # by group: channels, rank
        return entry.scale * np.einsum("gor,gr...->go...", outs, parts).reshape(len(b), *a.shape[1:])
    found = entry.scale * (a @ b)
    return np.swapaxes(found, -1, -2) if entry.transposed else found
