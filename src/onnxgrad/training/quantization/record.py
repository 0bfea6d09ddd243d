"""The record of quantization-aware training in a model: the floats that are stored as integers in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnxgrad.training.metadata import QUANTIZED, check_initializers, read_record, record_text


@dataclass(frozen=True)
class Bias:
    """A bias stored as int32; its step is that of the input times that of the weight.

    Attributes:
        stored: the name of the integers.
        scale, point: the names of their scale and zero point (empty if there is none).
        input, weight: the names of the scales whose product theirs is; empty if it is one of its own.
        axis: of the scale.
    """

    stored: str
    scale: str
    point: str
    input: str
    weight: str
    axis: int


@dataclass
class Storage:
    """The floats of a model that are stored as integers.

    Attributes:
        weights: the names of integers, by those of the floats that a QuantizeLinear rounds while they train.
        biases: by the names of the floats that stand for them.
        operators: nodes that compute on integers, in base64, which floats stand for while they train (see `operators`);
            several in a row belong together.
        forms: element types and shapes of initializers that such nodes read, by name, where they differ.
    """

    weights: dict[str, str] = field(default_factory=dict)
    biases: dict[str, Bias] = field(default_factory=dict)
    operators: list[list[str]] = field(default_factory=list)
    forms: dict[str, list[int]] = field(default_factory=dict)

    def write(self, model: ir.Model) -> None:
        """Store the record in the metadata of `model`, which is then trained through its rounding."""
        model.metadata_props[QUANTIZED] = record_text(self)


def record_in(model: ir.Model) -> Storage | None:
    """The record in the metadata of `model`; None without one.

    Raises:
        BadInput: they are of an unknown form, or name tensors that the model does not have.
    """
    found = read_record(model.metadata_props, QUANTIZED, _read)
    if found is None:
        return None
    needed = [*found.weights, *found.biases]
    needed += [n for b in found.biases.values() for n in (b.scale, b.point, b.input, b.weight) if n]
    check_initializers(model, QUANTIZED, needed)
    return found


def _read(fields: Mapping[str, Any]) -> Storage:
    found = Storage(dict(fields["weights"]), {name: Bias(**about) for name, about in fields["biases"].items()})
    names = [*found.weights.values()]
    names += [n for b in found.biases.values() for n in (b.stored, b.scale, b.point, b.input, b.weight)]
    found.operators, found.forms = list(fields.get("operators", ())), dict(fields.get("forms", {}))
    names += [text for texts in found.operators for text in texts]
    if not all(isinstance(n, int) for form in found.forms.values() for n in form):
        raise ValueError
    if not all(isinstance(n, str) for n in names) or not all(isinstance(b.axis, int) for b in found.biases.values()):
        raise ValueError
    return found
