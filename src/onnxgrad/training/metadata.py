"""Keys of the metadata that onnxgrad writes into training models, and the meaning of their values."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import onnx_ir as ir

from onnxgrad.errors import BadInput, json_text
from onnxgrad.model_io.map_outputs import CLASSES as CLASSES

T = TypeVar("T")

#: Of a model that was trained: how its data were prepared, as JSON.
PREPROCESSING = "onnxgrad.preprocessing"
#: Of a detector that was trained: how its pictures are prepared, as JSON.
DETECTOR = "onnxgrad.detector"
#: Of an initializer that the host may feed at every step, such as the learning rate: ``rate``.
FED = "onnxgrad.fed"
#: Of such an initializer that the algorithm scales by a schedule of its own: how the schedule is spelled.
SCHEDULED = "onnxgrad.schedule"
#: Of an initializer that is the average of a weight: the name of the weight.
AVERAGE = "onnxgrad.average"
#: Of a model with a new head, until it is trained: the output that the head's weights are named after.
HEAD = "onnxgrad.head"
#: Of an encoder that is trained on pairs: the inputs and the output that it had, as JSON.
PAIRS = "onnxgrad.pairs"
#: Of a training model that was saved during a run: the count that the masks of Dropout are drawn from.
MASKS = "onnxgrad.dropout_step"
#: The key of an algorithm's note on where Adam adds its epsilon.
CONVENTION = "onnxgrad.adam"
#: Of an algorithm: the logits that a loss is computed from where the model ends in probabilities, in words.
TAKEN_OF = "onnxgrad.loss"
#: Of an algorithm: the trained weights, and the others with reasons, in words.
TRAINS = "onnxgrad.trains"
#: Of a model with an adapter: its record as JSON. Of a node that belongs to it: the adapted weight.
ADAPTER = "onnxgrad.adapter"
#: Of a quantized model that is trained: the floats that are stored as integers, as JSON. It is trained through
#: its rounding.
QUANTIZED = "onnxgrad.quantized"
#: Of a pruned model: the weights whose zeros stay zero when it is trained, as JSON; while channels are pruned in
#: training, also how.
PRUNED = "onnxgrad.pruned"
#: Of an initializer of an algorithm: the weight whose mask it is, and the weight whose score it sums up.
MASK, SALIENCY = "onnxgrad.mask", "onnxgrad.saliency"
#: The version of entries that are records.
_VERSION = 1


def read_entry(props: Mapping[str, str], key: str, read: Callable[[Any], T]) -> T | None:
    """The entry `key` of metadata, JSON that `read` converts; None without one. Raises BadInput if it is damaged."""
    text = props.get(key, "")
    try:
        return read(json.loads(text)) if text else None
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, zlib.error) as error:
        raise BadInput(f"the model's metadata {key!r} are damaged: {text[:60]}") from error


def record_text(record: Any) -> str:
    """The fields of `record`, a dataclass, as JSON with the version of this form."""
    return json_text({"version": _VERSION, **asdict(record)})


def read_record(props: Mapping[str, str], key: str, read: Callable[[dict[str, Any]], T]) -> T | None:
    """The entry `key` that `record_text` wrote, as `read` converts the fields (see `read_entry`)."""

    def of_version(fields: dict[str, Any]) -> T:
        if fields.pop("version") != _VERSION:
            raise ValueError
        return read(fields)

    return read_entry(props, key, of_version)


def check_initializers(model: ir.Model, key: str, names: Iterable[str]) -> None:
    """Raise BadInput unless `model` has an initializer for each of `names`, which its entry `key` mentions."""
    for name in names:
        held = model.graph.initializers.get(name)
        if held is None or held.const_value is None:
            raise BadInput(f"the metadata {key!r} name {name!r}, which the model does not have")
