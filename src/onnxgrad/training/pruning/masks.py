"""Masks of single weights: the largest of all weights, or N of M in a row along what a layer sums over."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable

import numpy as np

from onnxgrad.training.pruning.channels import Channels
from onnxgrad.training.pruning.scores import Scores


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """True if one of the patterns names a weight."""
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)


def prunable_weights(channels: Channels, exclude: Collection[str]) -> dict[str, int]:
    """Matrices and filters that layers read, with the axis that they sum over; biases and scales are left."""
    found: dict[str, int] = {}
    for (value, axis), node in channels.joined.read.items():
        if value.is_initializer() and value.name and not excluded(value.name, exclude):
            found.setdefault(value.name, 0 if node.op_type == "ConvTranspose" else axis)
    for (value, _), node in channels.joined.made.items():  # grouped convolutions read no channels one by one
        wide = value.is_initializer() and value.shape is not None and len(value.shape) > 2
        if wide and value is node.inputs[1] and value.name and not excluded(value.name, exclude):
            found.setdefault(value.name, 1)
    return found


def smallest_go(scores: Scores, axes: dict[str, int], how: tuple[int, int] | float) -> dict[str, np.ndarray]:
    """Masks that keep the largest scores: of all weights together, or N of M."""
    if isinstance(how, tuple):
        return {name: _pattern(scores[name], axis, *how) for name, axis in axes.items()}
    everything = np.concatenate([scores[name].ravel() for name in axes])
    count = round(how * len(everything))
    mask = np.ones(len(everything), bool)
    mask[np.argpartition(everything, count - 1)[:count] if count else []] = False
    ends = np.cumsum([scores[name].size for name in axes])[:-1]
    return {n: part.reshape(scores[n].shape) for n, part in zip(axes, np.split(mask, ends))}


def _pattern(score: np.ndarray, axis: int, kept: int, block: int) -> np.ndarray:
    """Keep `kept` of every `block` elements in a row along `axis`; what is left at the end stays."""
    moved = np.moveaxis(score, axis, -1)
    whole = moved.shape[-1] // block * block
    mask = np.ones(moved.shape, bool)
    if whole:
        blocks = moved[..., :whole].reshape(-1, block)
        own = np.zeros(blocks.shape, bool)
        np.put_along_axis(own, np.argsort(-blocks, 1, kind="stable")[:, :kept], True, 1)
        mask[..., :whole] = own.reshape(*moved.shape[:-1], whole)
    return np.moveaxis(mask, -1, axis)
