"""Streams: data that are read as a run needs them, and never lie in memory as a whole.

A stream is an iterable of rows or of batches (a generator, a ``DataLoader``, an ``IterableDataset``, a streaming
``datasets`` dataset, batches of Arrow or polars), a function that returns one, or files (see `shards`). Batches are
taken as they come; rows, tables and shuffled rows are put together to batches of `batch_size`. Each part is prepared as
`Data`, so columns are matched, joined, checked and tokenized alike. A table whose columns are prepared is read once
before, to fit the preparation.

A pass over the stream is an epoch. With `steps_per_epoch`, epochs have so many steps, and passes follow each other. All
ranks read the same stream, and each takes its block of every batch. A resumed run opens the stream again and skips what
was seen; files skip row groups unread. An iterator, such as a generator object, can be read once only.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.distributed import blocks
from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_whole
from onnxgrad.training.data.augment import Augment
from onnxgrad.training.data.batches import Data
from onnxgrad.training.data.column_fit import MixedColumn, TableSettings
from onnxgrad.training.data.dropped_rows import NoRowsLeft
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.items import chunks, open_items
from onnxgrad.training.data.labels import ClassColumn
from onnxgrad.training.data.padding import check_padding
from onnxgrad.training.data.prefetch import ahead
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.shards import Shards
from onnxgrad.training.data.sources import open_data
from onnxgrad.training.data.text import Tokens
from onnxgrad.training.data.wide import Joining, fit_parts

Batch = dict[str, np.ndarray]


class Stream:
    """Rows for the batch inputs of a step, in the order in which they come.

    Args:
        source: see above.
        fields: the inputs of the step.
        name: of the data in messages.
        shuffle_buffer: rows among which the next ones are drawn at random; 0: rows stay in their order.
        steps_per_epoch: steps after which an epoch ends. Default: it ends with the stream.
        classes: the names of the classes in the order of their numbers.
        cut: makes sources for `Data` of items, with True for a batch that came as one.
        tables: how columns that are joined are prepared.
        arguments: further ones of `Data`.

    Raises:
        BadInput: the source is empty, or its first part does not fit; or tables are fitted, and it can be read once.

    Attributes:
        first: the first part, which shows how all are prepared.
        exhausted: the stream, which can be read once, has ended.
    """

    def __init__(
        self,
        source: Any,
        fields: Sequence[Field],
        name: str = "the data",
        *,
        shuffle_buffer: int = 0,
        steps_per_epoch: int | None = None,
        classes: Sequence[str] | None = None,
        cut: Callable[[Iterable[Any], Sequence[Field], str], Iterator[tuple[Any, bool]]] = chunks,
        tables: TableSettings | None = None,
        **arguments: Any,
    ) -> None:
        check_whole(0, shuffle_buffer=shuffle_buffer)
        self.fields, self.name, self.buffer, self.steps_per_epoch = list(fields), name, shuffle_buffer, steps_per_epoch
        self.source: Any = Shards(Path(source)) if isinstance(source, (str, os.PathLike)) else source
        if isinstance(self.source, Shards) and arguments.get("trained") is not None:
            self.source.know(arguments["trained"].kinds)
        self._cut, self._lacks_rows = cut, False
        self._opened = self._open(0)
        self._notes: list[str] = []
        if tables is not None:
            arguments |= self._fit_tables(tables, arguments.get("inputs") or {}, arguments["trained"])
        self._prepare: Any = functools.partial(Data, fields=fields, classes=classes, **arguments)
        self._pending: Iterator[tuple[Data, bool]] | None = self._parts(self._opened, 0)
        start = next(self._pending, None)
        if start is None:
            raise BadInput(f"{name} is an empty stream")
        self.first, self._as_batches = start
        if classes is None and any(isinstance(c, ClassColumn) for c in self.first.columns.values()):
            raise BadInput(
                f"the labels of {name} are text, and a stream does not show all classes at its beginning\n"
                "  hint: classes= (--classes) names them in the order of their numbers"
            )
        self._start: list[tuple[Data, bool]] = [start]
        self._chain: Iterator[tuple[Batch, int]] | None = None
        self.exhausted = False
        self.augment: Augment | None = None
        self.pictures: list[str] = []

    # --- what a run asks of its data ----------------------------------------------------------------

    @property
    def is_repeatable(self) -> bool:
        """True if the stream can be opened again from its beginning."""
        return self._opened is not self.source and type(self.source).__name__ != "RecordBatchReader"

    @property
    def known_steps(self) -> int | None:
        """Steps of an epoch, where they are known before it."""
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch
        has_length = self._as_batches and not self.buffer and self.fixed is None and hasattr(self.source, "__len__")
        try:
            return len(self.source) if has_length else None
        except TypeError:  # a loader of a dataset without a length
            return None

    def __getattr__(self, name: str) -> Any:
        known = ("whole", "fixed", "names", "classes", "preprocessing", "called", "columns", "files")
        if name in (*known, "count", "check_classes"):
            return getattr(self.first, name)
        raise AttributeError(name)

    @property
    def notes(self) -> list[str]:
        """Lines about how rows are made."""
        return [*(self.source.notes if isinstance(self.source, Shards) else ()), *self._notes, *self.first.notes]

    @property
    def labels(self) -> None:
        """The labels of all rows are not known."""

    @property
    def fingerprint(self) -> str:
        """A description in place of a digest, for which the stream would have to be read."""
        return f"stream {self.name} {self.buffer} {self.steps_per_epoch}"

    def number(self, classes: Sequence[str]) -> None:
        """Number classes by `classes`: parts are by the names that the stream was opened with."""
        self._prepare = functools.partial(self._prepare, classes=classes)

    def augmented(self, how: Augment) -> Stream:
        """The same stream, whose pictures are augmented in batches. Raises BadInput without pictures."""
        self.augment, self.pictures = how, self.first.augmented(how).pictures
        return self

    # --- batches ---------------------------------------------------------------------------------

    def batches(
        self, size: int, seed: int, epoch: int, seen: tuple[int, int], part: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[Batch, int]]:
        """The batches of an epoch, each with its number of rows on all ranks.

        Args:
            size: rows of a batch, where batches are put together.
            seed: decides the order of shuffled rows.
            epoch: the number of the epoch.
            seen: rows of this epoch, and steps of the whole run, that are behind.
            part: the k-th of n blocks of each batch.

        Raises:
            BadInput: the stream cannot be opened again.
        """
        if self.steps_per_epoch is None:
            yield from ahead(self._pass(size, seed, epoch, part, rows=seen[0]))
            return
        if self._chain is None:
            self._chain = ahead(self._passes(size, seed, part, seen[1]))
        for _ in range(self.steps_per_epoch * (epoch + 1) - seen[1]):
            found = next(self._chain, None)
            if found is None:
                self.exhausted = True
                return
            yield found

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._chain is not None:
            self._chain.close()  # type: ignore[attr-defined]
            self._chain = None

    def _passes(self, size: int, seed: int, part: tuple[int, int], skip: int) -> Iterator[tuple[Batch, int]]:
        """The batches of all passes, one after the other, without the first `skip`."""
        number = 0
        while True:
            found = None
            for found in self._pass(size, seed, number, part):
                if skip:
                    skip -= 1
                    continue
                yield found
            number += 1
            if found is None or not self.is_repeatable:
                return

    def _pass(
        self, size: int, seed: int, number: int, part: tuple[int, int], rows: int = 0
    ) -> Iterator[tuple[Batch, int]]:
        """The batches of one pass, without the first `rows` rows."""
        skipped = 0
        seeks = rows and not (self.buffer or self._as_batches or self._lacks_rows) and isinstance(self.source, Shards)
        parts = self._read_again(number, rows if seeks else 0)
        skipped = rows if seeks else 0
        turn = 0
        for batch, count in self._put_together(parts, size, [seed, number]):
            turn += count
            if skipped < rows:
                skipped += count
                continue
            low, high = blocks(count, part[1])[part[0] : part[0] + 2]
            batch = {n: a if n in self.whole else a[low:high] for n, a in batch.items()}
            if self.augment is not None and high > low:
                places = np.arange(turn - count + low, turn - count + high)
                batch |= {n: self.augment(batch[n], places, [seed, number]) for n in self.pictures}
            yield batch, count

    def _read_again(self, number: int, skip: int) -> Iterator[tuple[Data, bool]]:
        """The parts of pass `number`."""
        if self._pending is not None and not skip:
            pending, self._pending = self._pending, None
            yield from self._start
            yield from pending
            return
        self._pending = None
        self._check_repeatable()
        items = self.source.read(skip) if isinstance(self.source, Shards) and skip else self._open(number)
        yield from self._parts(items, number)

    def _open(self, number: int) -> Iterator[Any]:
        """The items of a pass."""
        source = self.source
        if hasattr(source, "set_epoch"):
            source.set_epoch(number)
        elif hasattr(getattr(source, "sampler", None), "set_epoch"):
            source.sampler.set_epoch(number)
        return open_items(source, self.name)

    def _check_repeatable(self) -> None:
        if not self.is_repeatable:
            raise BadInput(
                f"{self.name} is an iterator, which can be read once only: it has no beginning to go back to\n"
                "  hint: hand over a function that returns it (lambda: rows()), or a list"
            )

    def _fit_tables(self, tables: TableSettings, inputs: Mapping[str, str], trained: Preprocessing) -> dict[str, Any]:
        """Read the stream once for the preparation of its columns. Returns arguments of `Data`."""
        self._check_repeatable()
        self._lacks_rows = tables.missing is not None
        joining = Joining.of(tables, self.fields)
        while True:
            types = dict(getattr(self.source, "types", {}))
            parts = (open_data(part) for part, _ in self._cut(self._opened, self.fields, self.name))
            try:
                fitted, notes = fit_parts(parts, inputs, trained.inputs, joining, self.name)
            except MixedColumn as error:  # of files whose first lines show other types
                if not isinstance(self.source, Shards) or types.get(error.name) == "string":
                    raise
                self.source.types[error.name] = "string"
            except BadInput:
                if types == getattr(self.source, "types", {}):
                    raise
            self._opened = self._open(0)
            if types == getattr(self.source, "types", {}):  # else a column was read as one of another type before
                self._notes += notes
                drops = replace(tables, is_counted=True) if self._lacks_rows else None
                return {"trained": trained.updated(Preprocessing(inputs=fitted)), "tables": drops}

    def _parts(self, items: Iterable[Any], number: int) -> Iterator[tuple[Data, bool]]:
        for k, (part, as_batch) in enumerate(self._cut(items, self.fields, self.name)):
            try:
                yield self._prepare(part, name=self.name if not k else f"part {k} of {self.name}"), as_batch
            except NoRowsLeft:
                continue

    def _put_together(
        self, parts: Iterator[tuple[Data, bool]], size: int, draw: Sequence[int]
    ) -> Iterator[tuple[Batch, int]]:
        fixed = self.fixed
        if self._as_batches and not self.buffer and fixed is None:
            for k, (data, _) in enumerate(parts):
                yield data.all_rows([*draw, k]), len(data)
            return
        size = fixed or size
        pads = {n: c.pad for n, c in self.columns.items() if isinstance(c, Tokens)}
        held = _Rows(self.fields, self.whole, np.random.default_rng([*draw, 0xB0F]) if self.buffer else None, pads)
        for k, (data, _) in enumerate(parts):
            held.add(data.all_rows([*draw, k]), len(data))
            while held.count >= self.buffer + size:
                yield held.take(size), size
        while held.count and (not fixed or held.count >= size):
            count = min(size, held.count)
            yield held.take(count), count


class _Rows:
    """Rows that wait for their batch: in their order, or in a store of which some are drawn at random."""

    def __init__(
        self, fields: Sequence[Field], whole: set[str], random: np.random.Generator | None, pads: Mapping[str, int]
    ) -> None:
        self.fields, self.whole, self.random, self.pads = {f.name: f for f in fields}, whole, random, pads
        self.fixed: Batch = {}
        self.waiting: list[Batch] = []
        self.store: Batch = {}
        self.count = 0

    def add(self, batch: Batch, count: int) -> None:
        """Add the rows of `batch`."""
        self.fixed |= {n: a for n, a in batch.items() if n in self.whole}
        rows = {n: a for n, a in batch.items() if n not in self.whole}
        if self.random is None:
            self.waiting.append(rows)
        else:
            for name, array in rows.items():
                self._append(name, array)
        self.count += count

    def take(self, size: int) -> Batch:
        """Remove `size` rows."""
        self.count -= size
        return (self._first(size) if self.random is None else self._drawn(size, self.random)) | self.fixed

    def _first(self, size: int) -> Batch:
        pieces: list[Batch] = []
        while size:
            part = self.waiting.pop(0)
            count = len(next(iter(part.values())))
            if count > size:
                self.waiting.insert(0, {n: a[size:] for n, a in part.items()})
                part, count = {n: a[:size] for n, a in part.items()}, size
            pieces.append(part)
            size -= count
        return {n: self._concatenate(n, [p[n] for p in pieces]) for n in pieces[0]}

    def _drawn(self, size: int, random: np.random.Generator) -> Batch:
        total = self.count + size
        chosen = random.choice(total, size, replace=False)
        found = {n: a[chosen] for n, a in self.store.items()}
        holes = np.sort(chosen[chosen < self.count])
        last = np.setdiff1d(np.arange(self.count, total), chosen)
        for array in self.store.values():
            array[holes] = array[last]
        return found

    def _append(self, name: str, new: np.ndarray) -> None:
        """Write rows behind those in the store, which grows where they do not fit."""
        held = self.store.get(name, new[:0])
        shape = self._largest(name, [held, new] if self.count else [new])
        end = self.count + len(new)
        if len(held) < end or held.shape[1:] != shape:
            grown = self._blank(name, max(end, 2 * len(held)), shape, new.dtype)
            _write(grown, held[: self.count])
            held = self.store[name] = grown
        held[self.count : end] = self._blank(name, 1, shape, new.dtype)
        _write(held[self.count : end], new)

    def _concatenate(self, name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """One array of all rows, padded to the largest of them."""
        if len(arrays) == 1:
            return arrays[0]
        joined = self._blank(name, sum(map(len, arrays)), self._largest(name, arrays), arrays[0].dtype)
        begin = 0
        for array in arrays:
            _write(joined[begin : begin + len(array)], array)
            begin += len(array)
        return joined

    def _largest(self, name: str, arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
        """The sizes of padded rows. Raises BadInput for labels that cannot be padded."""
        shape = tuple(max(sizes) for sizes in zip(*(a.shape[1:] for a in arrays)))
        field = self.fields[name]
        if field.label and field.indices and any(a.shape[1:] != shape for a in arrays):
            check_padding(field, f"the labels {name!r}")
        return shape

    def _blank(self, name: str, count: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        field = self.fields[name]
        ignored = field.ignored if field.label and field.ignored is not None else 0
        return np.full((count, *shape), self.pads.get(name, ignored), dtype)


def _write(target: np.ndarray, array: np.ndarray) -> None:
    """Write `array` at the beginnings of the axes of `target`."""
    target[tuple(slice(n) for n in array.shape)] = array
