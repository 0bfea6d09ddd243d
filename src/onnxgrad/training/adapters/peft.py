"""Adapters as PEFT has them: names by modules, factors with their axes exchanged, one JSON file of settings.

A linear layer has ``lora_A.weight`` [rank, in] and ``lora_B.weight`` [out, rank], an embedding ``lora_embedding_A``
[rank, rows] and ``lora_embedding_B`` [columns, rank], a convolution kernels as ONNX has them. What trains as a whole
goes by the name of its parameter.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.files import open_ordinary
from onnxgrad.training.adapters.record import Entry, Record
from onnxgrad.training.adapters.sites import CONV, EMBEDDING, LINEAR, Weight

_PREFIX = "base_model.model."
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise BadInput("adapters need the package safetensors: pip install 'onnxgrad[train]'") from error
    return safetensors


def save_tensors(tensors: Mapping[str, np.ndarray], file: Path, header: dict[str, str]) -> None:
    """Write a safetensors file."""
    arrays = {name: np.ascontiguousarray(a) for name, a in tensors.items()}
    _library().numpy.save_file(arrays, file, header)


def load_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file, and what its header says.

    Raises:
        BadInput: it cannot be read, holds other things than finite floats, or is damaged.
    """
    safetensors = _library()
    try:
        with open_ordinary(file) as opened:
            data = opened.read()
        held = safetensors.deserialize(data)
        with safetensors.safe_open(file, "np") as opened_again:
            header = dict(opened_again.metadata() or {})
    except OSError as error:
        raise BadInput(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise BadInput(f"{str(file)!r} is no safetensors file, or a damaged one: {error}") from error
    found = {}
    for name, about in held:
        if about["dtype"] not in _DTYPES:
            raise BadInput(f"{str(file)!r}: {name!r} is a tensor of {about['dtype']}; factors are floats")
        array = np.frombuffer(about["data"], _DTYPES[about["dtype"]]).reshape(about["shape"])
        if not np.isfinite(array.astype(np.float32)).all():
            raise BadInput(f"{str(file)!r}: {name!r} is not finite")
        found[name] = array
    return found, header


# --- out -------------------------------------------------------------------------------------------


def _keys(entry: Entry) -> tuple[str, str]:
    module = f"{_PREFIX}{entry.module}"
    if entry.kind == EMBEDDING:
        return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _turned(entry: Entry, array: np.ndarray) -> np.ndarray:
    """A factor as the other side has it; its own inverse."""
    return array if entry.kind == CONV else np.swapaxes(array, -1, -2)


def check_modules(record: Record) -> None:
    """Raise BadInput unless each adapted weight has a module of its own."""
    seen: dict[str, str] = {}
    for name, entry in record.weights.items():
        other = seen.setdefault(entry.module, name)
        if other != name:
            raise BadInput(f"{other!r} and {name!r} belong to one module, {entry.module!r}: PEFT has no names for both")


def written(record: Record, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of PEFT's file."""
    found: dict[str, np.ndarray] = {}
    for entry in record.weights.values():
        for key, name in zip(_keys(entry), (entry.a, entry.b)):
            found[key] = _turned(entry, values[name])
    return found | {f"{_PREFIX}{name}": values[name] for name in record.also}


def config(record: Record) -> dict[str, Any]:
    """PEFT's settings."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": record.rank,
        "lora_alpha": record.alpha,
        "lora_dropout": record.dropout,
        "use_rslora": record.rslora,
        "target_modules": sorted({e.module for e in record.weights.values()}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


# --- in --------------------------------------------------------------------------------------------


def read(record: Record, tensors: Mapping[str, np.ndarray], place: str) -> dict[str, np.ndarray]:
    """The values of an adapter that was written here, by the names of initializers."""
    wanted = {
        key: (name, entry) for entry in record.weights.values() for key, name in zip(_keys(entry), (entry.a, entry.b))
    }
    also = {f"{_PREFIX}{name}": name for name in record.also}
    for key in (wanted.keys() | also.keys()) ^ tensors.keys():
        raise BadInput(f"the adapter in {place!r} is damaged: {key!r} is {'unknown' if key in tensors else 'missing'}")
    for key in wanted:
        if tensors[key].ndim < 2:
            raise BadInput(f"the adapter in {place!r} is damaged: {key!r} has the shape {list(tensors[key].shape)}")
    found = {name: _turned(entry, tensors[key]) for key, (name, entry) in wanted.items()}
    return found | {name: tensors[key] for key, name in also.items()}


#: What decides that an adapter is of another kind than A·B, with the values that mean nothing.
_PLAIN = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
}


def understood(
    settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], weights: Mapping[str, Weight],
    held: Collection[str], base: str, place: str,
) -> tuple[Record, dict[str, np.ndarray]]:  # fmt: skip
    """The adapter that PEFT has written, for a model with these `weights` and initializers.

    Raises:
        BadInput: it is of another kind than LoRA, or of modules that the model does not have.
    """
    if settings.get("peft_type") != "LORA":
        raise BadInput(f"the adapter in {place!r} is a {settings.get('peft_type')!r}; only 'LORA' can be loaded")
    for key, plain in _PLAIN.items():
        if settings.get(key) not in plain:
            raise BadInput(f"the adapter in {place!r} has {key}={settings[key]!r}, which cannot be loaded")
    rank, alpha, dropout = (_number(settings, k, place) for k in ("r", "lora_alpha", "lora_dropout"))
    rslora = bool(settings.get("use_rslora"))
    record = Record(int(rank), alpha, dropout, rslora, base)
    values: dict[str, np.ndarray] = {}
    named = {w.module: w for w in weights.values()}
    pairs, others = _paired(tensors)
    for module, (a, b, kind) in pairs.items():
        weight = _module(module, named, place)
        if kind == LINEAR and weight.kind == CONV:
            kind = CONV
        if kind != weight.kind:
            raise BadInput(f"the adapter in {place!r} takes {module!r} for {kind}; in the model it is {weight.kind}")
        own_rank = a.shape[0] // weight.groups if kind == CONV else a.shape[0]
        strength = _patterned(settings.get("alpha_pattern"), module, alpha)
        scale = strength / (math.sqrt(own_rank) if rslora else own_rank)
        entry = Entry(
            f"{module}.A", f"{module}.B", kind, weight.module, scale, weight.transposed, weight.groups, weight.quantized
        )
        record.weights[weight.name] = entry
        values[entry.a], values[entry.b] = _turned(entry, a), _turned(entry, b)
    for key, array in others.items():
        name = key.removeprefix(_PREFIX).replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        if name not in held:
            raise BadInput(f"the adapter in {place!r} is that of another model: {UnknownName(name, held, 'weight')}")
        record.also.append(name)
        values[name] = array
    return record, values


def _number(settings: Mapping[str, Any], key: str, place: str) -> float:
    value = settings.get(key, 0 if key == "lora_dropout" else None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise BadInput(f"the adapter in {place!r} has {key}={value!r}, which is no number")
    return value


def _patterned(patterns: Any, module: str, usual: float) -> float:
    """What ``alpha_pattern`` has for `module`: by its name, or the end of it."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if isinstance(value, (int, float)) and (module == pattern or fnmatch.fnmatchcase(module, f"*.{pattern}")):
            return float(value)
    return usual


def _paired(
    tensors: Mapping[str, np.ndarray],
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray, str]], dict[str, np.ndarray]]:
    """A and B by module, with its kind; and all other tensors."""
    pairs, others = {}, dict(tensors)
    for ends, kind in (
        ((".lora_A.weight", ".lora_B.weight"), LINEAR),
        ((".lora_embedding_A", ".lora_embedding_B"), EMBEDDING),
    ):
        for key in _ending(tensors, ends[0]):
            other = key.removesuffix(ends[0]) + ends[1]
            a, b = others.pop(key), others.pop(other, None)
            if b is None or a.ndim < 2 or b.ndim < 2:
                raise BadInput(f"the adapter has no factor {other!r} that fits {key!r}")
            pairs[key.removesuffix(ends[0]).removeprefix(_PREFIX)] = (a, b, kind)
    return pairs, others


def _ending(names: Iterable[str], end: str) -> list[str]:
    return [name for name in names if name.endswith(end)]


def _module(name: str, named: Mapping[str, Weight], place: str) -> Weight:
    """The weight of the module that PEFT calls `name`; what was exported may be a part of what PEFT had, or hold it."""
    if name in named:
        return named[name]
    found = [m for m in named if m.endswith(f".{name}") or name.endswith(f".{m}")]
    if len(found) != 1:
        known = UnknownName(name, named, "module")
        raise BadInput(f"the adapter in {place!r} is that of another model: {known}")
    return named[found[0]]
