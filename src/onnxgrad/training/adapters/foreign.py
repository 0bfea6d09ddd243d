"""Read adapters written by PEFT (LoRA, DoRA, VeRA, LoHa, LoKr, (IA)³), by its settings and names of modules."""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training.adapters.config import INITIAL
from onnxgrad.training.adapters.forms import DORA, IA_3, NAMES, TENSORS, VERA
from onnxgrad.training.adapters.insert import FIXED
from onnxgrad.training.adapters.peft import EMBEDDING_ENDS, ENDS, PREFIX, within_groups
from onnxgrad.training.adapters.record import LETTERS, Entry, Record
from onnxgrad.training.adapters.sites import CONV, LINEAR, Weight
from onnxgrad.training.adapters.values import initial_factors, projections

#: Settings that make an adapter another kind, with their neutral values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_bdlora": (False, None),
}
#: Settings that are read here, or concern the training or storage of an adapter, not its function.
_KNOWN = frozenset((
    *_PLAIN,
    *("alpha", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "d_initial"),
    *("ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("init_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout"),
    *("lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version"),
    *("decompose_both", "decompose_factor", "feedforward_modules", "init_ia3_weights", "module_dropout"),
    *("rank_dropout", "rank_dropout_scale", "use_effective_conv2d"),
    *("projection_prng_key", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "save_projection"),
    *("target_modules", "task_type", "use_dora", "use_rslora", "vera_dropout"),
))  # fmt: skip
#: First values of factors beside which the weights stay as they are; PiSSA and OLoRA change
#: them by what is computed here again; others (CorDA, LoftQ, PiSSA by random numbers) by what is not in the file.
_BESIDE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_KINDS = ("LORA", "VERA", "LOHA", "LOKR", "IA3")
#: A pattern of modules that is matched in little time: no repeated groups, and few repetitions.
_LONGEST_PATTERN, _MOST_REPETITIONS = 200, 4


def understood(
    settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], weights: Mapping[str, Weight],
    held: Collection[str], base: str, place: str,
) -> tuple[Record, dict[str, np.ndarray]]:  # fmt: skip
    """The adapter that PEFT has written, for a model with these `weights` and initializers.

    Returns:
        What it is, and its tensors by the names that are told.

    Raises:
        BadInput: it is of another kind than LoRA, DoRA or VeRA, or of modules that the model does not have.
    """
    initial = _check_settings(settings, place)
    record = _record(settings, base, place)
    values: dict[str, np.ndarray] = {}
    named = {w.module: w for w in weights.values()}
    modules, others = _sorted(tensors)
    for module, given in modules.items():
        weight = _module(module, named, place)
        entry = _entry(module, given, weight, record, settings, place)
        if initial in INITIAL:
            first = _first(entry, weight, len(given["A"]), initial, place)
            values |= {f"{module}.{letter}": array for letter, array in first.items()}
            entry = replace(entry, fixed={letter: f"{module}.{letter}" for letter in first})
        record.entries.append(entry)
        values |= {
            f"{module}.{letter}": array for letter, array in _to_model_layout(given, weight, module, place).items()
        }
    if record.form == VERA:
        ends = [weights[e.weight].ends for e in record.entries]
        values |= _projections(others, ends, record, place)
        record.shared = {"A": "A", "B": "B"}
    whole = _whole_weights(others, named, held, place)
    record.also += whole
    return record, values | whole


def _check_settings(settings: Mapping[str, Any], place: str) -> Any:
    """The first values of factors that `settings` name. Raises BadInput for an adapter that cannot be loaded."""
    kind = settings.get("peft_type")
    if kind not in _KINDS:
        raise BadInput(f"the adapter in {place!r} is a {kind!r}; only {', '.join(map(repr, _KINDS))} can be loaded")
    for key, plain in _PLAIN.items():
        if settings.get(key) not in plain:
            raise BadInput(f"the adapter in {place!r} has {key}={settings[key]!r}, which cannot be loaded")
    unknown = [key for key, value in settings.items() if value and key not in _KNOWN]
    if unknown:
        warnings.warn(
            f"the adapter in {place!r} has {unknown[0]}={settings[unknown[0]]!r}, a setting of PEFT that is not known "
            "here: compare the outputs with those of PEFT",
            stacklevel=3,
        )
    initial = settings.get("init_lora_weights")
    initial = initial.lower() if isinstance(initial, str) else initial
    if initial not in (*_BESIDE, *INITIAL):
        raise BadInput(
            f"the adapter in {place!r} has init_lora_weights={initial!r}, by which PEFT changes the weights beside it\n"
            "  hint: save it from PEFT as plain LoRA: model.save_pretrained(folder, "
            "path_initial_model_for_weight_conversion=the folder of the adapter before training)"
        )
    return initial


