"""The numbers of adapters: shapes, initial values, and adapted weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import not_none
from onnxgrad.training.adapters import forms
from onnxgrad.training.adapters.config import OLORA, Adapter, ChosenOutputs, LoRA, VeRA
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


def drawn(weight: Weight, asked: Adapter, part: WeightPart | None, feedforward: bool = False) -> dict[str, np.ndarray]:
    """Initial values, which leave the model's function unchanged; they depend only on the weight and the seed."""
    if isinstance(asked, VeRA):
        sizes = shapes(weight, VERA, asked.rank, part)
        return {"d": np.full(sizes["d"], asked.d_initial), "b": np.zeros(sizes["b"])}
    place = [] if part is None else [part.start, part.stop]
    rng = np.random.default_rng([asked.seed, zlib.crc32(weight.name.encode()), *place])
    if isinstance(asked, ChosenOutputs):
        chosen = np.asarray(asked.outputs[weight.name], np.int64)
        sizes = shapes(weight, asked.form, len(chosen), part)
        at = np.zeros(sizes["B"])
        at[(chosen, np.arange(len(chosen)))[:: 1 if weight.kind == CONV else -1]] = 1
        return {"A": np.zeros(sizes["A"]), "B0": at}
    if not isinstance(asked, LoRA):
        both, factor = bool(asked.options.get("decompose_both")), asked.options.get("decompose_factor", -1)
        sizes = forms.tensor_shapes(asked.form, weight, asked.rank, feedforward=feedforward, both=both, factor=factor)
        return forms.initial_tensors(sizes, rng)
    sizes = shapes(weight, asked.form, asked.rank, part)
    if asked.init is not None:
        found = initial_factors(weight, part, asked.init, asked.rank, asked.scale)
    elif weight.kind == EMBEDDING:
        found = {"A": np.zeros(sizes["A"]), "B": rng.standard_normal(sizes["B"])}
    else:
        bound = weight.ends[0] ** -0.5
        found = {"A": rng.uniform(-bound, bound, sizes["A"]), "B": np.zeros(sizes["B"])}
    return found | ({"m": lengths(weight.value, weight, part)} if asked.dora else {})


def initial_factors(
    weight: Weight, part: WeightPart | None, initial: str, rank: int, scale: float
) -> dict[str, np.ndarray]:
    """The first A and B of an initial form, and the constants that take their product off again."""
    w = not_none(weight.value.const_value).numpy()
    w = w.T if weight.transposed else w
    found = fixed_factors(w if part is None else w[:, part.columns(w.shape[1])], initial, rank, scale)
    return found | {"A0": found["A"], "B0": -found["B"]}


def lengths(held: ir.Value, about: Weight | Entry, part: WeightPart | None = None) -> np.ndarray:
    """‖W‖ for each output, or each of a part."""
    found = _lengths(not_none(held.const_value).numpy(), about.kind == CONV, about.transposed)
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


def fixed_factors(weight: np.ndarray, initial: str, rank: int, scale: float) -> dict[str, np.ndarray]:
    """A₀ and B₀ of an initial form, of a matrix [inputs, outputs]: s·A₀·B₀ is the part of W that PEFT moves into A·B.

    Args:
        weight: W.
        initial: ``pissa`` or ``olora``.
        rank: columns of A₀.
        scale: s of PiSSA, which divides the singular values by it. OLoRA does not.
    """
    w = weight.astype(np.float64)
    if initial == OLORA:
        q, r = np.linalg.qr(w.T)
        return {"A": r[:rank].T, "B": q[:, :rank].T}
    tall = w.shape[0] > w.shape[1]
    side = w.T if tall else w  # singular vectors by the smaller Gram matrix
    squares, vectors = np.linalg.eigh(side @ side.T)
    lead = vectors[:, ::-1][:, :rank]
    roots = np.sqrt(np.maximum(squares[::-1][:rank], 0)) ** 0.5
    other = np.divide((lead.T @ side).T, roots, out=np.zeros((side.shape[1], rank)), where=roots > 0)
    first, second = (other, lead * roots) if tall else (lead * roots, other)
    return {"A": first / math.sqrt(scale), "B": second.T / math.sqrt(scale)}


def adapted_weight(
    entry: Entry, old: np.ndarray, tensors: Mapping[str, np.ndarray], in_place: bool = False
) -> np.ndarray:
    """The adapted weight in the layout and type of the weight `old`, computed in double precision.

    A matrix is computed in blocks of outputs, so that little more memory is needed than for the result.

    Args:
        entry: says how.
        old: the weight.
        tensors: what trains, what is shared and what is fixed, by their letters.
        in_place: `old` may be overwritten, so that a large matrix is there once.

    Raises:
        ValueError, IndexError, ZeroDivisionError: they do not fit.
    """
    given = {letter: array.astype(np.float64) for letter, array in tensors.items()}
    kernel = entry.kind == CONV
    if given.keys() <= forms.NAMES:
        new = forms.adapt_array(
            old, given, entry.scale, kernel=kernel, transposed=entry.transposed, feedforward=entry.feedforward
        )
        return new.astype(old.dtype)
    size = old.shape[0] if kernel else old.shape[-2 if entry.transposed else -1]
    a, b = given["A"], given["B" if "B" in given else "B0"]
    if "A0" in given:
        a, b = np.concatenate([a, given["A0"]], -1), np.concatenate([b, given["B0"]], -2)
    if "d" in given:
        a, b = a[: old.size // size] * given["d"], b[:, :size] * given["b"]
    if entry.part is not None:
        b = entry.part.spread(b, 0 if kernel else -1, size)
    m, own = given.get("m"), slice(None) if entry.part is None else entry.part.columns(size)
    new = old if in_place else np.empty(old.shape, old.dtype)
    width = size if kernel else max(1, _BLOCK * size // old.size)
    for start in range(0, size, width):
        block = slice(start, start + width)
        at = (block,) if kernel else (..., block, slice(None)) if entry.transposed else (..., block)
        moved = old[at] + _product(entry, a, b if kernel else b[..., block])
        if m is not None:
            norms = _lengths(moved, kernel, entry.transposed)
            norms[norms <= NO_LENGTH] = np.inf
            norms = norms.astype(tensors["m"].dtype).astype(np.float64)  # as m was at first: then the ratio is 1
            whole = np.zeros(size)
            whole[own] = m
            is_own = np.zeros(size, bool)
            is_own[own] = True
            ratio = np.where(is_own[block], whole[block] / norms, 1.0)
            axes = range(1, moved.ndim) if kernel else (-1,) if entry.transposed else ()
            moved *= np.expand_dims(ratio, tuple(axes))
        new[at] = moved
    return new


#: Elements of a block of an adapted weight.
_BLOCK = 1 << 20


def _product(entry: Entry, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """s·A·B in the layout of the weight."""
    if entry.kind == CONV:
        parts = a.reshape(entry.groups, -1, *a.shape[1:])  # by group: rank, channels, kernel
        outs = b.reshape(entry.groups, -1, b.shape[1])  # by group: channels, rank
        return entry.scale * np.einsum("gor,gr...->go...", outs, parts).reshape(len(b), *a.shape[1:])
    found = entry.scale * (a @ b)
    return np.swapaxes(found, -1, -2) if entry.transposed else found
