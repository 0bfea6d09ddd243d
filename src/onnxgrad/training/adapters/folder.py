"""An adapter as a folder, and back.

| file | holds |
|---|---|
| ``adapter.onnx_adapter`` | what trained by the names of initializers, for ``onnxruntime.LoraAdapter`` |
| ``adapter_model.safetensors``, ``adapter_config.json`` | the same as PEFT has it |
| ``model.onnx`` | if asked for: the model as it was; what trained are inputs, whose defaults have no effect |
| ``adapters.mjs``, ``host.mjs`` | with it: switch adapters in onnxruntime-web or onnxruntime-node |

The header of the safetensors file also has onnxgrad's record of the adapter, with the fingerprint of its base, the
names of the classes and the preprocessing of the data. The settings name the file of the base, if it was read from one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.files import make_folder, open_ordinary, replacing
from onnxgrad.ir.match import not_none
from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel, open_model, save_model
from onnxgrad.model_io.aside import external_aside
from onnxgrad.training.adapters import peft
from onnxgrad.training.adapters.foreign import understood
from onnxgrad.training.adapters.forms import CHANNELS, SCALED, TENSORS, VERA, fits
from onnxgrad.training.adapters.insert import insert
from onnxgrad.training.adapters.merge import make_plain, merged
from onnxgrad.training.adapters.record import Entry, Record, base_fingerprint, record_in, record_of
from onnxgrad.training.adapters.sites import CONV, Weight, weights
from onnxgrad.training.adapters.targets import Target
from onnxgrad.training.adapters.values import lengths, shapes
from onnxgrad.training.graph.own_tensors import own_tensors
from onnxgrad.training.graph.rounding import standardize
from onnxgrad.training.metadata import ADAPTER, CLASSES, PREPROCESSING, record_text
from onnxgrad.training.tensor_files import load_tensors, save_tensors

ORT_FILE, MODEL_FILE = "adapter.onnx_adapter", "model.onnx"
TENSORS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
#: Files of training/export, for JavaScript.
_SCRIPTS = ("adapters.mjs", "host.mjs")
#: Metadata of a trained model that its adapter carries as well.
_CARRIED = (CLASSES, PREPROCESSING)
#: Files of PEFT are not larger than their content could sensibly require.
_CONFIG_LIMIT = 1 << 20


def files_in(folder: Path) -> list[Path]:
    """The files that `save_adapter` may write into `folder`."""
    return [folder / n for n in (ORT_FILE, TENSORS_FILE, CONFIG_FILE, MODEL_FILE, f"{MODEL_FILE}.data", *_SCRIPTS)]


def save_adapter(
    model: ir.Model, base: ir.Model, folder: Path, *, switchable: bool = False, path: str | None = None
) -> None:
    """Write the adapter of `model`, an inference model with its present values, into `folder`.

    Args:
        model: has the adapter beside its weights.
        base: the same before training.
        folder: is made; files in it are replaced.
        switchable: also write ``model.onnx``, a copy of the base to which ONNX Runtime adds adapters, and scripts that
            do so in JavaScript.
        path: the file of the base, which the settings name.

    Raises:
        BadInput: the model has no adapter, or the folder cannot be written.
    """
    for each in (model, base):
        make_plain(each)
    record = check_adapter(model)
    held = model.graph.initializers
    peft.name_parameters(record, weights(base.graph), held)
    values = {n: held[n].const_value.numpy() for n in record.trained}  # type: ignore[union-attr]
    shared = {n: held[n].const_value.numpy() for n in record.shared.values()}  # type: ignore[union-attr]
    whole = {e.module: lengths(base.graph.initializers[e.weight], e) for e in record.entries if "m" in e.tensors}
    carried = {key: base.metadata_props[key] for key in _CARRIED if key in base.metadata_props}
    write_adapter(folder, record, values, shared=shared, whole=whole, header=carried, path=path)
    if switchable:
        _switchable(base, record)
        save_model(base, folder / MODEL_FILE)
        for name in _SCRIPTS:
            with replacing(folder / name) as file:
                shutil.copyfile(Path(__file__).parents[1] / "export" / name, file)


def write_adapter(
    folder: Path, record: Record, values: Mapping[str, np.ndarray], *, shared: Mapping[str, np.ndarray] | None = None,
    whole: Mapping[str, np.ndarray] | None = None, header: Mapping[str, str] | None = None, path: str | None = None,
) -> None:  # fmt: skip
    """Write the files of an adapter.

    Args:
        folder: is made; files in it are replaced.
        record: of the adapter.
        values: what trained, by the names of initializers.
        shared: A and B of VeRA.
        whole: with DoRA, the lengths of weights without their adapters, by module.
        header: further metadata of the safetensors file.
        path: the file of the base, which the settings name.

    Raises:
        BadInput: the folder cannot be written.
    """
    tensors = peft.written(record, {**values, **(shared or {})}, whole or {})
    make_folder(folder)
    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters({n: _ort_value(a) for n, a in values.items()})
    with replacing(folder / ORT_FILE) as file:
        adapter.export_adapter(str(file))
    with replacing(folder / TENSORS_FILE) as file:
        save_tensors(tensors, file, {"format": "pt", ADAPTER: record_text(record), **(header or {})})
    with replacing(folder / CONFIG_FILE) as file:
        file.write_text(json.dumps(peft.config(record, tensors, path), indent=2) + "\n", encoding="utf-8")


def check_adapter(model: onnx.ModelProto | ir.Model) -> Record:
    """The record of the adapter of `model`, checked to be complete. Raises BadInput without an adapter."""
    props = model.metadata_props
    record = record_of(props if isinstance(props, dict) else {p.key: p.value for p in props})
    if record is None or record.form == CHANNELS:
        raise BadInput("the model has no adapter to save\n  hint: train it with adapter=LoRA(…), --lora RANK")
    peft.by_module(record)
    return record


def _switchable(model: ir.Model, record: Record) -> None:
    """Have the adapter of `model` be inputs with defaults, by which it has no effect."""
    graph = model.graph
    held, entries = graph.initializers, [e for e in record.entries if "m" in e.tensors]
    factors = {e.tensors["ia3_l"] for e in record.entries if "ia3_l" in e.tensors}
    neutral = {e.tensors["m"]: lengths(held[e.weight], e, e.part) for e in entries}
    for name in record.trained:
        value = held[name]
        old = not_none(value.const_value).numpy()
        none = np.ones_like(old) if name in factors else np.zeros_like(old)
        default = old if name in record.also else neutral.get(name, none).astype(old.dtype)
        value.const_value = ir.tensor(default, name=name)  # a field of raw bytes, as adapters.mjs reads it
        if value not in graph.inputs:
            graph.inputs.append(value)


def _ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


# --- and back --------------------------------------------------------------------------------------


@check_keywords
def load_adapter(model: AnyModel, folder: str | os.PathLike, *, merge: bool = False) -> onnx.ModelProto | ir.Model:
    """`model` with the adapter of `folder`, in place of one that the model has.

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
    tensors, header = load_tensors(place / TENSORS_FILE)
    record = record_of(header)
    opened = open_model(model, standardize)
    graph = opened.model.graph
    external_aside(opened.model)
    make_plain(opened.model)
    present = record_in(opened.model)
    own_tensors(opened.model, record.also if record is not None else ())
    base = present.base if present is not None else base_fingerprint(graph)
    if record is not None and record.base != base:
        raise BadInput(f"the adapter in {str(place)!r} is that of another model: it was trained beside other weights")
    if record is None:
        record, values = _of_peft(place, tensors, graph, base)
    else:
        values = peft.read(record, tensors, str(place))
    if present is None:
        _insert(graph, record, values, str(place))
        present = record
        present.write(opened.model)
    else:
        _replace(graph, present, record, values, str(place))
    for name in record.also:
        _set(graph, name, values[name], str(place))
    opened.model.metadata_props.update({key: header[key] for key in _CARRIED if key in header})
    if merge:
        merged(opened.model)
    return opened.close()


