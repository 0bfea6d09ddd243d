"""Batches: columns matched to the inputs of a step, checked, converted, padded, and shuffled by a seed.

Arrays in memory are checked and converted once; rows read from disk or generated on demand are checked batch by batch.
Rows of several sizes are padded to the largest of the batch: with zeros, class labels with the class that the loss
ignores. An input without a column whose name resembles a padded one gets the ends of rows: a name ending in ``mask``
gets ones where there are data, one ending in ``lengths`` gets their number.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.distributed import blocks
from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_whole
from onnxgrad.training.data.augment import Augment
from onnxgrad.training.data.axes import check_batch_axes, check_label_rows, check_spread, fed_whole, fixed_batch
from onnxgrad.training.data.column_fit import TableSettings
from onnxgrad.training.data.columns import Column, Features, single_array
from onnxgrad.training.data.fields import Field, check_counted, fitted, is_float, match
from onnxgrad.training.data.fingerprint import fingerprint
from onnxgrad.training.data.images import EncodedPictures, Images, Pictures
from onnxgrad.training.data.items import named_source
from onnxgrad.training.data.label_columns import label_column
from onnxgrad.training.data.labels import NamedClasses, check_count
from onnxgrad.training.data.masks import check_sizes, shared_sizes
from onnxgrad.training.data.padding import check_padding, find_ends, padded
from onnxgrad.training.data.prefetch import DEPTH, ahead
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.sampling import balanced
from onnxgrad.training.data.sources import open_data
from onnxgrad.training.data.text import Text, check_tokens, has_text_for_tokens
from onnxgrad.training.data.wide import Joining, check_fed, check_numbers, check_present

#: Batches in a pool from which rows of like lengths are put together; larger pools pad less and shuffle less.
POOL = 50


class Data:
    """Rows for the batch inputs of a step.

    Args:
        source: arrays by name, rows, a path (see `onnxgrad.training.data.sources`), or arrays by position (see
            `named_by_position`).
        fields: the inputs of the step that data feed.
        name: of the data in messages.
        images: the conversion of pictures to arrays.
        inputs: which columns feed which input (see `onnxgrad.training.data.wide`).
        classes: the names of all classes in the order of their numbers, where the source names its own (folders of
            pictures, labels that are text). Default: those of the source, sorted.
        text: the conversion of text to tokens. Default: that of `trained`.
        trained: the preparation of the data that the model was trained on, for settings that are not given.
        pad_to: sizes of padded axes are rounded up to a multiple of it.
        tables: how columns that are joined are prepared, where they have missing values, text or dates.
        fit_rows: the rows that this is fitted on. Default: all.

    Raises:
        BadInput: one line that names the array and says what was expected.
    """

    def __init__(
        self,
        source: Any,
        fields: Sequence[Field],
        name: str = "the data",
        *,
        images: Images | None = None,
        inputs: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
        text: Text | None = None,
        trained: Preprocessing | None = None,
        pad_to: int = 1,
        tables: TableSettings | None = None,
        fit_rows: np.ndarray | None = None,
    ) -> None:
        self.name, self.pad_to = name, pad_to
        check_label_rows(fields)
        trained = trained or Preprocessing()
        source, pictures = named_source(source, fields, name), trained.images_for(images)
        tables_of = Joining.of(tables, fields, fit_rows)
        opened = open_data(source, pictures, inputs, trained.inputs, tables_of, trained.kinds)
        columns, self.fields = trained.raw_rows(opened, fields, name)
        features = {n: c.features for n, c in columns.items() if c.features is not None}
        if inputs:
            check_fed(inputs, self.fields)
        if text is None and trained.tokenizer and has_text_for_tokens(columns, self.fields):
            text = trained.own_text()
        columns = self._tokenized(columns, text, trained)
        check_batch_axes(self.fields, columns)
        self.ends = find_ends(self.fields, columns)
        fed = [f for f in self.fields if f.name not in self.ends]
        self.called = match(columns, fed, name)
        self.columns = self._matched(columns, fed, classes)
        #: how the rows are prepared
        self.preprocessing = self._preparation(text, features)
        #: varies tokens for a task of language models, and lines about how its rows are made
        self.masking = None if text is None else text.masking
        self.notes = [*opened.notes, *([] if text is None else text.notes)]
        #: arrays that were checked and converted once
        self.arrays = self._converted(fed, features)
        #: variants of the rows, and the inputs that take them (see `augmented`)
        self.augment: Augment | None = None
        self.pictures: list[str] = []
        #: labels that move with the pictures, and what comes in
        self.maps: dict[str, float] = {}
        #: reads variants of inputs that fit each other
        self.together: Callable[[np.ndarray, Sequence[int]], dict[str, np.ndarray]] | None = None
        self.shared = shared_sizes(fed, self.columns)
        counts = {n: len(c) for n, c in self.columns.items()}
        #: inputs without a batch axis: every batch contains the whole array
        self.whole = {n for n, c in self.columns.items() if c.whole}
        self.whole |= fed_whole([f for f in fed if f.name not in self.whole], counts, name)
        for f in [f for f in fed if f.name in self.whole and f.name not in self.arrays]:
            found = self.columns[f.name].take(np.arange(counts[f.name]), f)
            self.arrays[f.name] = fitted(self.called[f.name], np.asarray(found), f, name)
        self.rows = self._count_rows({n: count for n, count in counts.items() if n not in self.whole})

    def _tokenized(self, columns: dict[str, Column], text: Text | None, trained: Preprocessing) -> dict[str, Column]:
        """`columns` with tokens in place of text. Raises BadInput for text that nothing makes tokens of."""
        if text is None:
            check_tokens(columns, self.fields, self.name)
            return columns
        for f in [f for f in self.fields if f.name in trained.inputs and f.name not in columns]:
            check_present(f.name, trained.inputs[f.name], columns)
        return text.tokenized(columns, self.fields, self.name)

    def _matched(
        self, columns: Mapping[str, Column], fed: Sequence[Field], classes: Sequence[str] | None
    ) -> dict[str, Column]:
        """The column of each of the inputs `fed`, labels by the numbers of their `classes`."""
        for called in self.called.values():
            if columns[called].problem:
                raise BadInput(f"array {called!r} of {self.name}: {columns[called].problem}")
        found = {f.name: columns[self.called[f.name]] for f in fed}
        for f in [f for f in fed if f.label]:
            found[f.name] = label_column(found[f.name], f, classes, self.name, self.called[f.name])
        return found

    def _preparation(self, text: Text | None, features: Mapping[str, Features]) -> Preprocessing:
        """The record of how pictures, columns of tables and text become arrays."""
        shown = {n: c.how for n, c in self.columns.items() if isinstance(c, (Pictures, EncodedPictures))}
        return Preprocessing(
            next(iter(shown.values()), None),
            tuple(shown),
            {f.name: features[f.name] for f in self.fields if not f.label and f.name in features},
            "" if text is None else text.described,
            None if text is None else text.max_length,
            {} if text is None else text.record,
        )

    def _converted(self, fed: Sequence[Field], features: Mapping[str, Features]) -> dict[str, np.ndarray]:
        """The arrays in memory as the inputs `fed` take them. Raises BadInput for arrays that do not fit."""
        found: dict[str, np.ndarray] = {}
        for f in fed:
            called, array = self.called[f.name], self.columns[f.name].array
            if array is not None:
                check_numbers(f, array, features.get(f.name))
                found[f.name] = array if f.scalar else fitted(called, array, f, self.name)
                check_counted(found[f.name], f, f"array {called!r} of {self.name}")
        for f in [f for f in fed if f.label and f.indices]:
            if (lengths := self.columns[f.name].lengths) is not None and np.ptp(lengths):
                check_padding(f, f"array {self.called[f.name]!r} of {self.name}")
        return found

    def _count_rows(self, counts: Mapping[str, int]) -> int:
        """The number of rows, which are as many as the `counts` of each input. Raises BadInput for other counts."""
        if len(set(counts.values())) > 1:
            held = ", ".join(f"{self.called[n]!r} has {count}" for n, count in counts.items())
            raise BadInput(f"the arrays of {self.name} differ in their number of rows: {held}")
        rows = next(iter(counts.values()), 0)
        if not rows:
            raise BadInput(f"{self.name} is empty: {next(iter(self.called.values()), 'it')!r} has 0 rows")
        return rows

    def __len__(self) -> int:
        return self.rows

    @property
    def fixed(self) -> int | None:
        """The batch size that the model fixes, if it does."""
        return fixed_batch([f for f in self.fields if f.name not in self.whole])

    def count(self, batch: Mapping[str, np.ndarray]) -> int:
        """The number of rows in a batch."""
        return len(next(array for name, array in batch.items() if name not in self.whole))

    @property
    def names(self) -> list[str]:
        """The inputs that are fed."""
        return [f.name for f in self.fields]

    @property
    def lengths(self) -> np.ndarray | None:
        """The lengths of ragged rows, if known; for several columns, the longest."""
        known = [c.lengths for c in self.columns.values() if c.lengths is not None]
        return np.max(known, axis=0) if known else None

    @property
    def labels(self) -> np.ndarray | None:
        """The class index of each row, if one array has them all."""
        names = [f.name for f in self.fields if f.label and f.name in self.columns]
        own = next((c.row_classes for c in self.columns.values() if c.row_classes is not None), None)
        if own is not None:
            return own
        rows = [self.arrays[n] if n in self.arrays else single_array(self.columns[n]) for n in names]
        if self.classes is not None:  # of one score, the labels are 0.0 and 1.0
            rows = [a.ravel().astype(np.int64) if a is not None and a.size == len(self) else a for a in rows]
        found = [a for a in rows if a is not None and a.dtype.kind in "iu" and a.shape == (len(self),)]
        return found[0] if len(found) == 1 else None

    @property
    def files(self) -> np.ndarray | None:
        """The paths of picture files, where a column reads them."""
        return next((c.names for c in self.columns.values() if isinstance(c, Pictures)), None)

    @property
    def picture_sizes(self) -> np.ndarray | None:
        """Height and width of each picture file, [rows, 2], where they differ, so that batches are padded."""
        shown = next(((f, c) for f in self.fields if isinstance(c := self.columns.get(f.name), Pictures)), None)
        sizes = None if shown is None else shown[1].sizes(shown[0])
        return sizes if sizes is not None and np.ptp(sizes, axis=0).any() else None

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of their numbers, where the source names them."""
        return next((c.names for c in self.columns.values() if isinstance(c, NamedClasses)), None)

    def number(self, classes: Sequence[str]) -> None:
        """Number the source's classes by `classes`. Raises BadInput for a class that is missing there."""
        for field in [f for f in self.fields if f.label and f.name in self.columns]:
            column, called = self.columns[field.name], self.called[field.name]
            if isinstance(column, NamedClasses) and column.names != tuple(classes):
                column = self.columns[field.name] = label_column(column, field, classes, self.name, called)
                if column.array is not None:
                    self.arrays[field.name] = fitted(called, column.array, field, self.name)
                self.__dict__.pop("fingerprint", None)

    def check_classes(self, own: bool) -> None:
        """Raise BadInput unless there are as many class names as scores of the model; `own`: its own names."""
        for field in self.fields:
            column = self.columns.get(field.name)
            if isinstance(column, NamedClasses) and not is_float(field.dtype):
                check_count(column.names, field.classes, self.name, own)

    def select(self, rows: np.ndarray, name: str) -> Data:
        """These rows alone; messages call them `name`."""
        some = copy.copy(self)
        some.__dict__.pop("fingerprint", None)
        some.name, some.rows = name, len(rows)
        some.arrays = {n: a if n in self.whole else a[rows] for n, a in self.arrays.items()}
        some.columns = {n: c if n in self.whole else c.select(rows) for n, c in self.columns.items()}
        return some

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all that a step sees of the data; rows that are not in memory are read for it."""
        read = {
            f.name: (self.columns[f.name], f)
            for f in self.fields
            if f.name in self.columns and f.name not in self.arrays
        }
        return f"{fingerprint(self.arrays, read)}-{self.pad_to}"

    def augmented(self, how: Augment) -> Data:
        """The same rows with augmentation in `batches`. Raises BadInput without images."""
        shapes = {f.name: self.arrays[f.name].shape[1:] if f.name in self.arrays else f.shape for f in self.fields}
        some = copy.copy(self)
        reader = next((c.together for c in self.columns.values() if c.together is not None), None)
        if reader is not None:
            some.augment, some.together = how, reader.augmented(how)
            return some
        some.augment, some.pictures = how, how.inputs(self.fields, shapes, self.name)
        some.maps = how.maps(self.fields, shapes)
        return some

    def order(self, seed: Sequence[int], batch_size: int, sample: str = "each") -> np.ndarray:
        """All rows, shuffled by `seed`, or a balanced `sample`; rows of similar length are batched together."""
        random = np.random.default_rng(list(seed))
        labels = self.labels if sample == "balanced" else None
        order = random.permutation(self.rows) if labels is None else balanced(labels, random)
        lengths = self.lengths
        if lengths is None:
            return order
        pools = [order[i : i + POOL * batch_size] for i in range(0, self.rows, POOL * batch_size)]
        order = np.concatenate([p[np.argsort(lengths[p], kind="stable")] for p in pools])
        full = self.rows // batch_size
        batches = order[: full * batch_size].reshape(full, batch_size)
        return np.concatenate([batches[random.permutation(full)].ravel(), order[full * batch_size :]])

    def batches(
        self,
        size: int,
        order: np.ndarray | None = None,
        start: int = 0,
        draw: Sequence[int] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Iterator[dict[str, np.ndarray]]:
        """Batches of `size` rows, the last one smaller, in `order`, from the row at position `start` on.

        A `part` (k, n) has the k-th of n blocks of each batch (see `onnxgrad.distributed.blocks`) and reads no other
        rows; without rows in a block, its batch is empty.

        In an `order`, the full batches of arrays in memory reuse the same arrays. Rows that have to be read are read
        ahead by a thread, which also augments images by `draw` (a seed and an epoch); without it they are unchanged.
        Masks of tokens also follow `draw`; without it they are the same every time.
        """
        check_whole(1, batch_size=size)
        varied = draw is not None and self.augment is not None
        if varied or len(self.arrays) + len(self.ends) < len(self.fields):
            yield from ahead(self._generate(size, order, start, part, DEPTH + 2, draw))
        else:
            yield from self._generate(size, order, start, part, 1, None)

    def first_batches(self, rows: int, size: int = 32) -> Iterator[dict[str, np.ndarray]]:
        """Batches of `size` of the first `rows` rows, in arrays of their own.

        Where the model fixes their size, all are whole: the last one is filled up with the first rows again.
        """
        count, size = min(rows, len(self)), self.fixed or size
        if self.fixed:
            count = -(-count // size) * size
        for batch in self.batches(size, np.arange(count) % len(self)):
            yield {name: batch[name].copy() for name in self.names}

    def all_rows(self, draw: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """All rows as one batch; see `batches` for `draw`."""
        return next(self._generate(len(self), None, 0, (0, 1), 1, draw))

    def _generate(
        self,
        size: int,
        order: np.ndarray | None,
        start: int,
        part: tuple[int, int],
        copies: int,
        draw: Sequence[int] | None,
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches in `copies` sets of arrays that are reused in turn."""
        stop = self.rows if order is None else len(order)
        sets: list[dict[str, np.ndarray]] = [{} for _ in range(copies)]
        for turn, low in enumerate(range(start, stop, size)):
            buffers = sets[turn % copies]
            bounds = blocks(min(size, stop - low), part[1])
            low, high = low + bounds[part[0]], low + bounds[part[0] + 1]
            if low == high:
                yield {n: array if n in self.whole else array[:0] for n, array in self.arrays.items()}
                continue
            rows = np.arange(low, high) if order is None else order[low:high]
            batch = {}
            for name, array in self.arrays.items():
                if name in self.whole:
                    batch[name] = array
                    continue
                if order is None:
                    batch[name] = array[low:high]
                    continue
                if name not in buffers or len(buffers[name]) != len(rows):
                    buffers[name] = np.empty((len(rows), *array.shape[1:]), array.dtype)
                # the one mode that does not copy twice
                batch[name] = np.take(array, rows, axis=0, out=buffers[name], mode="clip")
            varied = {} if draw is None or self.together is None else self.together(rows, draw)
            batch |= self._read(rows, varied)
            check_sizes(batch, self.shared, self.name)
            if self.masking is not None:
                batch |= self.masking(batch, rows, draw)
            if draw is not None and self.augment is not None:
                batch |= {name: self.augment(batch[name], rows, draw) for name in self.pictures}
                for name, beyond in self.maps.items():
                    batch[name] = self.augment.move_maps(batch[name], rows, draw, beyond)
            check_spread(self.fields, batch, self.name)
            yield batch

    def _read(self, rows: np.ndarray, varied: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Read the rows of columns that are neither in memory nor `varied`, and the lengths of ragged rows."""
        batch = dict(varied)
        sizes: dict[str, list[int]] = {}
        for field in self.fields:
            if field.name in self.arrays or field.name in self.ends or field.name in varied:
                continue
            called = self.called[field.name]
            found = self.columns[field.name].take(rows, field)
            sizes[field.name] = [len(a) if np.ndim(a) else 1 for a in found]
            if isinstance(found, list) or self.pad_to > 1:
                found = padded(list(found), field, self.pad_to, f"array {called!r} of {self.name}")
            batch[field.name] = fitted(called, found, field, self.name, rows)
        for name, (of, field) in self.ends.items():
            lengths = np.array(sizes[of])
            if field.name.endswith("mask"):
                lengths = np.arange(batch[of].shape[1]) < lengths[:, None]
            batch[name] = lengths.astype(field.dtype)
        return batch
