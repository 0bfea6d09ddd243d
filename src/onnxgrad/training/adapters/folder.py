"""An adapter as a folder, and back.

| file | holds |
|---|---|
| ``adapter.onnx_adapter`` | A and B by the names of initializers, for ``onnxruntime.LoraAdapter`` |
| ``model.onnx`` | the model as it was (B is 0); A and B are inputs with defaults, which take others |
| ``adapter_model.safetensors``, ``adapter_config.json`` | the same A and B as PEFT has them |

The header of the safetensors file also holds what onnxgrad knows of the adapter, with the fingerprint of its base.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.files import open_ordinary, replacing
from onnxgrad.keywords import checked
from onnxgrad.model_io import AnyModel, open_model, save_model
from onnxgrad.training.adapters import peft
from onnxgrad.training.adapters.insert import Factors, factor_shapes, insert
from onnxgrad.training.adapters.merge import merged
from onnxgrad.training.adapters.record import Entry, Record, base_fingerprint, record_in, record_of
from onnxgrad.training.adapters.sites import Weight, weights
from onnxgrad.training.graph.lift_weights import own_weights
from onnxgrad.training.graph.linear_models import with_own_weights
from onnxgrad.training.metadata import ADAPTER

ORT_FILE, MODEL_FILE = "adapter.onnx_adapter", "model.onnx"
TENSORS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
#: Files of PEFT are not larger than what they could sensibly describe.
_CONFIG_LIMIT = 1 << 20


def files_in(folder: Path) -> list[Path]:
    """What `save_adapter` may write into `folder`."""
    return [folder / n for n in (ORT_FILE, TENSORS_FILE, CONFIG_FILE, MODEL_FILE, f"{MODEL_FILE}.data")]


def save_adapter(model: ir.Model, base: ir.Model, folder: Path) -> None:
    """Write the adapter of `model`, an inference model with its present values, into `folder`.

    Args:
        model: has the adapter beside its weights.
        base: the same before training.
        folder: is made; files in it are replaced.

    Raises:
        BadInput: the model has no adapter, or the folder cannot be written.
    """
    record = check_adapter(model)
    values = {n: model.graph.initializers[n].const_value.numpy() for n in record.trained}  # type: ignore[union-attr]
    tensors = peft.written(record, values)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write to {str(folder)!r}: {error.strerror or error}") from error
    _switchable(base, record)
    save_model(base, folder / MODEL_FILE)
    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters({n: _ort_value(a) for n, a in values.items()})
    with replacing(folder / ORT_FILE) as file:
        adapter.export_adapter(str(file))
    with replacing(folder / TENSORS_FILE) as file:
        peft.save_tensors(tensors, file, {"format": "pt", ADAPTER: record.text()})
    with replacing(folder / CONFIG_FILE) as file:
        file.write_text(json.dumps(peft.config(record), indent=2) + "\n", encoding="utf-8")


def check_adapter(model: onnx.ModelProto | ir.Model) -> Record:
    """The adapter of `model`, which can be saved. Raises BadInput if there is none."""
    props = model.metadata_props
    record = record_of(props if isinstance(props, dict) else {p.key: p.value for p in props})
    if record is None:
        raise BadInput("the model has no adapter to save\n  hint: train it with adapter=LoRA(…), --lora RANK")
    peft.check_modules(record)
    return record


def _switchable(model: ir.Model, record: Record) -> None:
    """Have the adapter of `model` be inputs with defaults, by which it has no effect."""
    graph = model.graph
    for name in record.trained:
        value = graph.initializers[name]
        if name not in record.also:
            assert value.const_value is not None
            value.const_value = ir.tensor(np.zeros_like(value.const_value.numpy()), name=name)
        if value not in graph.inputs:
            graph.inputs.append(value)


def _ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


# --- and back --------------------------------------------------------------------------------------


@checked
def load_adapter(model: AnyModel, folder: str | os.PathLike, *, merge: bool = False) -> onnx.ModelProto | ir.Model:
    """`model` with the adapter of `folder`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``: the one that was adapted, or the ``model.onnx``
            of an adapter of it.
        folder: from `Trainer.save_adapter`, ``onnxgrad train --save-adapter`` or PEFT. PEFT's modules are found by the
            names that exporters give to initializers and nodes.
        merge: into the weights; else A and B stay initializers beside them, and `attach` goes on training them.

    Returns:
        A model of the caller's kind (an ``onnx.ModelProto`` for a path).

    Raises:
        BadInput: the folder has no adapter, it is damaged, or it is that of another model.
    """
    place = Path(folder)
    tensors, header = peft.load_tensors(place / TENSORS_FILE)
    told = record_of(header)
    opened = open_model(model)
    graph = opened.model.graph
    ir.external_data.load_to_model(opened.model)
    present = record_in(opened.model)
    for value in list(graph.inputs):
        if value.is_initializer():  # an input with a default value is a weight
            graph.inputs.remove(value)
    with_own_weights(graph)
    own_weights(graph, told.also if told is not None else ())
    base = present.base if present is not None else base_fingerprint(graph)
    if told is not None and told.base != base:
        raise BadInput(f"the adapter in {str(place)!r} is that of another model: it was trained beside other weights")
    if told is None:
        told, values = _of_peft(place, tensors, graph, base)
    else:
        values = peft.read(told, tensors, str(place))
    if present is None:
        _insert(graph, told, values, str(place))
        present = told
        present.write(opened.model)
    else:
        _replace(graph, present, told, values, str(place))
    for name in told.also:
        _set(graph, name, values[name], str(place))
    if merge:
        merged(opened.model)
    return opened.close()


def _insert(graph: ir.Graph, told: Record, values: dict[str, np.ndarray], place: str) -> None:
    found = weights(graph)
    factors, chosen = {}, []
    for name, entry in told.weights.items():
        if name not in found:
            raise BadInput(f"the adapter in {place!r} is that of another model: {UnknownName(name, found, 'weight')}")
        a, b = values[entry.a], values[entry.b]
        _check(found[name], entry, a, b, place)
        factors[name] = Factors(a, b, entry.scale)
        chosen.append(found[name])
    told.weights = {}
    insert(graph, chosen, factors, told)


def _check(weight: Weight, entry: Entry, a: np.ndarray, b: np.ndarray, place: str) -> None:
    rank = b.shape[1] if entry.kind == "conv" and b.ndim > 1 else b.shape[-2] if b.ndim > 1 else 0
    if (weight.kind, weight.transposed, weight.groups) != (entry.kind, entry.transposed, entry.groups) or (
        (a.shape, b.shape) != factor_shapes(weight, rank)
    ):
        raise BadInput(
            f"the adapter in {place!r} is that of another model: its factors of {weight.name!r} are "
            f"{list(a.shape)} and {list(b.shape)}, for a weight of {list(weight.shape)}"
        )


def _replace(graph: ir.Graph, present: Record, told: Record, values: dict[str, np.ndarray], place: str) -> None:
    """Put an adapter in the place of one of the same weights and rank."""
    for name in present.weights.keys() ^ told.weights.keys():
        raise BadInput(f"the adapter in {place!r} and that of the model are not both of {name!r}")
    for name, entry in told.weights.items():
        mine = present.weights[name]
        _set(graph, mine.a, values[entry.a], place)
        _set(graph, mine.b, values[entry.b] * (entry.scale / mine.scale), place)


def _set(graph: ir.Graph, name: str, array: np.ndarray, place: str) -> None:
    held = graph.initializers.get(name)
    old = None if held is None else held.const_value
    if held is None or old is None or tuple(old.shape) != array.shape:
        raise BadInput(
            f"the adapter in {place!r} is that of another model: {name!r} is none of its weights {list(array.shape)}"
        )
    held.const_value = ir.tensor(array.astype(old.dtype.numpy()), name=name)


def _of_peft(
    place: Path, tensors: dict[str, np.ndarray], graph: ir.Graph, base: str
) -> tuple[Record, dict[str, np.ndarray]]:
    """The adapter that PEFT has written, for the weights of `graph`."""
    file = place / CONFIG_FILE
    try:
        with open_ordinary(file) as opened:
            config = json.loads(opened.read(_CONFIG_LIMIT))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {str(file)!r}: {error}") from error
    return peft.understood(config, tensors, weights(graph), set(graph.initializers), base, str(place))
