"""Combine adapters of one model: sums of factors, TIES, DARE, or all of them side by side.

The methods are those of PEFT's ``add_weighted_adapter``, with its names. An adapter with scale s and weight w counts by
factors √|w·s|·A, with the sign of w·s, and √|w·s|·B.

| method | A and B of the combination |
|---|---|
| ``linear`` | sums of the factors |
| ``ties`` (Yadav et al. 2023) | of each factor, the largest elements are kept; each element is the mean of those with the sign of their sum |
| ``dare_linear`` (Yu et al. 2024) | sums of factors whose elements are dropped at random, the others divided by the density |
| ``dare_ties`` | such factors, combined as by TIES |
| ``cat`` | the factors side by side, of a rank that is the sum of ranks: exactly the sum of all w·s·A·B |
"""  # noqa: E501

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.model_io import AnyModel
from onnxgrad.training.adapters.folder import StoredAdapter, read_adapter, write_adapter
from onnxgrad.training.adapters.forms import LORA
from onnxgrad.training.adapters.insert import initializer_name
from onnxgrad.training.adapters.parts import WeightPart
from onnxgrad.training.adapters.record import Entry
from onnxgrad.training.adapters.sites import CONV

METHODS = ("linear", "ties", "dare_linear", "dare_ties", "cat")


def combine_adapters(
    folders: Sequence[str | os.PathLike],
    output: str | os.PathLike,
    *,
    weights: Sequence[float] | None = None,
    method: str = "linear",
    density: float | None = None,
    seed: int = 0,
    model: AnyModel | None = None,
) -> None:
    """Write the combination of several LoRA adapters of one model as an adapter of it.

    A weight that some of the adapters leave alone is adapted by the others. All methods but ``cat`` keep the rank,
    which must be the same in all adapters.

    Args:
        folders: the adapters, as `load_adapter` reads them.
        output: the folder of the combination; files in it are replaced.
        weights: how much each adapter counts, also less than 0. Default: 1 each.
        method: ``linear``, ``ties``, ``dare_linear``, ``dare_ties`` or ``cat``; see PEFT's ``add_weighted_adapter``.
        density: the share of elements that TIES and DARE keep, in (0, 1].
        seed: decides the elements that DARE drops.
        model: the model that was adapted, for folders that PEFT wrote.

    Raises:
        BadInput: the adapters are of several models or other forms than LoRA, or a setting does not fit.
    """
    counts = _check_settings(folders, weights, method, density)
    adapters = [read_adapter(Path(folder), model) for folder in folders]
    for folder, adapter in zip(folders, adapters):
        if adapter.record.form != LORA or any(e.fixed for e in adapter.record.entries):
            raise BadInput(f"the adapter in {os.fspath(folder)!r} is no plain LoRA: only such adapters are combined")
        if adapter.record.base != adapters[0].record.base:
            raise BadInput(f"the adapters in {os.fspath(folders[0])!r} and {os.fspath(folder)!r} are of two models")
    whole = [a for a in adapters if a.record.also]
    if len(whole) > 1:
        raise BadInput(f"several adapters come with weights that train as a whole: {whole[0].record.also[0]!r}, …")
    record = replace(adapters[0].record, entries=[])
    if whole:
        record = replace(
            record, also=whole[0].record.also, renamed=whole[0].record.renamed, turned=whole[0].record.turned
        )
    values = {name: whole[0].values[name] for name in record.also}
    if method == "cat":
        record.rank = sum(a.record.rank for a in adapters)
        record.alpha, record.rslora = float(record.rank), False
    rng = np.random.default_rng(seed)
    for terms in _by_weight(adapters, counts):
        entry = terms[0].entry
        if method == "cat":
            scale, factors = 1.0, _side_by_side(terms, record.rank)
        else:
            scale, factors = entry.scale, _mixed(terms, method, 1.0 if density is None else density, rng)
        tensors = {letter: initializer_name(LORA, entry.module, entry.label, letter) for letter in "AB"}
        record.entries.append(replace(entry, tensors=tensors, scale=scale))
        values |= {tensors[letter]: array for letter, array in factors.items()}
    header = {k: v for k, v in adapters[0].header.items() if all(a.header.get(k) == v for a in adapters)}
    write_adapter(Path(output), record, values, header=header, path=adapters[0].path)


