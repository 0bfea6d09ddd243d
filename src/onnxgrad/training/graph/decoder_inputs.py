"""The inputs of a language model: tokens, masks, positions, and keys and values of earlier tokens (the cache).

Exporters agree on names and shapes, so these tell what an input is for:

| input | shape | fed |
|---|---|---|
| ``input_ids``, or the only other integers | [N, T] | tokens |
| with ``mask`` in its name | [N, P + T] | ones, zeros for padding |
| | [N, 1, T, P + T] | the same for each pair of tokens, and zeros for later ones; of floats 0 and the lowest number |
| ``position_ids`` | [N, T] or [T] | places, counted over the tokens that the mask shows |
| ``cache_position`` | [T] | P, …, P + T − 1 |
| with ``type`` in its name | [N, T] | zeros |
| ``past_key_values.*`` | [N, heads, P, size] | the cache: outputs ``present.*`` of the run before, empty at first |
| ``use_cache_branch`` | [1] | whether there is a cache, for an export with both branches in an If |
| ``logits_to_keep`` | [] | 0: scores of all tokens |

P tokens are in the cache, T are new. A cache of cross-attention (``.encoder.`` in its name) has the length of the
encoder's states, and is written by the first run only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import required_inputs
from onnxgrad.ir.match import holds_floats

#: The part of a name that marks a value as a part of the cache: of an input, and of an output.
_PAST, _PRESENT = "past_key_values|past", "present_key_values|presents|present|past_key_values|new_past"
_IS_PAST = re.compile(rf"(^|[./_])({_PAST})([._\d]|$)")
_IS_PRESENT = re.compile(rf"(^|[./_])({_PRESENT})([._\d]|$)")
#: Parts of names of dimensions that grow with the tokens.
_LENGTH = re.compile("past|seq|len|cache|time|total", re.IGNORECASE)
#: Roles that the text of an encoder has, too.
_OF_TEXT = ("ids", "masks", "positions", "types")


@dataclass(frozen=True)
class Past:
    """One tensor of the cache.

    Attributes:
        input, output: the names of the input that takes it, and of the output with its next value.
        dtype: of its elements.
        shape: its sizes; None for the batch and the length.
        axis: that of the length.
        is_cross: it belongs to the states of an encoder.
    """

    input: str
    output: str
    dtype: np.dtype
    shape: tuple[int | None, ...]
    axis: int
    is_cross: bool

    def empty(self, rows: int) -> np.ndarray:
        """The cache without tokens."""
        shape = [rows if size is None else size for size in self.shape]
        shape[self.axis] = 0
        return np.zeros(shape, self.dtype)


@dataclass(frozen=True)
class DecoderInputs:
    """The inputs of a language model by their roles.

    Attributes:
        ids: the input of tokens.
        masks, positions, places, types, keep: names of other inputs, with their values: see the table of the module.
        branch: the input that says whether there is a cache.
        pasts: the cache.
        others: inputs without a role here, such as the states of an encoder; also the text of the encoder, where the
            file has both parts (``decoder_input_ids``).
        logits: the output of scores.
    """

    ids: ir.Value
    logits: ir.Value
    masks: tuple[ir.Value, ...] = ()
    positions: tuple[ir.Value, ...] = ()
    places: tuple[ir.Value, ...] = ()
    types: tuple[ir.Value, ...] = ()
    keep: tuple[ir.Value, ...] = ()
    branch: tuple[ir.Value, ...] = ()
    pasts: tuple[Past, ...] = ()
    others: tuple[ir.Value, ...] = ()

    @classmethod
    def of(cls, model: ir.Model) -> DecoderInputs:
        """The inputs of `model`.

        Raises:
            BadInput: no input takes tokens, no output has scores [N, T, V], or an input has a shape that no cache has.
        """
        roles: dict[str, list[ir.Value]] = {}
        pasts, tokens = [], []
        inputs = required_inputs(model.graph)
        has_encoder = any(is_of_decoder(v.name) and _role(v) == "ids" for v in inputs)
        for value in inputs:
            role = _role(value)
            if has_encoder and role in _OF_TEXT and not is_of_decoder(value.name):
                role = "others"
            if role == "ids":
                tokens.append(value)
            elif role == "pasts":
                pasts.append(value)
            else:
                roles.setdefault(role, []).append(value)
        ids = next((v for v in tokens if v.name == "input_ids"), None) or next(
            (v for v in tokens if "ids" in (v.name or "").lower()), tokens[0] if tokens else None
        )
        if ids is None:
            held = ", ".join(f"{v.name!r}" for v in model.graph.inputs)
            raise BadInput(f"no input takes tokens, whole numbers [N, T]; the model takes {held}")
        others = [*roles.pop("others", []), *(v for v in tokens if v is not ids)]
        caches = _caches(model, pasts)
        written = {p.output for p in caches}
        scores = [v for v in model.graph.outputs if v.name not in written and _is_scores(v)]
        if not scores:
            raise BadInput("no output has scores of tokens, floats [N, T, V]: this is no language model")
        logits = next((v for v in scores if v.name == "logits"), scores[0])
        return cls(ids, logits, pasts=caches, others=tuple(others), **{n: tuple(v) for n, v in roles.items()})

    @property
    def extra(self) -> list[str]:
        """The names of all inputs that follow from the tokens."""
        listed = (*self.masks, *self.positions, *self.places, *self.types, *self.keep, *self.branch)
        return [*(v.name or "" for v in listed), *(p.input for p in self.pasts)]

    @property
    def has_encoder(self) -> bool:
        """True if the file has an encoder, too."""
        return is_of_decoder(self.ids.name)

    def feeds(
        self,
        ids: np.ndarray,
        mask: np.ndarray | None = None,
        cache: Mapping[str, np.ndarray] | None = None,
        before: int = 0,
    ) -> dict[str, np.ndarray]:
        """Arrays for all inputs of known roles.

        Args:
            ids: new tokens [N, T].
            mask: 1 for tokens and 0 for padding [N, P + T]. Default: ones.
            cache: the cache by the names of inputs. Default: the empty one.
            before: P, the number of tokens in the cache.
        """
        rows, new = ids.shape
        if mask is None:
            mask = np.ones((rows, before + new), np.int64)
        found = {self.ids.name or "": ids.astype(_dtype(self.ids))}
        counted = np.maximum(mask.cumsum(1) - 1, 0)[:, before:]
        for value in self.masks:
            found[value.name or ""] = _mask(value, mask, before)
        for value in self.positions:
            array = counted[0] if value.shape is not None and len(value.shape) == 1 else counted
            found[value.name or ""] = array.astype(_dtype(value))
        for value in self.places:
            found[value.name or ""] = np.arange(before, before + new, dtype=_dtype(value))
        for value in self.types:
            found[value.name or ""] = np.zeros(ids.shape, _dtype(value))
        for value in self.keep:
            found[value.name or ""] = np.zeros([1] * len(value.shape or ()), _dtype(value))
        for value in self.branch:
            found[value.name or ""] = np.full([1] * len(value.shape or (0,)), before > 0, _dtype(value))
        cache = cache or {}
        return found | {p.input: cache[p.input] if p.input in cache else p.empty(rows) for p in self.pasts}

    def next_cache(
        self, outputs: Mapping[str, np.ndarray], cache: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """The cache after a run with these `outputs`, and with `cache` before it."""
        cache = cache or {}
        return {p.input: cache[p.input] if p.is_cross and p.input in cache else outputs[p.output] for p in self.pasts}


def is_of_decoder(name: str | None) -> bool:
    """True if an input of this name belongs to the decoder of a file that has both parts."""
    return "decoder" in (name or "").lower()


def role_of(name: str, rank: int | None, is_whole: bool, is_float: bool) -> str:
    """The role of an input, by the attribute of `DecoderInputs`, from its name, number of axes and type."""
    name = name.lower()
    if "use_cache" in name:
        return "branch"
    if "logits_to_keep" in name:
        return "keep"
    if "mask" in name:
        return "masks"
    if name == "cache_position":
        return "places"
    if is_float and (rank is None or rank > 2) and (_IS_PAST.search(name) or "cache" in name):
        return "pasts"
    if "position" in name and is_whole:
        return "positions"
    if not is_whole or rank != 2:
        return "others"
    if "type" in name or "segment" in name:
        return "types"
    return "others" if any(part in name for part in ("past", "cache", "length")) else "ids"


def _role(value: ir.Value) -> str:
    """The role of an input of a decoder.

    Raises:
        BadInput: a mask or positions have a shape that is not supported.
    """
    name, rank = (value.name or "").lower(), None if value.shape is None else len(value.shape)
    is_whole, is_float = (
        value.dtype is not None and test(value.dtype)
        for test in (ir.DataType.is_integer, ir.DataType.is_floating_point)
    )
    role = role_of(name, rank, is_whole, is_float)
    if role not in ("branch", "keep", "pasts") and "encoder" in name and "decoder" not in name:
        return "others"
    if role == "masks" and (rank is None or not 2 <= rank <= 4):
        raise BadInput(f"the mask {value.name!r} is not of shape [N, T], one number for each token")
    if role == "positions" and (rank is None or rank > 2):
        raise BadInput(f"the positions {value.name!r} are not of shape [N, T]")
    return role


def _mask(value: ir.Value, mask: np.ndarray, before: int) -> np.ndarray:
    """`mask` [N, P + T] as the input `value` takes it."""
    dtype, rank = _dtype(value), len(value.shape or ())
    if rank == 2:
        return mask.astype(dtype)
    pairs = np.repeat(mask[:, None].astype(bool), mask.shape[1] - before, 1)
    return mask_of_pairs(pairs, True, rank, dtype)


def mask_of_pairs(pairs: np.ndarray, causal: bool, rank: int, dtype: np.dtype) -> np.ndarray:
    """The mask [N, …, T, P + T] of `pairs` [N, T, P + T], true where T attends; if `causal`, not to later tokens."""
    rows, new, total = pairs.shape
    pairs = np.tril(pairs, total - new) if causal else pairs
    pairs = pairs | np.eye(new, total, total - new, bool)  # padding, too: a softmax of nothing is no number
    pairs = pairs.reshape(rows, *[1] * (rank - 3), new, total)
    if not ir.DataType.from_numpy(dtype).is_floating_point():
        return pairs.astype(dtype)
    return np.where(pairs, 0, ml_dtypes.finfo(dtype).min).astype(dtype)


def _is_scores(value: ir.Value) -> bool:
    return holds_floats(value) and (value.name == "logits" or (value.shape is not None and len(value.shape) == 3))


def _dtype(value: ir.Value) -> np.dtype:
    assert value.dtype is not None  # a role is of a type
    return value.dtype.numpy()


def _caches(model: ir.Model, pasts: list[ir.Value]) -> tuple[Past, ...]:
    """The tensors of the cache, each with the output that is its next value: of a like name, or in the same order."""
    floats = [v for v in model.graph.outputs if holds_floats(v)]
    named = {_part(v.name or "", _IS_PRESENT): v for v in floats if _IS_PRESENT.search((v.name or "").lower())}
    alike = [v for v in floats if v.shape is not None and pasts and len(v.shape) == len(pasts[0].shape or ())]
    in_order = dict(zip(pasts, alike)) if len(alike) == len(pasts) else {}
    found = []
    for value in pasts:
        past = _past(value)
        output = named.get(_part(past.input, _IS_PAST)) or in_order.get(value)
        if output is None and not past.is_cross:
            raise BadInput(f"no output has the next value of the cache {past.input!r}, such as 'present…'")
        found.append(replace(past, output="" if output is None else output.name or ""))
    return tuple(found)


def _part(name: str, marked: re.Pattern[str]) -> str:
    """The part of `name` that says which tensor of the cache it is: ``0.key`` of ``past_key_values.0.key``."""
    return re.sub(r"[^a-z\d]+", ".", marked.sub(r"\1.\3", name.lower())).strip(".")


def _past(value: ir.Value) -> Past:
    """The tensor of the cache that `value` takes. Raises BadInput for a shape that is no cache of growing length."""
    name, dims = value.name or "", list(value.shape or ())
    sizes = [d if isinstance(d, int) else None for d in dims]
    called = ["" if isinstance(d, int) else d.value or "" for d in dims]
    open_axes = [axis for axis, size in enumerate(sizes) if size is None and axis]
    growing = [axis for axis in open_axes if _LENGTH.search(called[axis])]
    axis = next(iter(growing or open_axes), None) if len(growing or open_axes) == 1 else None
    if axis is None and open_axes and len(dims) == 4 and 2 in open_axes:
        axis = 2
    if axis is None:
        raise BadInput(
            f"the cache {name!r} is {[d if isinstance(d, int) else str(d.value) for d in dims]}: no axis grows with "
            "the tokens\n  hint: export the model with a cache of open length, or without one"
        )
    unknown = [a for a in open_axes if a != axis]
    if unknown:
        raise BadInput(
            f"the cache {name!r} does not say how large its axis {unknown[0]} ({called[unknown[0]]!r}) is\n"
            "  hint: declare the number of heads and their size in the model"
        )
    assert value.dtype is not None  # of floats
    return Past(name, "", value.dtype.numpy(), tuple(sizes), axis, ".encoder." in name)
