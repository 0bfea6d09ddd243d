"""Preprocessing of the data that a model was trained on, kept in its metadata, so that other data are prepared alike.

That is the mean, deviation and size of pictures, the names of the columns that feed an input together, and the
tokenizer with the most tokens of a row. Arguments of a call take precedence over it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput, json_text, printable
from onnxgrad.training.data.columns import Features
from onnxgrad.training.data.images import Images
from onnxgrad.training.data.text import Text
from onnxgrad.training.data.tokenizer_file import parse_tokenizer
from onnxgrad.training.metadata import PREPROCESSING

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
    """

    images: Images | None = None
    pictures: tuple[str, ...] = ()
    inputs: Mapping[str, Features] = field(default_factory=dict)
    tokenizer: str = ""
    max_length: int | None = None
    task: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ir.Model) -> Preprocessing:
        """The preprocessing stored in the metadata of `model`. Raises BadInput if it is damaged."""
        text = model.metadata_props.get(PREPROCESSING, "")
        if not text:
            return cls()
        try:
            return _read(json.loads(text))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError, zlib.error) as error:
            raise BadInput(f"the model's metadata {PREPROCESSING!r} are damaged: {text[:60]}") from error

    def __bool__(self) -> bool:
        return bool(self.images or self.inputs or self.tokenizer or self.task)

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
        )

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
            found["inputs"] = {n: {"columns": list(f.names), "written": f.written} for n, f in self.inputs.items()}
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
            first = ", ".join(map(printable, features.names[:_NAMED]))
            more = f", … ({len(features.names)} columns)" if len(features.names) > _NAMED else ""
            parts.append(f"{printable(name)} from {first}{more}")
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
    inputs = {
        str(name): Features(tuple(map(str, f["columns"])), str(f["written"]))
        for name, f in found.get("inputs", {}).items()
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
    return Preprocessing(images, pictures, inputs, text, None if most is None else int(most), task)
