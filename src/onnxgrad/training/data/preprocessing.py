"""Preprocessing of the data that a model was trained on, kept in its metadata, so that other data are prepared alike.

That is the mean, deviation and size of pictures, the names of the columns that feed an input together, and the
tokenizer with the most tokens of a row. Arguments of a call take precedence over it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput, json_text, printable
from onnxgrad.training.data.columns import Column, Dense, Features
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.images import Images
from onnxgrad.training.data.raw_columns import checked_raw, raw_column
from onnxgrad.training.data.table import Table, cut_off
from onnxgrad.training.data.text import Text
from onnxgrad.training.data.tokenizer_file import parse_tokenizer
from onnxgrad.training.data.wide import check_present
from onnxgrad.training.metadata import PREPROCESSING, read_entry

#: Bytes of a tokenizer's JSON, unpacked.
MOST_BYTES = 1 << 28
#: Names of columns that are written in a line.
_NAMED = 4


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of arrays before they are fed.

    Attributes:
        images: how pictures become arrays; None without pictures.
        pictures: the inputs that take them.
        inputs: the columns that feed an input, by its name.
        tokenizer: the JSON of the tokenizer; empty without one.
        max_length: the most tokens of a row.
        task: of a language model, as plain values (see `onnxgrad.training.language`).
        columns: the columns of a table that inputs take as they are, by the names of the inputs: name, kind, and True
            if values may be missing.
        written: tables that are a part of the model, by the inputs that it had before: the value in place of the input,
            and its inputs now.
    """

    images: Images | None = None
    pictures: tuple[str, ...] = ()
    inputs: Mapping[str, Features] = field(default_factory=dict)
    tokenizer: str = ""
    max_length: int | None = None
    task: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, tuple[str, str, bool]] = field(default_factory=dict)
    written: Mapping[str, tuple[str, tuple[str, ...], Features]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ir.Model) -> Preprocessing:
        """The preprocessing stored in the metadata of `model`. Raises BadInput if it is damaged."""
        found = read_entry(model.metadata_props, PREPROCESSING, _read)
        return cls() if found is None else found

    def __bool__(self) -> bool:
        return bool(self.images or self.inputs or self.tokenizer or self.task or self.columns)

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of columns that the model was trained on, by their names (see `RawColumn`)."""
        found = {name: kind for name, kind, _ in self.columns.values()}
        for features in self.inputs.values():
            prepared = {} if features.table is None else {c.name: c.kind for c in features.table.columns}
            found |= prepared or dict.fromkeys(features.names, "number")
        return found

    def updated(self, other: Preprocessing) -> Preprocessing:
        """`other`, with missing settings taken from this one."""
        has_text = bool(other.tokenizer)
        return Preprocessing(
            self.images if other.images is None else other.images,
            other.pictures or self.pictures,
            {**self.inputs, **other.inputs},
            other.tokenizer if has_text else self.tokenizer,
            other.max_length if has_text else self.max_length,
            other.task or self.task,
            {**self.columns, **other.columns},
            {**self.written, **other.written},
        )

    def in_front_of(self, model: ir.Model) -> Preprocessing:
        """Write the tables in front of their inputs of `model`, in place. Returns what is left to do before it."""
        inputs, columns, written = dict(self.inputs), dict(self.columns), dict(self.written)
        there = {v.name for v in model.graph.inputs}
        for name, features in self.inputs.items():
            if features.table is not None and name in there:
                made, value = features.table.write(model, name)
                columns |= {n: (c.name, c.kind, not features.table.needs(c)) for n, c in made.items()}
                written[name] = (value, tuple(made), features)
                del inputs[name]
        return replace(self, inputs=inputs, columns=columns, written=written)

    def behind_tables(self, model: ir.Model) -> ir.Model:
        """A copy of `model` without its tables, which its metadata describe again; `model` itself without any.

        Raises:
            BadInput: the graph is not the one that was saved.
        """
        if not self.written:
            return model
        copy, inputs = model.clone(), dict(self.inputs)
        try:
            for name, (value, fed, features) in self.written.items():
                cut_off(copy, name, value, fed)
                inputs[name] = features
        except ValueError as error:
            raise BadInput(
                f"the graph in front of {name!r}, which its metadata describe, was changed after training"
            ) from error
        fed_by = {n for _, names, _ in self.written.values() for n in names}
        left = {n: about for n, about in self.columns.items() if n not in fed_by}
        copy.metadata_props.pop(PREPROCESSING, None)
        replace(self, inputs=inputs, columns=left, written={}).write(copy)
        return copy

    def raw_rows(
        self, columns: Mapping[str, Column], fields: Sequence[Field], source: str
    ) -> tuple[dict[str, Column], list[Field]]:
        """`columns` with those that inputs take as they are, under the names of these, and their fields.

        Raises:
            BadInput: a column is missing, or of another type than in training, or lacks a value.
        """
        found, changed = dict(columns), []
        for f in fields:
            if f.name in self.columns:
                name, kind, may_miss = self.columns[f.name]
                check_present(f.name, Features((name,), name), columns)
                raw = checked_raw(raw_column(columns[name], name), name, kind, may_miss, source)
                found[f.name] = Dense(raw.values)
                f = replace(f, raw=True)
            changed.append(f)
        return found, changed

    def images_for(self, images: Images | None) -> Images | None:
        """The `images` of a call, with the stored size if they have none; without them, the stored settings."""
        if images is None or self.images is None or images.size is not None:
            return images or self.images
        return replace(images, size=self.images.size)

    def images_with(self, mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> Images | None:
        """The conversion of images with another `mean` or `std`; None if neither is given."""
        if mean is None and std is None:
            return None
        own = self.images or Images()
        return Images(own.mean if mean is None else mean, own.std if std is None else std, own.size)

    def text(self, tokenizer: Any, max_length: int | None) -> Text | None:
        """The conversion of text by these arguments; None without them. Raises BadInput like `Text.of`."""
        if tokenizer is not None and self.tokenizer and max_length is None:
            max_length = self.max_length
        if tokenizer is None and max_length is not None and self.tokenizer:
            tokenizer = parse_tokenizer(self.tokenizer.encode(), "the model's tokenizer")
        return Text.of(tokenizer, max_length)

    def own_text(self) -> Text:
        """The conversion of text that the model's metadata describe."""
        return Text(parse_tokenizer(self.tokenizer.encode(), "the model's tokenizer"), self.max_length)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the tokenizer."""
        found: dict[str, Any] = {}
        if self.images is not None:
            how = {
                "mean": _number_list(self.images.mean),
                "std": _number_list(self.images.std),
                "size": self.images.size,
            }
            found["images"] = {**how, "inputs": list(self.pictures)}
        if self.inputs:
            found["inputs"] = {
                n: {"columns": list(f.names), "written": f.written}
                | ({} if f.table is None else {"table": f.table.to_json()})
                for n, f in self.inputs.items()
            }
        if self.columns:
            found["columns"] = {n: list(about) for n, about in self.columns.items()}
        if self.written:
            found["tables"] = {
                n: {"value": value, "fed": list(fed), "columns": list(f.names), "written": f.written,
                    "table": f.table.to_json()}
                for n, (value, fed, f) in self.written.items()
            }  # fmt: skip
        if self.max_length is not None:
            found["max_length"] = self.max_length
        if self.task:
            found["task"] = dict(self.task)
        return found

    def write(self, model: ir.Model) -> None:
        """Keep this in the metadata of `model`."""
        if self:
            found = self.to_json()
            if self.tokenizer:
                found["tokenizer"] = base64.b64encode(zlib.compress(self.tokenizer.encode())).decode()
            model.metadata_props[PREPROCESSING] = json_text(found)

    def __str__(self) -> str:
        parts = []
        if self.images is not None:
            mean, std = (", ".join(f"{v:g}" for v in _number_list(x)) for x in (self.images.mean, self.images.std))
            size = "" if self.images.size is None else f", of {self.images.size[0]} × {self.images.size[1]} pixels"
            parts.append(f"pictures less {mean}, divided by {std}{size}")
        for name, features in self.inputs.items():
            if features.table is not None:
                parts.append(f"{printable(name)} from {features.table}")
                continue
            first = ", ".join(map(printable, features.names[:_NAMED]))
            more = f", … ({len(features.names)} columns)" if len(features.names) > _NAMED else ""
            parts.append(f"{printable(name)} from {first}{more}")
        if self.columns:
            named = [
                f"{printable(n)} (days since 1970-01-01)" if kind == "date" else printable(n)
                for n, kind, _ in list(self.columns.values())[:_NAMED]
            ]
            more = f", … ({len(self.columns)} columns)" if len(self.columns) > _NAMED else ""
            parts.append(f"the columns {', '.join(named)}{more} as they are")
        if self.tokenizer:
            most = "" if self.max_length is None else f", at most {self.max_length} tokens"
            parts.append(f"text by its tokenizer{most}")
        if self.task:
            parts.append(f"for {printable(str(self.task['name']).replace('_', '-'))}")
        return "; ".join(parts)


def _number_list(value: float | tuple[float, ...]) -> list[float]:
    return [float(v) for v in (value if isinstance(value, (tuple, list)) else (value,))]


def _read(found: dict[str, Any]) -> Preprocessing:
    """The preprocessing that `to_json` wrote, and its tokenizer."""
    images: Images | None = None
    pictures: tuple[str, ...] = ()
    if "images" in found:
        how = found["images"]
        mean, std = (tuple(float(v) for v in how[k]) for k in ("mean", "std"))
        size = None if how["size"] is None else (int(how["size"][0]), int(how["size"][1]))
        if not {len(mean), len(std)} <= {1, 3} or 0 in std or (size is not None and min(size) < 1):
            raise ValueError
        images, pictures = Images(mean, std, size), tuple(map(str, how["inputs"]))
    inputs = {str(name): _features(f) for name, f in found.get("inputs", {}).items()}
    written = {
        str(n): (str(f["value"]), tuple(map(str, f["fed"])), _features(f)) for n, f in found.get("tables", {}).items()
    }
    packed, text = found.get("tokenizer", ""), ""
    if packed:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.b64decode(packed, validate=True), MOST_BYTES).decode()
        if not unpacking.eof:
            raise ValueError
    most, task = found.get("max_length"), dict(found.get("task", {}))
    if task and not all(isinstance(task[name], str) for name in ("name", "documents")):
        raise TypeError
    columns = {str(n): (str(name), str(kind), bool(may)) for n, (name, kind, may) in found.get("columns", {}).items()}
    return Preprocessing(images, pictures, inputs, text, None if most is None else int(most), task, columns, written)


def _features(found: dict[str, Any]) -> Features:
    table = Table.of_json(found["table"]) if "table" in found else None
    return Features(tuple(map(str, found["columns"])), str(found["written"]), table)