def _record(settings: Mapping[str, Any], base: str, place: str) -> Record:
    """The record of an adapter with these `settings`, without its entries."""
    form = DORA if settings.get("use_dora") else settings["peft_type"].lower()
    rank = 1 if form == IA_3 else _rank(settings.get("r"), "r", place)
    if form in TENSORS:
        alpha = 1.0 if form == IA_3 else _number(settings, "alpha", place)
        chosen = {k: settings.get(k) for k in ("decompose_both", "decompose_factor")}
        options = {k: int(v) for k, v in chosen.items() if isinstance(v, int)}
        return Record(form, rank, alpha, 0.0, False, base, options=options)
    if form == VERA:
        seed = int(_number(settings, "projection_prng_key", place))
        return Record(form, rank, 1.0, _dropout(settings, "vera_dropout", place), False, base, seed=seed)
    alpha, dropout = _number(settings, "lora_alpha", place), _dropout(settings, "lora_dropout", place)
    return Record(form, rank, alpha, dropout, bool(settings.get("use_rslora")), base)


def _whole_weights(
    tensors: Mapping[str, np.ndarray], named: Mapping[str, Weight], held: Collection[str], place: str
) -> dict[str, np.ndarray]:
    """The weights that train as a whole, by the names of initializers. Raises BadInput for those of another model."""
    found = {}
    for key, array in tensors.items():
        name = key.removeprefix(PREFIX).replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        renamed = named.get(name.removesuffix(".weight")) if name not in held and name.endswith(".weight") else None
        if renamed is not None:  # the exporter has transposed a matrix and given it another name
            name = renamed.name
            array = array.T if renamed.kind == LINEAR and array.ndim == 2 and not renamed.transposed else array
        if name not in held:
            raise BadInput(f"the adapter in {place!r} is that of another model: {UnknownName(name, held, 'weight')}")
        found[name] = array
    return found


def _first(entry: Entry, weight: Weight, rank: int, initial: str, place: str) -> dict[str, np.ndarray]:
    """The constants that take off the first factors, which PEFT has taken out of the weight."""
    if weight.kind != LINEAR or weight.quantized or len(weight.shape) > 2:
        raise BadInput(
            f"the adapter in {place!r} has init_lora_weights={initial!r}; {weight.name!r} is no matrix of floats"
        )
    found = initial_factors(weight, None, initial, rank, entry.scale)
    return {letter: found[letter] for letter in FIXED}


def _entry(
    module: str, given: Mapping[str, np.ndarray], weight: Weight, record: Record, settings: Mapping[str, Any],
    place: str,
) -> Entry:  # fmt: skip
    sets = [*LETTERS[record.form]]
    for letter in sorted(given.keys() ^ sets[0]) if given.keys() not in sets else ():
        end = ENDS[letter]
        state = "a tensor of another kind" if letter in given else "no tensor"
        raise BadInput(f"the adapter in {place!r} has {state} {module}.{end}")
    scale, own_rank, feedforward = 1.0, 0, False
    if record.form == IA_3:
        feedforward = _is_listed(settings.get("feedforward_modules"), module, place)
    elif record.form in TENSORS:
        own_rank = _rank(_patterned(settings, "rank_pattern", module, record.rank, place), "rank_pattern", place)
        scale = _patterned(settings, "alpha_pattern", module, record.alpha, place) / own_rank
    elif record.form == VERA and given["d"].shape != (record.rank,):
        raise BadInput(
            f"the adapter in {place!r} has r={record.rank} and {list(given['d'].shape)} numbers for {module!r}"
        )
    elif record.form != VERA:
        if min(given["A"].ndim, given["B"].ndim) < 2:
            raise BadInput(f"the adapter in {place!r} has factors of {module!r} that are no matrices")
        own_rank = len(given["A"])
        rank = _rank(_patterned(settings, "rank_pattern", module, record.rank, place), "rank_pattern", place)
        if own_rank != rank:
            raise BadInput(
                f"the adapter in {place!r} has rank {rank} for {module!r} in its settings, {own_rank} in its file"
            )
        strength = _patterned(settings, "alpha_pattern", module, record.alpha, place)
        scale, own_rank = strength / (math.sqrt(own_rank) if record.rslora else own_rank), 0
    return Entry(
        weight.name, {letter: f"{module}.{letter}" for letter in ENDS if letter in given}, weight.kind, weight.module,
        scale, weight.transposed, weight.groups, weight.quantized, rank=own_rank, feedforward=feedforward,
    )  # fmt: skip


