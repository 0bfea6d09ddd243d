"""Run two files of one network on the same probes, and compare their outputs.

Inputs that only one of the files has are those of a decoder: an empty cache, a mask of ones, positions. A file that
takes one token at a time is fed its own cache. Only one file is loaded at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import is_op
from onnxgrad.runtime import Options, Session
from onnxgrad.training.graph.decoder_inputs import DecoderInputs
from onnxgrad.training.language.encoder import Encoder
from onnxgrad.transplants.match import root_mean_square
from onnxgrad.transplants.schemes import tensor_of

_BATCH = 2
#: Sizes of open dimensions, in the order in which they are tried.
_LENGTHS = (8, 32, 64, 224)
_PAST = re.compile(r"past|cache(?!_position)", re.IGNORECASE)
_OPTIONS = Options(target="portable", layout="plain", packed=False)

Feeds = Mapping[str, np.ndarray]


class Runner:
    """A model that is run on probes.

    Args:
        model: is not changed.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        held = set(model.graph.initializers.values())
        self.inputs = {v.name or "": v for v in model.graph.inputs if v not in held}
        self.outputs = [v.name or "" for v in model.graph.outputs]
        self.known: list[tuple[Feeds, dict[str, np.ndarray]]] = []

    def probe(self, length: int, known: Feeds) -> dict[str, np.ndarray]:
        """Inputs of this length; those in `known` are taken from there."""
        found = {}
        rng = np.random.default_rng(length)
        for name, value in self.inputs.items():
            if name in known:
                found[name] = known[name]
                continue
            sizes = [_size(d, at, length, bool(_PAST.search(name))) for at, d in enumerate(value.shape or ())]
            found[name] = self._input(name, value, sizes, rng)
        return found

    def _input(self, name: str, value: ir.Value, sizes: list[int], rng: np.random.Generator) -> np.ndarray:
        dtype = (value.dtype or ir.DataType.FLOAT).numpy()
        if dtype.kind == "b":
            return np.zeros(sizes, bool) if _PAST.search(name) else np.ones(sizes, bool)
        if dtype.kind not in "iu":
            return rng.standard_normal(sizes).astype(dtype)
        if "mask" in name:
            return np.ones(sizes, dtype)
        if "position" in name:
            return np.broadcast_to(np.arange(sizes[-1] if sizes else 1), sizes).astype(dtype)
        if "type" in name:
            return np.zeros(sizes, dtype)
        return rng.integers(0, _rows(value), sizes).astype(dtype)

    @property
    def steps(self) -> bool:
        """True if the model takes one token at a time."""
        ids = self.inputs.get("input_ids")
        return ids is not None and ids.shape is not None and len(ids.shape) == 2 and ids.shape[1] == 1

    def results(self, cases: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        """The outputs for each of `cases`, but for cases behind the first that fail; the session ends then."""
        run: Callable[[Feeds], dict[str, np.ndarray]] | None = None
        found = []
        for number, feeds in enumerate(cases):
            result = next((r for known, r in self.known if _are_equal(known, feeds)), None)
            if result is None:
                run = run or self.open()
                try:
                    result = run(feeds)
                except BadInput:
                    if not number:
                        raise
                    break  # the other branch may need what is in a cache
                self.known.append((feeds, result))
            found.append(result)
        return found

    def open(self) -> Callable[[Feeds], dict[str, np.ndarray]]:
        """A function from inputs to outputs; to those of all tokens where the model takes one at a time."""
        return partial(self._run, Session(self.model, _OPTIONS))

    def _run(self, session: Session, feeds: Feeds) -> dict[str, np.ndarray]:
        if not self.steps or feeds["input_ids"].shape[1] == 1:
            return session.run({n: feeds[n] for n in self.inputs})
        results = []
        cache = {n: a for n, a in feeds.items() if _PAST.search(n) and n in self.inputs}
        for t in range(feeds["input_ids"].shape[1]):
            own = {n: a for n, a in feeds.items() if n in self.inputs} | cache
            own["input_ids"] = feeds["input_ids"][:, t : t + 1]
            for name in own:
                if "mask" in name:
                    own[name] = np.ones((len(feeds["input_ids"]), t + 1), own[name].dtype)
                elif "position" in name:
                    own[name] = np.full([1 if d == feeds["input_ids"].shape[1] else d for d in own[name].shape], t,
                                        own[name].dtype)  # fmt: skip
            results.append(session.run(own))
            cache = {n: results[-1][_present(n, self.outputs)] for n in cache}
        joined = {n: np.concatenate([r[n] for r in results], 1) for n in self.outputs if not n.startswith("present")}
        return {n: a for n, a in joined.items() if a.ndim > 1}


class PairRunner(Runner):
    """A decoder behind the encoder of a file of its own, beside a model that has both.

    Args:
        decoder, encoder: are not changed.
    """

    def __init__(self, decoder: ir.Model, encoder: ir.Model) -> None:
        super().__init__(decoder)
        self.encoder, self.inputs = encoder, {}

    def open(self) -> Callable[[Feeds], dict[str, np.ndarray]]:
        """A function from inputs of the whole model to the scores of its tokens."""
        inputs = DecoderInputs.of(self.model)
        encoder = Encoder.of(inputs, self.encoder, _OPTIONS)
        assert encoder is not None  # as its file is given
        return partial(self._scores, inputs, encoder, Session(self.model, _OPTIONS))

    def _scores(self, inputs: DecoderInputs, encoder: Encoder, session: Session, feeds: Feeds) -> dict[str, np.ndarray]:
        read = encoder.tokens or encoder.features
        ids = next((a for n, a in feeds.items() if "decoder" in n and "ids" in n), None)
        if read is None or read.name not in feeds or ids is None:
            raise BadInput(f"the trained model has no inputs decoder_input_ids and {read and read.name!r}")
        states, name = encoder.states(list(feeds[read.name])), inputs.logits.name or ""
        own = [name, *(p.output for p in inputs.pasts if p.output)]
        most = ids.shape[1] - 1 if inputs.pasts else ids.shape[1]  # the last token reads the cache of the others
        found = session.run(inputs.feeds(ids[:, :most]) | states, own)
        scores = [found[name]]
        if inputs.pasts:
            cache = inputs.next_cache(found)
            last = session.run(inputs.feeds(ids[:, most:], cache=cache, before=most) | states, [name])
            scores.append(last[name])
        return {name: np.concatenate(scores, 1)}


def _are_equal(known: Feeds, feeds: Feeds) -> bool:
    return known.keys() == feeds.keys() and all(np.array_equal(known[n], a) for n, a in feeds.items())


def _present(past: str, outputs: list[str]) -> str:
    """The output that is the cache `past` of the next token."""
    ends = [o for o in outputs if re.sub(r"^\D*", "", o) == re.sub(r"^\D*", "", past)]
    if not ends:
        raise BadInput(f"no output is the next {past!r}\n  hint: give inputs for a comparison with --probes")
    return ends[0]


def _size(dim: Any, at: int, length: int, is_past: bool) -> int:
    if isinstance(dim, int):
        return dim
    if at == 0:
        return _BATCH
    text = str(getattr(dim, "value", dim) or "")
    terms = [t.strip() for t in text.split("+")]
    if len(terms) > 1:
        return sum(int(t) if t.isdigit() else 0 if "past" in t else length for t in terms)
    return 0 if is_past or text.startswith("past") else length


def _rows(value: ir.Value) -> int:
    """The number of rows of the table that indices select from."""
    queue, limits = [value], []
    while queue:
        for node, at in queue.pop().uses():
            if is_op(node, ("Cast", "Reshape", "Identity", "Unsqueeze")) and at == 0:
                queue.append(node.outputs[0])
            elif "Gather" in node.op_type and at == 1:
                table = node.inputs[0]
                while table is not None and tensor_of(table) is None and table.producer() is not None:
                    table = table.producer().inputs[0]  # type: ignore[union-attr]
                tensor = tensor_of(table)
                limits += [] if tensor is None else [int(tensor.shape[0])]  # type: ignore[arg-type]
    return min(limits, default=16)


def differences(first: Runner, second: Runner, given: Feeds | None = None) -> tuple[float, dict[str, np.ndarray]]:
    """The relative difference of the outputs of two models, and the inputs on which they were compared.

    Raises:
        BadInput: there are no inputs that both take, or no outputs to compare.
    """
    error: Exception | None = None
    for length in _LENGTHS:
        try:
            longer, shorter = (second, first) if first.steps else (first, second)
            feeds = longer.probe(length, given or {})
            feeds |= shorter.probe(length, {**(given or {}), **feeds})
            other_branch = feeds | {n: ~a for n, a in feeds.items() if a.dtype == bool and _PAST.search(n)}
            cases = [feeds, *([other_branch] if any(other_branch[n] is not feeds[n] for n in feeds) else [])]
            pairs = zip(first.results(cases), second.results(cases))
            return max(_largest_difference(a, b) for a, b in pairs), feeds
        except BadInput as e:
            error = e
    raise BadInput(
        f"the two files cannot be compared: {error}\n  hint: --probes names an .npz file with inputs that fit both"
    )


def _largest_difference(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> float:
    pairs = [(first[n], second[n]) for n in first if n in second and _fit(first[n], second[n])]
    if not pairs:
        pairs = [(a, b) for a in first.values() for b in second.values() if _fit(a, b)][:1]
    if not pairs:
        raise BadInput("they have no output of the same shape")
    return max(_relative(a, b) for a, b in pairs)


def _fit(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 0 and a.dtype.kind != "i" and (a.shape == b.shape or _is_last(a, b) or _is_last(b, a))


def _is_last(short: np.ndarray, long: np.ndarray) -> bool:
    """True if `short` has the results of the last token alone."""
    return short.ndim == long.ndim == 3 and short.shape[1] == 1 and long[:, -1:].shape == short.shape


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        a, b = a[:, -1:], b[:, -1:]
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    deviation = float(a.std()) if a.size > 1 else 0.0
    return root_mean_square(a - b) / (deviation or root_mean_square(a) or 1.0)