def _insert(graph: ir.Graph, record: Record, values: dict[str, np.ndarray], place: str) -> None:
    found = weights(graph)
    targets, own = [], []
    entries, record.entries = record.entries, []
    shared = {letter: values[name] for letter, name in record.shared.items()}
    for entry in entries:
        if entry.weight not in found:
            unknown = UnknownName(entry.weight, found, "weight")
            raise BadInput(f"the adapter in {place!r} is that of another model: {unknown}")
        weight = found[entry.weight]
        own.append({letter: values[name] for letter, name in entry.tensors.items()})
        _check(weight, entry, record.form, own[-1], shared, place)
        own[-1] |= {letter: values[name] for letter, name in entry.fixed.items()}
        targets.append(Target(weight, entry.part, entry.label))
    insert(graph, targets, own, entries, shared, record)


def _check(
    weight: Weight, entry: Entry, form: str, own: dict[str, np.ndarray], shared: dict[str, np.ndarray], place: str
) -> None:
    alike = (weight.kind, weight.transposed, weight.groups) == (entry.kind, entry.transposed, entry.groups)
    if form in TENSORS:
        if not alike or not fits(form, weight, own, entry.feedforward):
            sizes = " and ".join(str(list(a.shape)) for a in own.values())
            raise BadInput(
                f"the adapter in {place!r} is that of another model: its tensors of {weight.name!r} are {sizes}, for a "
                f"weight of {list(weight.shape)}"
            )
        return
    first = own["d" if form == VERA else "A"]
    rank = len(first) // entry.groups if form == VERA or entry.kind == CONV else first.shape[-1]
    least = {"A": (weight.ends[0], rank), "B": (rank, weight.ends[1])}
    given = {letter: a.shape for letter, a in own.items()}
    if (
        not alike
        or given != shapes(weight, form, rank, entry.part)
        or any(min(np.subtract(a.shape, least[letter])) < 0 or rank not in a.shape for letter, a in shared.items())
    ):
        sizes = " and ".join(str(list(shape)) for shape in (given | {k: a.shape for k, a in shared.items()}).values())
        raise BadInput(
            f"the adapter in {place!r} is that of another model: its tensors of {weight.name!r} are "
            f"{sizes}, for a weight of {list(weight.shape)}"
        )