def _to_model_layout(given: Mapping[str, np.ndarray], weight: Weight, module: str, place: str) -> dict[str, np.ndarray]:
    """The tensors of a module in the layout of the model."""
    found = {}
    for letter, array in given.items():
        if letter in NAMES:
            found[letter] = array
        elif letter not in ("A", "B"):
            found[letter] = array.reshape(-1)
        elif weight.kind != CONV:
            found[letter] = np.swapaxes(array, -1, -2)
        elif letter == "B":
            found[letter] = array
        else:
            try:
                found[letter] = within_groups(array, weight.groups)
            except (ValueError, IndexError) as error:
                raise BadInput(
                    f"the adapter in {place!r} reads all channels beside {module!r}, a convolution with "
                    f"{weight.groups} groups, where an adapter reads those of its group: it cannot be loaded"
                ) from error
    return found


def _projections(
    others: dict[str, np.ndarray], ends: list[tuple[int, int]], record: Record, place: str
) -> dict[str, np.ndarray]:
    """A and B of VeRA: from the file, or else drawn from its seed."""
    found = {letter: others.pop(f"base_model.vera_{letter}", None) for letter in "AB"}
    if all(a is None for a in found.values()):
        return projections(ends, record.rank, record.seed)
    arrays = {letter: np.swapaxes(a, 0, 1) for letter, a in found.items() if a is not None and a.ndim == 2}
    if len(arrays) < 2:
        raise BadInput(f"the adapter in {place!r} is damaged: of vera_A and vera_B, one is missing or no matrix")
    return arrays


def _number(settings: Mapping[str, Any], key: str, place: str) -> float:
    value = settings.get(key, 0 if key.endswith(("dropout", "key")) else None)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise BadInput(f"the adapter in {place!r} has {key}={value!r}, which is no number")
    return value


def _rank(value: Any, key: str, place: str) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value != value // 1
        or not 1 <= value < 1 << 31
    ):
        raise BadInput(f"the adapter in {place!r} has {key}={value!r}, which is no rank")
    return int(value)


def _dropout(settings: Mapping[str, Any], key: str, place: str) -> float:
    value = _number(settings, key, place)
    if value >= 1:
        raise BadInput(f"the adapter in {place!r} has {key}={value!r}, which is no share in [0, 1)")
    return value


def _patterned(settings: Mapping[str, Any], key: str, module: str, usual: float, place: str) -> float:
    """The entry of ``alpha_pattern`` or ``rank_pattern`` for `module`: its name, or a pattern for its end."""
    patterns = settings.get(key) or {}
    if not isinstance(patterns, dict):
        raise BadInput(f"the adapter in {place!r} has {key}={patterns!r}, which is no table")
    for pattern in patterns:
        if pattern == module or module.endswith(f".{pattern}") or _matches(pattern, module, key, place):
            return _number(patterns, pattern, place)
    return usual


def _is_listed(patterns: Any, module: str, place: str) -> bool:
    """True if PEFT counts `module` among these: the ends of names, or a pattern for the whole name."""
    if isinstance(patterns, str):
        return _matches(patterns, module, "feedforward_modules", place)
    return any(isinstance(p, str) and module.endswith(p) for p in patterns or ())


def _matches(pattern: str, module: str, key: str, place: str) -> bool:
    if re.fullmatch(r"[\w.]*", pattern):
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    repeated = re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > _MOST_REPETITIONS
    try:
        if repeated or len(pattern) > _LONGEST_PATTERN:
            raise ValueError("it is too long, or repeats too much")
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except (ValueError, re.error) as error:
        raise BadInput(
            f"the adapter in {place!r} has a pattern {pattern[:40]!r} in {key} that is not matched: {error}"
        ) from error


def _sorted(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Sort tensors into those of modules, by letter, and all others."""
    modules: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    others = {}
    ends = {f".{end}": letter for table in (ENDS, EMBEDDING_ENDS) for letter, end in table.items()}
    for key, array in tensors.items():
        end = next((e for e in ends if key.endswith(e)), None)
        if end is None:
            others[key] = array
        else:
            modules[key.removesuffix(end).removeprefix(PREFIX)][ends[end]] = array
    return dict(modules), others


def _module(name: str, named: Mapping[str, Weight], place: str) -> Weight:
    """The weight of the module that PEFT calls `name`; the export may have split or merged modules."""
    if name in named:
        return named[name]
    found = [m for m in named if m.endswith(f".{name}") or name.endswith(f".{m}")]
    if len(found) != 1:
        known = UnknownName(name, named, "module")
        raise BadInput(f"the adapter in {place!r} is that of another model: {known}")
    return named[found[0]]
