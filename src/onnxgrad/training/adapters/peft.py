"""Adapters as PEFT has them: names by modules, factors with their axes exchanged, one JSON file of settings.

| tensor of a module | shape |
|---|---|
| ``lora_A.weight``, ``lora_B.weight`` of a linear layer | [rank, in], [out, rank] |
| ``lora_embedding_A``, ``lora_embedding_B`` | [rank, rows], [columns, rank] |
| ``lora_A.weight``, ``lora_B.weight`` of a convolution | as ONNX has them; A reads all groups |
| ``lora_magnitude_vector`` (DoRA) | [out], of a convolution [1, out, 1, …] |
| ``hada_…``, ``lokr_…``, ``ia3_l`` | as in the model |
| ``vera_lambda_d``, ``vera_lambda_b``; once ``vera_A``, ``vera_B`` | [rank], [out]; [rank, most in], [most out, rank] |

PEFT has one pair of factors per module. The factors of parts are blocks of it: A one above the other, B with zeros
elsewhere; the rank of the module is the sum. The lengths of other outputs are those of the weight. Weights that train
as a whole are stored under the names of their parameters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.adapters.forms import DORA, IA_3, LORA, NAMES, TENSORS, VERA
from onnxgrad.training.adapters.record import Entry, Record
from onnxgrad.training.adapters.sites import CONV, EMBEDDING, LINEAR, Weight

PREFIX = "base_model.model."
_SHARED = {"A": "base_model.vera_A", "B": "base_model.vera_B"}
#: PEFT's name of a tensor, by its letter.
ENDS = {
    "A": "lora_A.weight",
    "B": "lora_B.weight",
    "m": "lora_magnitude_vector",
    "d": "vera_lambda_d",
    "b": "vera_lambda_b",
    **{name: name for name in NAMES},
}
EMBEDDING_ENDS = ENDS | {"A": "lora_embedding_A", "B": "lora_embedding_B"}


def by_module(record: Record) -> dict[str, list[Entry]]:
    """The entries of each module.

    Raises:
        BadInput: several weights belong to one.
    """
    found: dict[str, list[Entry]] = {}
    for entry in record.entries:
        others = found.setdefault(entry.module, [])
        if others and others[0].weight != entry.weight:
            raise BadInput(
                f"{others[0].weight!r} and {entry.weight!r} belong to one module, {entry.module!r}: PEFT has no names "
                "for both"
            )
        others.append(entry)
    return found


def _keys(entry: Entry) -> dict[str, str]:
    """The names of the tensors of an entry's module, by letter."""
    ends = EMBEDDING_ENDS if entry.kind == EMBEDDING else ENDS
    return {letter: f"{PREFIX}{entry.module}.{ends[letter]}" for letter in entry.tensors}


# --- out -------------------------------------------------------------------------------------------