def _replace(graph: ir.Graph, present: Record, record: Record, values: dict[str, np.ndarray], place: str) -> None:
    """Replace an adapter by one of the same weights, form and rank."""
    if present.form != record.form:
        raise BadInput(f"the adapter in {place!r} is {record.form}, and that of the model is {present.form}")
    mine = {(e.weight, e.part): e for e in present.entries}
    theirs = {(e.weight, e.part): e for e in record.entries}
    for name, _ in mine.keys() ^ theirs.keys():
        raise BadInput(f"the adapter in {place!r} and that of the model are not both of {name!r}")
    changed = [n for n in present.also if n not in record.also]
    if changed and base_fingerprint(graph, (*present.own, *present.constants)) != present.base:
        raise BadInput(
            f"the adapter of the model has trained {changed[0]!r} as a whole, which that in {place!r} has not\n"
            "  hint: load it into the model before training"
        )
    for key, entry in theirs.items():
        for letter, name in entry.tensors.items():
            factor = entry.scale / mine[key].scale if letter in SCALED else 1.0
            _set(graph, mine[key].tensors[letter], values[name] * factor, place)
    for letter, name in record.shared.items():
        _set(graph, present.shared[letter], values[name], place)


def _set(graph: ir.Graph, name: str, array: np.ndarray, place: str) -> None:
    held = graph.initializers.get(name)
    old = None if held is None else held.const_value
    if held is None or old is None or tuple(old.shape) != array.shape:
        raise BadInput(
            f"the adapter in {place!r} is that of another model: {name!r} is none of its weights {list(array.shape)}"
        )
    held.const_value = ir.tensor(array.astype(old.dtype.numpy()), name=name)


@dataclass
class StoredAdapter:
    """The adapter in a folder.

    Attributes:
        record: of the adapter.
        values: its tensors by the names in the record.
        header: metadata of the model that it carries.
        path: the file of the base, if the settings name one.
    """

    record: Record
    values: dict[str, np.ndarray]
    header: dict[str, str]
    path: str | None


def read_adapter(folder: Path, model: AnyModel | None) -> StoredAdapter:
    """Read the adapter of `folder`. A folder of PEFT needs its `model`.

    Raises:
        BadInput: the folder has no adapter, it is damaged, or it is that of another model.
    """
    tensors, header = load_tensors(folder / TENSORS_FILE)
    carried = {key: header[key] for key in _CARRIED if key in header}
    record, path = record_of(header), _settings(folder).get("base_model_name_or_path")
    path = path if isinstance(path, str) else None
    graph = None if model is None else open_model(model, standardize).model.graph
    base = None if graph is None else base_fingerprint(graph)
    if record is None and (graph is None or base is None):
        raise BadInput(f"the adapter in {str(folder)!r} is of PEFT, which does not say of which model: give the model")
    if record is not None and base not in (None, record.base):
        raise BadInput(f"the adapter in {str(folder)!r} is that of another model: it was trained beside other weights")
    if record is None:
        record, values = _of_peft(folder, tensors, not_none(graph), not_none(base))
    else:
        values = peft.read(record, tensors, str(folder))
    return StoredAdapter(record, values, carried, path)


def _of_peft(
    place: Path, tensors: dict[str, np.ndarray], graph: ir.Graph, base: str
) -> tuple[Record, dict[str, np.ndarray]]:
    """The adapter that PEFT has written, for the weights of `graph`."""
    return understood(_settings(place), tensors, weights(graph), set(graph.initializers), base, str(place))


def _settings(place: Path) -> dict[str, Any]:
    """The settings of PEFT in a folder."""
    file = place / CONFIG_FILE
    with open_ordinary(file) as opened:
        text = opened.read(_CONFIG_LIMIT)
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {str(file)!r}: {error}") from error
    return config
