"""A step in two halves, for batches that do not fit: gradients of parts into one flat bucket, then one update from it.

The step graph is cut at its gradients. The first half computes them for a part of a batch and adds them, times the
weight of the part, to the bucket; running statistics move with every part. The second half divides by the sum of the
weights and updates. The weight of a part is the denominator of its mean loss (``batch_weight``, see `attach`), so the
parts add up to the whole batch, also with ignored labels and weighted classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.graph import dependents, named_values
from onnxgrad.model_io import AnyModel
from onnxgrad.runtime import Options, StepRunner, share
from onnxgrad.training.graph.mixed_precision import SCALE, Precision
from onnxgrad.training.spec.training_info import Source, chosen_entries, own_names
from onnxgrad.training.spec.validation import read_valid
from onnxgrad.training.step.compile import compile_step
from onnxgrad.training.step.memory_budget import in_good_order
from onnxgrad.training.step.pieces import Bucket, add_results, taking
from onnxgrad.training.step.step import StateTensor, Step, prune_step

BUCKET, TOTAL, KEEP = "gradient_bucket", "gradient_total", "gradient_keep"
WEIGHT, SUM = "batch_weight", "batch_sum"


@dataclass
class SplitStep:
    """The two halves of a step.

    Attributes:
        whole: the step that was cut.
        gradient: batch → the bucket (state), results of the loss; reads the parameters. Its rate ``gradient_keep`` is
            0 for the first part of a batch and 1 for the others.
        update: the bucket → the next parameters and state of the optimizer; the learning rates are its rates.
        summed: the loss is the sum over a batch, so parts are added and not averaged.
        pieces: the gradients in the bucket, in their order: their shapes by their names in `update`.
        weighted: gradients are those of the loss times its weight.
    """

    whole: Step
    gradient: Step
    update: Step
    summed: bool = False
    pieces: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    weighted: bool = False


def split_step(
    model: AnyModel | Source,
    *,
    entry: int | None = None,
    outputs: Sequence[str] = (),
    attention_rows: int | str | None = None,
    precision: Precision | None = None,
    synchronized: bool = False,
    arrange: Callable[[SplitStep], Sequence[str]] | None = None,
    without: Collection[str] = (),
) -> SplitStep:
    """The step of one training entry of `model` in two halves.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, from ``attach(…, accumulate=True)``.
        entry: which of its entries; default: the only one.
        outputs: names of further values to return as results, of the half that computes them.
        attention_rows, precision: as in `compile_step`; where the sum over all parts is not finite, none counts.
        synchronized: have BatchNormalization take the statistics of all ranks; `DataParallel` runs such a step.
        arrange: tells, of the step as it would be, in which order the bucket should have its pieces.
        without: names of passes to leave out.

    Raises:
        BadInput: it does not say over how much a batch is averaged, or its update reads the batch.
    """
    source = read_valid(model)
    infos = [source.infos[i] for i in chosen_entries(source, entry) if source.infos[i].update_binding]
    found = [n for i in infos for n in i.algorithm.node if n.op_type == "Gradient"]
    if len(infos) != 1 or len(found) != 1:
        raise BadInput(f"a step in two halves has one entry with one Gradient; there are {len(infos)} and {len(found)}")
    weight = next((name for name in (WEIGHT, SUM) if name in own_names(infos[0].algorithm)), None)
    if weight is None:
        raise BadInput(
            "the training information does not say over how much the loss of a batch is averaged\n"
            "  hint: attach the loss with accumulate=True"
        )
    gradients = [name for name in found[0].output if name]
    precision = precision and replace(precision, in_parts=True)
    asked_of_step = [*gradients, weight, *outputs]
    summed = weight == SUM
    step = compile_step(
        source, entry=entry, outputs=asked_of_step, attention_rows=attention_rows, precision=precision,
        synchronized=("" if summed else weight) if synchronized else None, gathered=source.compared, without=without,
    )  # fmt: skip
    asked = dict(zip([step.loss, *dict.fromkeys(asked_of_step)], step.results, strict=True))
    names = [asked[name] for name in gradients]
    split = _Cut(step, names, asked[weight], summed, synchronized).halves()
    order = names if arrange is None else list(arrange(split))
    if order != names:
        split = _Cut(step, order, asked[weight], summed, synchronized).halves()
    _keep_results(step, list(dict.fromkeys([step.loss, *(asked[name] for name in outputs)])))
    return split


def _keep_results(step: Step, kept: list[str]) -> None:
    """Have `step` return its state and the results `kept`, in this order."""
    graph, step.results = step.model.graph, kept
    ends = {v.name: v for v in graph.outputs}
    graph.outputs[:] = [ends[name] for name in dict.fromkeys([*(t.output for t in step.state.values()), *kept])]
    finish(graph)


class _Cut:
    """A step, and its cut into gradient and update."""

    def __init__(self, step: Step, gradients: Sequence[str], weight: str, summed: bool, weighted: bool) -> None:
        self.step, self.gradients, self.weight = step, list(gradients), weight
        self.summed, self.weighted = summed, weighted or summed
        graph = step.model.graph
        values = named_values(graph)
        self.behind = {v.name for v in dependents(graph, [values[name] for name in gradients])}
        held = [values[name] for name in gradients]
        self.dtype = ir.DataType.DOUBLE if any(v.dtype == ir.DataType.DOUBLE for v in held) else ir.DataType.FLOAT
        self.shapes = [tuple(int(d) for d in v.shape or ()) for v in held]  # type: ignore[arg-type]
        self.sizes = [int(np.prod(s)) for s in self.shapes]

    def halves(self) -> SplitStep:
        """Both."""
        step = self.step
        early = {n: t for n, t in step.state.items() if t.kind == "statistic" and t.output not in self.behind}
        late = {n: t for n, t in step.state.items() if n not in early}
        results = [n for n in step.results if n not in self.gradients]
        return SplitStep(
            step,
            self._gradient(early, [n for n in results if n not in self.behind]),
            self._update(late, [n for n in results if n in self.behind]),
            self.summed,
            dict(zip(self.gradients, self.shapes)),
            self.weighted,
        )

    def _copy(self) -> tuple[ir.Model, Builder, dict[str, ir.Value], Var, Var]:
        """A copy of the step with the sums of gradients and weights as inputs; its builder and its values by name."""
        model = self.step.model.clone()
        values, b = named_values(model.graph), Builder(model.graph)
        return model, b, values, self._input(b, BUCKET, [sum(self.sizes)]), self._input(b, TOTAL, [])

    def _gradient(self, state: dict[str, StateTensor], results: list[str]) -> Step:
        model, b, values, bucket, total = self._copy()
        keep = self._input(b, KEEP, [])
        weight = b.Cast(Var(b, values[self.weight]), to=int(self.dtype))
        flat = []
        for name in self.gradients:
            g = b.Reshape(Var(b, values[name]), [-1])
            flat.append(g if g.dtype == self.dtype else b.Cast(g, to=int(self.dtype)))
        joined = flat[0] if len(flat) == 1 else b.Concat(*flat, axis=0)
        can_be_lost = SCALE in self.step.state  # the rest of a skipped batch times 0 may be NaN
        sums = b.Where(keep > 0.0, bucket, 0.0) if can_be_lost else bucket * keep
        held = {
            BUCKET: sums + (joined if self.weighted else joined * weight),
            TOTAL: b.Max(total, weight) if self.summed else total * keep + weight,
        }
        for name, var in held.items():
            var.value.name = b.names.exactly(f"{name}_next")
        own = {name: StateTensor(name, name, var.name, self._zeros(name), "optimizer") for name, var in held.items()}
        ends = [values[t.output] for t in state.values()] + [v.value for v in held.values()]
        half = replace(self.step, state=state | own, results=results, rates={KEEP: self._zeros(KEEP)})
        return self._half(half, model, [*ends, *(values[name] for name in results)])

    def _update(self, state: dict[str, StateTensor], results: list[str]) -> Step:
        model, b, values, bucket, total = self._copy()
        graph = model.graph
        before = list(graph)
        mean = bucket / total
        parts = [mean]
        if len(self.sizes) > 1:
            parts = list(b.emit("Split", mean, self.sizes, axis=0, outputs=len(self.sizes)))
        for name, shape, part in zip(self.gradients, self.shapes, parts):
            old = values[name]
            new = b.cast_like(b.Reshape(part, np.array(shape, np.int64)), Var(b, old))
            new.value.shape = ir.Shape(shape)
            old.replace_all_uses_with(new.value, replace_graph_outputs=True)
            new.value.name, old.name = old.name, new.value.name
        made = list(graph)[len(before) :]
        graph.remove(made)
        graph.insert_before(graph[0], made)
        outputs = [values[t.output] for t in state.values()] + [values[name] for name in results]
        half = self._half(replace(self.step, state=state, results=results, loss=""), model, outputs)
        if half.batch:
            name = half.batch[0]
            raise BadInput(f"the update reads {name!r} of the batch beside the gradients, so it cannot be put off")
        return half

    def _input(self, b: Builder, name: str, shape: Sequence[int]) -> Var:
        value = ir.Value(name=b.names.exactly(name), type=ir.TensorType(self.dtype), shape=ir.Shape(shape))
        b.graph.inputs.append(value)
        return Var(b, value)

    def _zeros(self, name: str) -> ir.TensorProtocol:
        shape = (sum(self.sizes),) if name == BUCKET else ()
        return ir.tensor(np.zeros(shape, self.dtype.numpy()), name=name)

    def _half(self, step: Step, model: ir.Model, outputs: Sequence[ir.Value]) -> Step:
        """A half of `step`, with these `outputs` of `model`; state that the other half updates is only read."""
        others = {n: t.initial for n, t in self.step.state.items()} | {n: self._zeros(n) for n in (BUCKET, TOTAL)}
        half = prune_step(replace(step, model=model, reads=others | self.step.reads), outputs)
        in_good_order(model)
        return half


class Accumulating:
    """The machine of a step in two halves (see `onnxgrad.runtime.Machine`): parts of a batch, then one update.

    Args:
        split: the step.
        parts: into how many parts a batch is cut; a batch of fewer rows into as many as it has.
        options: how ONNX Runtime runs both halves.

    Attributes:
        held: the learning rates, to write into.
        bucket: the gradients of the present step: their sum over all parts, then their mean.
        whole: inputs without rows, which every part has.
    """

    whole: Collection[str] = ()

    def __init__(self, split: SplitStep, parts: int, *, options: Options | None = None) -> None:
        if parts < 1:
            raise BadInput(f"a batch is cut into at least 1 part, not {parts}")
        self.parts, self.summed, self.weighted = parts, split.summed, split.weighted
        self.bucket = self._part = Bucket(split.pieces, self._dtype(split).numpy())
        if parts > 1:
            self._part = Bucket(split.pieces, self.bucket.array.dtype)
        first = add_results(split.gradient, split.pieces, self._dtype(split), (BUCKET, TOTAL))
        self.update = self._updating(split, options)
        self.gradient = self._computing(first, options, self._part.pieces)
        share(self.gradient, self.update)
        self.held = self.update.held
        self.results = [*split.gradient.results, *split.update.results]

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One update from the gradients of all parts; results are means over the parts, weighted as the gradients."""
        found, total = self.gradients(batch)
        return self.means(found, total) | self.updated(total)

    def updated(self, total: float) -> dict[str, np.ndarray]:
        """An update from the gradients in the bucket, which are sums over so much; its results."""
        if not self.summed:
            with np.errstate(all="ignore"):  # a mean over nothing is no number
                self.bucket.array /= total
        return self.update.step({})

    @staticmethod
    def _dtype(split: SplitStep) -> ir.DataType:
        return split.gradient.state[BUCKET].initial.dtype

    def _computing(self, half: Step, options: Options | None, places: Mapping[str, np.ndarray]) -> Any:
        """The machine that computes the gradients of a part; `places` as in `Resident`."""
        return StepRunner(half, options=options, places=places, owner=self.update)

    def _updating(self, split: SplitStep, options: Options | None) -> StepRunner:
        """The machine that makes an update from the bucket."""
        second, names = taking(split.update, split.pieces, self._dtype(split))
        return StepRunner(second, options=options, places={given: self.bucket.pieces[n] for n, given in names.items()})

    def gradients(self, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
        """Add up the gradients of all parts in the bucket. Returns the sums of results, and of their denominators.

        Without rows, the bucket is unchanged; without weights, there are no sums.
        """
        found: dict[str, np.ndarray] = {}
        total = 0.0
        for k, part in enumerate(self._cut(batch)):
            results = self.gradient.step(part)
            weight = float(results[SUM if self.summed else WEIGHT])
            total += weight
            self._gather(weight, first=not k)
            for name in self.gradient.results:
                value = np.asarray(results[name], np.float64) * (1.0 if name == WEIGHT else weight)
                if weight:  # a mean over nothing is no number
                    found[name] = found[name] + value if name in found else value
        return found, total

    def _gather(self, weight: float, first: bool) -> None:
        """Add the gradients of a part, times its weight, to those of the parts before it."""
        part, total = self._part.array, self.bucket.array
        with np.errstate(all="ignore"):  # an overflow shows in the loss, or is skipped
            if not self.weighted and weight != 1:
                part *= weight
            if first and part is not total:
                total[...] = part
            elif not first:
                total += part

    def means(self, sums: Mapping[str, np.ndarray], total: float) -> dict[str, np.ndarray]:
        """The results that `sums` of them amount to: a mean over nothing is no number."""
        if not sums:
            return {name: np.asarray(np.nan) for name in self.gradient.results}
        divisor = 1.0 if self.summed else total
        return {n: a if n in (WEIGHT, SUM) else np.asarray(a / divisor) for n, a in sums.items()}

    def count_rows(self, batch: Mapping[str, np.ndarray]) -> int:
        """The number of rows of `batch`."""
        return min((len(array) for name, array in batch.items() if name not in self.whole), default=0)

    def _cut(self, batch: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        rows = self.count_rows(batch)
        size = -(-rows // min(self.parts, rows)) if rows else 1
        for low in range(0, rows, size):
            yield {n: array if n in self.whole else array[low : low + size] for n, array in batch.items()}

    @property
    def now(self) -> dict[str, np.ndarray]:
        """Every tensor of state until the next step; the bucket is no state between steps."""
        return {**self.gradient.now, **self.update.now}

    def state(self) -> dict[str, np.ndarray]:
        """A copy of them."""
        return {name: array.copy() for name, array in self.now.items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace every tensor of state by a copy of the one given."""
        for name in sorted(state.keys() ^ self.now.keys()):
            raise BadInput(f"state {name!r} is {'unknown here' if name in state else 'missing'}")
        for half in (self.update, self.gradient):
            half.load_state({n: state[n] for n in half.slots})