def written(record: Record, values: Mapping[str, np.ndarray], whole: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of PEFT's file.

    Args:
        record: of the adapter.
        values: by the names of initializers.
        whole: with DoRA, the lengths of a module's weight without its adapter.
    """
    found: dict[str, np.ndarray] = {}
    for module, entries in by_module(record).items():
        for letter, key in _keys(entries[0]).items():
            found[key] = _peft_tensor(letter, entries, values, whole.get(module))
    found |= {_SHARED[letter]: np.swapaxes(values[name], 0, 1) for letter, name in record.shared.items()}
    return found | {
        key: values[name].T if name in record.turned else values[name] for key, name in _also(record).items()
    }


def _also(record: Record) -> dict[str, str]:
    """The names of tensors that train as a whole, by their names in PEFT's file.

    PEFT wraps an adapted module, whose own parameters are then those of ``base_layer``.
    """
    adapted = {entry.module for entry in record.entries}
    found = {}
    for name in record.also:
        module, dot, parameter = record.renamed.get(name, name).rpartition(".")
        found[f"{PREFIX}{module}{'.base_layer' if module in adapted else ''}{dot}{parameter}"] = name
    return found


def name_parameters(record: Record, found: Mapping[str, Weight], held: Collection[str]) -> None:
    """Note in `record` which parameters of the exported model train as a whole under names of the exporter.

    Args:
        record: of the adapter.
        found: the weights of the model.
        held: the names of its initializers.
    """
    named = {n: f"{found[n].module}.weight" for n in record.also if n in found and found[n].module != n}
    named = {n: parameter for n, parameter in named.items() if parameter not in held}
    record.renamed = {n: p for n, p in named.items() if list(named.values()).count(p) == 1}
    record.turned = [
        n for n in record.renamed if found[n].kind == LINEAR and len(found[n].shape) == 2 and not found[n].transposed
    ]
    unknown = [n for n in record.also if n not in record.renamed and "::" in n]
    if unknown:
        warnings.warn(
            f"PEFT will not find {', '.join(map(repr, unknown))}: the exporter renamed it, and the model does not say "
            "which module it belongs to; load_adapter finds it",
            stacklevel=2,
        )


def _peft_tensor(
    letter: str, entries: Sequence[Entry], values: Mapping[str, np.ndarray], whole: np.ndarray | None
) -> np.ndarray:
    """One tensor of a module as PEFT has it."""
    entry, arrays = entries[0], [values[e.tensors[letter]] for e in entries]
    kernel = entry.kind == CONV
    if letter == "m":
        assert whole is not None
        found = whole.astype(arrays[0].dtype).reshape(-1)
        for e, array in zip(entries, arrays):
            found[e.part.columns(found.size) if e.part is not None else slice(None)] = array
        return found.reshape(1, -1, *(1 for _ in values[entry.tensors["A"]].shape[2:])) if kernel else found
    if letter not in ("A", "B"):
        return arrays[0]
    if letter == "B":
        arrays = [_fill_outputs(e, a) for e, a in zip(entries, arrays)]
    if kernel:
        whole = np.concatenate(arrays, 0 if letter == "A" else 1)
        return whole if letter == "B" else over_groups(whole, entry.groups)
    return np.swapaxes(np.concatenate(arrays, -1 if letter == "A" else -2), -1, -2)


def _fill_outputs(entry: Entry, b: np.ndarray) -> np.ndarray:
    """B of a part, with zeros for other outputs."""
    part, axis = entry.part, 0 if entry.kind == CONV else -1
    if part is None:
        return b
    return part.spread(b, axis, b.shape[axis] // (part.stop - part.start) * part.every)


def over_groups(a: np.ndarray, groups: int) -> np.ndarray:
    """A of a convolution with groups as a convolution over all channels: zeros where it reads those of other groups."""
    if groups == 1:
        return a
    rank, channels = len(a) // groups, a.shape[1]
    found = np.zeros((len(a), groups * channels, *a.shape[2:]), a.dtype)
    for g in range(groups):
        found[g * rank : (g + 1) * rank, g * channels : (g + 1) * channels] = a[g * rank : (g + 1) * rank]
    return found


def within_groups(a: np.ndarray, groups: int) -> np.ndarray:
    """The inverse. Raises ValueError if it reads channels of other groups, IndexError if it is no kernel."""
    rank, channels = len(a) // groups, a.shape[1] // groups
    found = np.concatenate([a[g * rank : (g + 1) * rank, g * channels : (g + 1) * channels] for g in range(groups)])
    if not np.array_equal(over_groups(found, groups), a):
        raise ValueError("it reads channels of other groups")
    return found


def config(record: Record, tensors: Mapping[str, np.ndarray], base: str | None = None) -> dict[str, Any]:
    """PEFT's settings for these `tensors` of its file and the model in the file `base`."""
    modules = by_module(record)
    kind = "LORA" if record.form in (LORA, DORA) else record.form.upper()
    found: dict[str, Any] = {
        "peft_type": kind,
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": sorted(modules),
        "modules_to_save": None,
    }
    if record.form == IA_3:
        inner = sorted(m for m, entries in modules.items() if entries[0].feedforward)
        return found | {"feedforward_modules": inner, "fan_in_fan_out": False}
    found |= {"r": record.rank}
    if record.form in TENSORS:
        ranks = {m: entries[0].rank or record.rank for m, entries in modules.items()}
    elif record.form == VERA:
        own = {"projection_prng_key": record.seed, "save_projection": True, "vera_dropout": record.dropout}
        return found | {"bias": "none", "fan_in_fan_out": False} | own
    else:
        ranks = {m: len(tensors[_keys(entries[0])["A"]]) for m, entries in modules.items()}
    alphas = {
        m: entries[0].scale * (math.sqrt(r) if record.rslora else r)
        for (m, entries), r in zip(modules.items(), ranks.values())
    }
    other_ranks = {m for m, rank in ranks.items() if rank != record.rank}
    other_alphas = {m for m, alpha in alphas.items() if not math.isclose(alpha, record.alpha, rel_tol=1e-9)}
    found |= {"rank_pattern": _patterns(ranks, other_ranks), "alpha_pattern": _patterns(alphas, other_alphas)}
    if record.form in TENSORS:
        apart = any("_t" in letter for e in record.entries for letter in e.tensors)
        return (
            found
            | {"alpha": record.alpha, "use_effective_conv2d": apart}
            | {key: bool(value) if key == "decompose_both" else value for key, value in record.options.items()}
        )
    return found | {
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_alpha": record.alpha,
        "lora_dropout": record.dropout,
        "use_rslora": record.rslora,
        "use_dora": record.form == DORA,
        "init_lora_weights": True,
    }


def _patterns(values: Mapping[str, float], other: Collection[str]) -> dict[str, float]:
    """The values of the modules `other`, longest names first: PEFT takes the first pattern that ends a name."""
    shadowed = {m for m in values for end in other if m.endswith(f".{end}")}
    return {m: values[m] for m in sorted({*other, *shadowed}, key=lambda m: (-len(m), m))}


# --- in --------------------------------------------------------------------------------------------


def read(record: Record, tensors: Mapping[str, np.ndarray], place: str) -> dict[str, np.ndarray]:
    """The values of an adapter that was written here, by the names of initializers.

    Raises:
        BadInput: what the file holds is not what the record says.
    """
    modules = [(entries, _keys(entries[0])) for entries in by_module(record).values()]
    also = _also(record)
    shared = {_SHARED[letter]: name for letter, name in record.shared.items()}
    wanted = {key for _, keys in modules for key in keys.values()} | also.keys() | shared.keys()
    for key in wanted ^ tensors.keys():
        raise BadInput(f"the adapter in {place!r} is damaged: {key!r} is {'unknown' if key in tensors else 'missing'}")
    found = {name: tensors[key].T if name in record.turned else tensors[key] for key, name in also.items()}
    for key, name in shared.items():
        found[name] = np.swapaxes(tensors[key], 0, 1) if tensors[key].ndim == 2 else tensors[key]
    for entries, keys in modules:
        for letter, key in keys.items():
            try:
                found |= {e.tensors[letter]: a for e, a in zip(entries, _here(letter, entries, tensors[key]))}
                fits = np.array_equal(_peft_tensor(letter, entries, found, tensors[key]), tensors[key])
            except (ValueError, IndexError):
                fits = False
            if not fits:
                what = " and ".join(e.weight + e.label for e in entries)
                raise BadInput(
                    f"the adapter in {place!r} is damaged: {key!r} of {list(tensors[key].shape)} is not of {what}"
                )
    return found


def _here(letter: str, entries: Sequence[Entry], array: np.ndarray) -> list[np.ndarray]:
    """The tensor of each entry of a module, from PEFT's. Raises ValueError or IndexError if the shape does not fit."""
    kernel = entries[0].kind == CONV
    if letter in NAMES:
        return [array]
    if letter not in ("A", "B"):
        flat = array.reshape(-1)
        return [flat if e.part is None else flat[e.part.columns(flat.size)] for e in entries]
    if letter == "A":
        array = within_groups(array, entries[0].groups) if kernel else np.swapaxes(array, -1, -2)
        return np.split(array, len(entries), 0 if kernel else -1)
    blocks = np.split(array if kernel else np.swapaxes(array, -1, -2), len(entries), 1 if kernel else -2)
    axis = 0 if kernel else -1
    return [b if e.part is None else np.take(b, e.part.columns(b.shape[axis]), axis) for e, b in zip(entries, blocks)]
