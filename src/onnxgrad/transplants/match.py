"""Match the weights of a file with those of another export, by their content before training.

A weight of the target may be one of the source as it is, transposed or reshaped (`WholeForm`), or consist of lines of
several, as fused queries, keys and values do, or of some lines of one (`LineForm`). What rounding to a narrower type
changes is within a tolerance. Weights of equal content are told apart by `names`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

#: Elements that are compared first, and of a line.
_SAMPLE, _LINE_SAMPLE = 512, 64
#: Elements whose distances are computed at a time.
_PART = 1 << 22
#: Rows of a product of distances at a time.
_CHUNK = 1024


@dataclass(eq=False)
class Origin:
    """A weight of the source, before and after training, whose elements are read when they are needed.

    Attributes:
        name: in the source.
        shape: of its elements.
        read_before, read_after: read the elements; None for the latter: training has not changed them.
        labels: names that hint at the module.
        uses: the nodes that read it, and as which input.
        parts: the tensors that it was computed from: itself, or those of a layer and a folded normalization.
    """

    name: str
    shape: tuple[int, ...]
    read_before: Callable[[], np.ndarray]
    read_after: Callable[[], np.ndarray] | None = None
    labels: list[str] = field(default_factory=list)
    uses: list[tuple[ir.Node, int]] = field(default_factory=list)
    parts: frozenset[str] = frozenset()

    @cached_property
    def is_changed(self) -> bool:
        """True if training has changed it."""
        return self.read_after is not None and not np.array_equal(self.read_before(), self.elements(True))

    def elements(self, trained: bool) -> np.ndarray:
        """The elements, after training or before."""
        return self.read_before() if not trained or self.read_after is None else self.read_after().reshape(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def long_axes(self) -> tuple[int, ...]:
        """The shape without axes of one element; one axis stays."""
        return long_axes(self.shape)


@dataclass(frozen=True)
class WholeForm:
    """All elements of one origin, its axes of more than one element in the order `axes`."""

    origin: Origin
    axes: tuple[int, ...]

    def build(self, shape: tuple[int, ...], trained: bool) -> np.ndarray:
        """The weight of this `shape`, trained or as it was before."""
        return squeezed(self.origin.elements(trained)).transpose(self.axes).reshape(shape)

    @property
    def covers(self) -> dict[Origin, list[tuple[int, int, int]]]:
        """The lines that are read of each origin: axis, start and end; axis -1 is all of it."""
        return {self.origin: [(-1, 0, 0)]}


@dataclass(frozen=True)
class LineRun:
    """Lines `start` to `stop` along `axis` of an origin; zeros without one."""

    origin: Origin | None
    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class LineForm:
    """Lines along `axis`, one run after another."""

    axis: int
    runs: tuple[LineRun, ...]

    def build(self, shape: tuple[int, ...], trained: bool) -> np.ndarray:
        """The weight of this `shape`, trained or as it was before."""
        flat = long_axes(shape)
        length = math.prod(flat) // flat[self.axis]
        parts = []
        for run in self.runs:
            if run.origin is None:
                parts.append(np.zeros((run.stop - run.start, length), np.float32))
                continue
            parts.append(_lines(squeezed(run.origin.elements(trained)), run.axis)[run.start : run.stop])
        found = np.concatenate(parts)
        rest = tuple(d for i, d in enumerate(flat) if i != self.axis)
        return np.moveaxis(found.reshape(-1, *rest), 0, self.axis).reshape(shape)

    @property
    def covers(self) -> dict[Origin, list[tuple[int, int, int]]]:
        """The lines that are read of each origin: axis, start and end."""
        found: dict[Origin, list[tuple[int, int, int]]] = {}
        for run in self.runs:
            if run.origin is not None:
                found.setdefault(run.origin, []).append((run.axis, run.start, run.stop))
        return found


Form = WholeForm | LineForm


def root_mean_square(array: np.ndarray) -> float:
    """√(mean a²), in double precision."""
    return float(np.sqrt(np.mean(np.square(array.astype(np.float64)))))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """‖a - b‖ / ‖a‖; 0 for two zeros."""
    a, b = a.reshape(-1), b.reshape(-1)
    norm = apart = 0.0
    for start in range(0, a.size, _PART):
        x, y = (array[start : start + _PART].astype(np.float32) for array in (a, b))
        with np.errstate(over="ignore", invalid="ignore"):  # a mask has infinities
            norm += float(np.dot(x, x))
            apart += float(np.dot(x - y, x - y))
    if not norm:
        return float(np.abs(b).max(initial=0) > 0)
    return math.sqrt(apart / norm) if math.isfinite(norm) else math.nan


class Matcher:
    """The search among `origins` for the content of a weight."""

    def __init__(self, origins: Sequence[Origin]) -> None:
        self.origins = origins
        self._by_size: dict[int, list[Origin]] = {}
        for origin in origins:
            self._by_size.setdefault(origin.size, []).append(origin)
        self._samples: dict[tuple[Origin, tuple[int, ...]], np.ndarray] = {}
        self._line_samples: dict[int, tuple[list[tuple[Origin, int, int]], np.ndarray]] = {}

    def wholes(self, array: np.ndarray, tolerance: float) -> list[tuple[float, WholeForm]]:
        """The origins that have the elements of `array`, with their distances, the nearest first."""
        flat = long_axes(array.shape)
        at = _positions(array.size)
        own = array.reshape(-1)[at].astype(np.float32)
        found = []
        for origin in self._by_size.get(array.size, ()):
            for axes in _orders(origin.long_axes, flat):
                near = distance(own, self._sample(origin, axes, at))
                if near > 2 * tolerance + 1e-6:
                    continue
                form = WholeForm(origin, axes)
                exact = distance(array, form.build(array.shape, False))
                if exact <= tolerance:
                    found.append((exact, form))
        found.sort(key=lambda pair: pair[0])
        return [pair for pair in found if pair[0] <= 2 * found[0][0] + 1e-6]

    def _sample(self, origin: Origin, axes: tuple[int, ...], at: np.ndarray) -> np.ndarray:
        if (origin, axes) not in self._samples:
            held = squeezed(origin.read_before()).transpose(axes)
            self._samples[origin, axes] = held[np.unravel_index(at, held.shape)].astype(np.float32)
        return self._samples[origin, axes]

    def lines(self, array: np.ndarray, tolerance: float) -> LineForm | None:
        """`array` as lines of origins; None if some of its lines are in no origin."""
        held = squeezed(array)
        for axis in range(min(held.ndim, 2)) if held.ndim >= 2 else ():
            found = self._lines_along(held, axis, tolerance)
            if found is not None and distance(array, found.build(array.shape, False)) <= tolerance:
                return found
        return None

    def _lines_along(self, array: np.ndarray, axis: int, tolerance: float) -> LineForm | None:
        own = _lines(array, axis)
        places, samples = self._line_table(own.shape[1])
        if not places:
            return None
        mine = own[:, _positions(own.shape[1], _LINE_SAMPLE)].astype(np.float32)
        sizes = np.square(samples).sum(1)
        nearest = np.empty(len(mine), np.int64)
        for start in range(0, len(mine), _CHUNK):
            part = mine[start : start + _CHUNK]
            nearest[start : start + _CHUNK] = np.argmin(sizes - 2 * part @ samples.T, axis=1)
        limit = 4 * tolerance * np.sqrt(np.square(mine).sum(1)) + 1e-6
        if np.mean(np.linalg.norm(mine - samples[nearest], axis=1) > limit) > 0.01:
            return None
        runs: list[list[int]] = []
        for i, best in enumerate(nearest):
            last = runs[-1][1] if runs else -2
            goes_on = last >= 0 and last + 1 < len(places) and _follow(places[last], places[last + 1])
            if goes_on and np.linalg.norm(mine[i] - samples[last + 1]) <= limit[i]:
                runs[-1][1] = last + 1
            else:
                runs.append([int(best), int(best)])
        return LineForm(axis, tuple(LineRun(*places[a], places[b][2] + 1) for a, b in runs))

    def _line_table(self, length: int) -> tuple[list[tuple[Origin, int, int]], np.ndarray]:
        """The lines of this length of all origins: origin, axis and number, and samples of their elements."""
        if length not in self._line_samples:
            at = _positions(length, _LINE_SAMPLE)
            places: list[tuple[Origin, int, int]] = []
            samples = [np.zeros((0, len(at)), np.float32)]
            for origin in self.origins:
                sizes = origin.long_axes
                fits = [axis for axis in (0, 1) if len(sizes) >= 2 and origin.size // sizes[axis] == length]
                if not fits:
                    continue
                held = squeezed(origin.read_before())
                for axis in fits:
                    samples.append(_lines(held, axis)[:, at].astype(np.float32))
                    places += [(origin, axis, i) for i in range(sizes[axis])]
            self._line_samples[length] = places, np.concatenate(samples)
        return self._line_samples[length]

    def bias_of(self, lines: LineForm, biases: Mapping[Origin, Origin]) -> LineForm | None:
        """The bias of a layer whose weight has `lines`; None if these are not all outputs of layers with biases."""
        runs = []
        for run in lines.runs:
            bias = None if run.origin is None else biases.get(run.origin)
            if bias is not None and bias.size != run.origin.long_axes[run.axis]:  # type: ignore[union-attr]
                return None
            runs.append(LineRun(bias, 0, run.start, run.stop))
        return LineForm(0, tuple(runs)) if any(r.origin is not None for r in runs) else None


def _follow(a: tuple[Origin, int, int], b: tuple[Origin, int, int]) -> bool:
    return a[0] is b[0] and a[1] == b[1]


def squeezed(array: np.ndarray) -> np.ndarray:
    """`array` without axes of one element; one axis stays."""
    return array.reshape(long_axes(array.shape))


def long_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` without axes of one element; one axis stays."""
    return tuple(d for d in shape if d != 1) or (1,)


def _lines(array: np.ndarray, axis: int) -> np.ndarray:
    """The slices of `array` along `axis`, as rows."""
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


def _orders(given: tuple[int, ...], wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The orders of axes by which a tensor of the shape `given` may have become one of the shape `wanted`."""
    usual = tuple(range(len(given)))
    if sorted(given) == sorted(wanted):
        return [p for p in itertools.permutations(usual) if tuple(given[i] for i in p) == wanted][:24]
    return [usual, usual[::-1]] if len(given) == 2 or len(wanted) == 2 else [usual]


def _positions(size: int, count: int = _SAMPLE) -> np.ndarray:
    """Places of elements that stand for all of them, the same for each size."""
    if size <= count:
        return np.arange(size)
    return np.random.default_rng(size).choice(size, count, replace=False)