def _check_settings(
    folders: Sequence[str | os.PathLike], weights: Sequence[float] | None, method: str, density: float | None
) -> list[float]:
    """The weights of the adapters."""
    if isinstance(folders, (str, os.PathLike)) or not folders:
        raise BadInput("name the folders of the adapters to combine, as a list")
    if method not in METHODS:
        raise UnknownName(str(method), METHODS, "method to combine adapters")
    counts = [1.0] * len(folders) if weights is None else [float(w) for w in weights]
    if len(counts) != len(folders):
        raise BadInput(f"there are {len(folders)} adapters and {len(counts)} weights")
    if not all(math.isfinite(w) for w in counts):
        raise BadInput("the weights of adapters are finite numbers")
    if (density is None) != (method in ("linear", "cat")):
        raise BadInput(
            f"{method} needs a density: the share of elements that are kept" if density is None
            else f"{method} has no density: it keeps all elements"
        )  # fmt: skip
    if density is not None and not 0 < density <= 1:
        raise BadInput(f"the density is a share in (0, 1], not {density}")
    return counts


@dataclass
class _Term:
    """The adapter of one weight in one of the folders.

    Attributes:
        entry: as it is recorded.
        factors: A and B.
        count: w·s.
    """

    entry: Entry
    factors: dict[str, np.ndarray]
    count: float


def _by_weight(adapters: Sequence[StoredAdapter], counts: Sequence[float]) -> list[list[_Term]]:
    """The terms of each weight, or part of a weight."""
    found: dict[tuple[str, WeightPart | None], list[_Term]] = {}
    for adapter, count in zip(adapters, counts):
        for entry in adapter.record.entries:
            factors = {letter: adapter.values[name] for letter, name in entry.tensors.items()}
            found.setdefault((entry.weight, entry.part), []).append(_Term(entry, factors, count * entry.scale))
    return list(found.values())


def _mixed(terms: Sequence[_Term], method: str, density: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A and B of a combination that keeps the rank, for the scale of the first term."""
    first = terms[0]
    for term in terms:
        if any(term.factors[letter].shape != first.factors[letter].shape for letter in "AB"):
            raise BadInput(f"the adapters of {first.entry.weight!r} have several ranks\n  hint: method='cat'")
    counts = np.array([t.count / first.entry.scale for t in terms])
    found = {}
    for letter in "AB":
        arrays = np.stack([t.factors[letter].astype(np.float64) for t in terms])
        keep = _drop if method.startswith("dare") else _keep_largest
        arrays = np.stack([keep(a, density, rng) for a in arrays])
        roots = np.sqrt(np.abs(counts)) * (np.where(counts < 0, -1, 1) if letter == "A" else 1)
        weighted = arrays * roots.reshape(-1, *(1 for _ in arrays.shape[1:]))
        if method.endswith("ties"):
            agrees = np.sign(arrays) == np.where(arrays.sum(0) >= 0, 1, -1)
            total = (weighted * agrees).sum(0) / np.maximum(agrees.sum(0), 1)
        else:
            total = weighted.sum(0)
        found[letter] = total.astype(first.factors[letter].dtype)
    return found


def _keep_largest(array: np.ndarray, density: float, _: np.random.Generator) -> np.ndarray:
    """`array` with this share of its elements, the largest ones."""
    kept = int(density * array.size)
    if kept == array.size:
        return array
    mask = np.zeros(array.size)
    mask[np.argsort(-np.abs(array).reshape(-1), kind="stable")[:kept]] = 1
    return array * mask.reshape(array.shape)


def _drop(array: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    """`array` with elements dropped at random, the others divided by `density`."""
    return array if density == 1 else array * (rng.random(array.shape) < density) / density


def _side_by_side(terms: Sequence[_Term], rank: int) -> dict[str, np.ndarray]:
    """A and B of the exact sum, filled up with zeros to `rank`."""
    entry, found = terms[0].entry, {}
    for letter in "AB":
        arrays = [t.factors[letter] * (t.count if letter == "A" else 1) for t in terms]
        if entry.kind == CONV:
            axis = 1
            if letter == "A":  # the rank is that of each group
                arrays = [a.reshape(entry.groups, -1, *a.shape[1:]) for a in arrays]
        else:
            axis = arrays[0].ndim - (1 if letter == "A" else 2)
        joined = np.concatenate(arrays, axis)
        missing = [(0, rank - size if at == axis else 0) for at, size in enumerate(joined.shape)]
        joined = np.pad(joined, missing).astype(terms[0].factors[letter].dtype)
        found[letter] = joined.reshape(-1, *joined.shape[2:]) if entry.kind == CONV and letter == "A" else joined
    return found
