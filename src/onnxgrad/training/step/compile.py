"""A training entry compiled to one step graph: a pure function (state, batch) → (state', results).

The step holds standard operators only, so stock ONNX Runtime runs it; a trainer is a loop around it.
State is every value that an update binding changes: it is a graph input with the name of the initializer,
and a graph output.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.custom import custom_rules
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.composites import read_notes
from onnxgrad.ir.graph import reads
from onnxgrad.ir.passes import LEFT_OUT, Pass, PassReport, run_passes, warn_of
from onnxgrad.ir.shapes import allows
from onnxgrad.keywords import check_keywords, check_kind
from onnxgrad.model_io import AnyModel
from onnxgrad.training.graph import synchronized_norm, whole_batch
from onnxgrad.training.graph.attention_blocks import check_rows
from onnxgrad.training.graph.dropout_masks import drop_by_count, kept_count
from onnxgrad.training.graph.mixed_precision import Precision
from onnxgrad.training.graph.packed_products import keep_packed
from onnxgrad.training.optim.named_formulas import Rewriting
from onnxgrad.training.spec.initialization import run_initializations
from onnxgrad.training.spec.lowering import Lowered, open_bound
from onnxgrad.training.spec.training_info import (
    Merged,
    Source,
    bindings,
    chosen_entries,
    merge,
    named_values,
    own_names,
    updated,
)
from onnxgrad.training.spec.validation import read_valid
from onnxgrad.training.step.digest import digest_of, step_digest
from onnxgrad.training.step.memory_budget import STEP_ORDER, in_good_order, within_memory
from onnxgrad.training.step.passes import ATTENTION_BLOCKS, POOL_FIRST, ROW_RESULTS, StepSetting
from onnxgrad.training.step.sequence import in_sequence
from onnxgrad.training.step.step import StateTensor, Step
from onnxgrad.transforms.gradient_node import DOMAIN, is_gradient, strings, target_name
from onnxgrad.transforms.keep_functions import blaming_the_model
from onnxgrad.wording import shape_text, type_text


@check_keywords
@blaming_the_model
def compile_step(
    model: AnyModel | Source,
    *,
    entry: int | None = None,
    outputs: Sequence[str] = (),
    seed: int | None = None,
    memory: int | str | None = None,
    batch_size: int | None = None,
    dims: Mapping[str, int] | None = None,
    attention_rows: int | str | None = None,
    precision: Precision | str | None = None,
    synchronized: str | None = None,
    gathered: Collection[str] = (),
    without: Collection[str] = (),
) -> Step:
    """Compile the training information of `model` to a step graph.

    Its state starts from the initializers of the model and, if there are any, from the initializations of all entries,
    in order.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with a TrainingInfoProto.
        entry: which of its entries; default: all, one after the other: each goes on from what the one
            before has updated.
        outputs: names of further values (of the inference graph or the algorithm) to have as results.
        seed: of those random operators of initializations that have none; default: other numbers every time.
        memory: how much what is computed may take at a time, as ``"200MB"``; what does not fit is computed anew where
            the way back reads it (see `within_memory`). The `plan` of the step says what that is.
        batch_size: rows of a batch that `memory` is for.
        dims: sizes of other symbolic dimensions that it is for, by name.
        attention_rows: how many queries attention takes at a time, and 256 keys, so that the scores of all of them are
            never there at once; 0: all. Default: all for fewer than 1024 keys, or an unknown number of keys;
            else 512. "kernel": so, but attention over fewer than 8192 keys that a kernel in C takes is left to it.
        precision: how products are computed in 16 bits: "fp16", "bf16", or a `Precision`, which says for which nodes;
            default and "fp32": not at all.
        synchronized: have BatchNormalization take the statistics of all ranks (see `synchronize`); gradients are then
            multiplied by the value of this name, if it is not empty.
        gathered: Identities of predictions that are to be those of all rows of a batch (see `gather_rows`).
        without: names of passes to leave out, of those that ``onnxgrad passes`` lists.

    Raises:
        BadInput: there is no such entry, its graph or bindings are not what the specification demands, or it cannot
            be done within `memory`.
        NotDifferentiable: an operator between a parameter and the loss has no rule or no derivative.
    """
    check_kind("precision", precision, (Precision, str), "fp16, bf16, fp32 or a Precision")
    if isinstance(precision, str):
        precision = None if precision == "fp32" else Precision.named(precision, lambda node: True)
    source = read_valid(model)
    chosen = chosen_entries(source, entry)
    check_rows(attention_rows)
    setting = StepSetting(attention_rows, precision, synchronized, gathered, without)
    step = _compile_entries(run_initializations(source, seed), chosen, outputs, setting)
    return step if memory is None else within_memory(step, memory, batch_size, dims)


def compile_entries(model: AnyModel, *, outputs: Sequence[str] = (), seed: int | None = None) -> dict[int, Step]:
    """A step for each entry of `model` that updates anything, by its number: to be taken in any order.

    All start from one initialization. State that one entry reads and another one updates is in its `reads`;
    ``onnxgrad.runtime.share`` binds the reader to the owner's buffers.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with a TrainingInfoProto.
        outputs: names of further values to return as results; each entry gives those that it has.
        seed: as in `compile_step`.

    Raises:
        BadInput: graphs or bindings are not what the specification demands.
        NotDifferentiable: an operator between a parameter and the loss has no rule or no derivative.
    """
    source = read_valid(model)
    chosen = [i for i in chosen_entries(source, None) if source.infos[i].update_binding]
    source = run_initializations(source, seed)
    wanted = _wanted(source, chosen, outputs)
    return {i: _compile_entries(source, [i], wanted[i], StepSetting()) for i in chosen}


def _compile_entries(source: Source, chosen: Sequence[int], outputs: Sequence[str], setting: StepSetting) -> Step:
    """The step that runs the `chosen` entries of a source that is initialized."""
    bound = bindings(source, chosen)
    if not any(bound.values()):
        raise BadInput(f"training entry {chosen[0]} has no update bindings: a step would change nothing")
    wanted = _wanted(source, chosen, outputs)
    rules = [synchronized_norm.RULE] if setting.synchronized is not None else []
    rules += [whole_batch.RULE] if setting.gathered else []
    with custom_rules(*rules) if rules else nullcontext():
        steps = [_compile_entry(source, i, bound[i], wanted[i], setting) for i in chosen]
    fingerprint = digest_of("".join(s.fingerprint for s in steps))
    step = functools.reduce(in_sequence, steps)
    order = PassReport(STEP_ORDER, "step", "an order that takes less memory", "the nodes of a step", reason=LEFT_OUT)
    if STEP_ORDER not in setting.without:
        order.reason = in_good_order(step.model)
        order.places = int(not order.reason)
    step.passes.append(order)
    step.source, step.fingerprint = source, fingerprint
    return step


def _wanted(source: Source, chosen: Sequence[int], outputs: Sequence[str]) -> dict[int, list[str]]:
    """The extra `outputs` that each entry can compute. Raises UnknownName for an output that none can."""
    known = {i: named_values(source.model.graph).keys() | own_names(source.infos[i].algorithm) for i in chosen}
    for name in outputs:
        if not any(name in names for names in known.values()):
            raise UnknownName(name, set().union(*known.values()), "value")
    return {i: [name for name in outputs if name in known[i]] for i in chosen}


def _compile_entry(
    source: Source, index: int, bound: dict[str, str], outputs: Sequence[str], setting: StepSetting
) -> Step:
    """The step of one entry."""
    reports: list[PassReport] = []

    def passed(model: ir.Model, p: Pass[StepSetting], kept: Collection[str] = ()) -> ir.Model:
        found = run_passes(model, [p], lambda: replace(setting, kept=kept), setting.without, counted=True)
        warn_of(found.failed)
        reports.extend(found.reports)
        return found.model

    merged = merge(source, index, bound, updated(source.infos))
    data = [v.name or "" for v in merged.model.graph.inputs if v.name not in {*merged.hosted, *merged.fed}]
    trained, loss = _gradient_names(merged.model, source.infos[index].algorithm, bound)
    opened = open_bound(merged.model, constants={*merged.hosted, *merged.fed}).model
    keep_packed(opened.graph, bound)
    fingerprint = step_digest(opened, {"": loss, **bound}, _settings_of_numbers(setting))
    if setting.synchronized is not None:
        synchronized_norm.synchronize(opened.graph, setting.synchronized)
    opened = passed(opened, POOL_FIRST, [*bound.values(), loss, *outputs])
    counting = drop_by_count(opened.graph, {*data, *merged.hosted, *merged.fed})
    scaling: dict[str, tuple[str, np.ndarray]] = {}
    if setting.precision is not None:
        bound = dict(bound)
        scaling = setting.precision.apply(opened.graph, bound, {*data, *merged.hosted, *merged.fed})
    if setting.gathered:
        whole_batch.gather_rows(opened.graph, setting.gathered)
    lowered = Lowered(passed(opened, ATTENTION_BLOCKS))
    read_notes(lowered.graph, lambda name: lowered[name] if name in lowered.values else None, Rewriting())
    state = {
        name: StateTensor(name, name, value, merged.hosted[name], _kind(name, merged, trained))
        for name, value in bound.items()
    }
    if counting:
        start = ir.tensor(kept_count(source.model), name=counting)
        state[counting] = StateTensor(counting, counting, f"{counting}_next", start, "statistic")
    for name, (following, first) in scaling.items():
        kind = "counter" if first.dtype.kind == "i" else "optimizer"
        state[name] = StateTensor(name, name, following, ir.tensor(first, name=name), kind)
    asked = dict.fromkeys(name for name in [loss, *outputs] if name)
    results = _wire(lowered, list(state.values()), list(asked), index)
    step = passed(lowered.model, ROW_RESULTS)
    graph = step.graph
    read_by = {v for node in graph for v in reads(node)}
    inputs = {v.name or "": v for v in graph.inputs}
    batch = [name for name in data if inputs[name] in read_by]
    only_read = {n: t for n, t in merged.hosted.items() if n not in state and inputs[n] in read_by}
    graph.inputs[:] = [inputs[name] for name in [*batch, *state, *only_read, *merged.fed]]
    step.opset_imports.pop(DOMAIN, None)
    step.metadata_props.clear()
    found = Step(step, state, batch, results, results[0] if loss else "", merged.fed, only_read)
    found.passes, found.fingerprint = reports, fingerprint
    return found


def _settings_of_numbers(setting: StepSetting) -> list[object]:
    """The settings that change the numbers of a step by more than its rounding; 16 bits belong to them."""
    narrow = setting.precision
    blocks = [setting.rows] if isinstance(setting.rows, int) else []
    return [*blocks, *([] if narrow is None else [narrow.dtype.name, narrow.scale, narrow.growth])]


def _gradient_names(model: ir.Model, algorithm: onnx.GraphProto, bound: Mapping[str, str]) -> tuple[set[str], str]:
    """The names that Gradient nodes differentiate with respect to, and the loss.

    The loss is the target of the first Gradient with respect to an initializer that is updated, or of the first one at
    all; without one, the first output of the algorithm that updates nothing; without either, there is no loss.
    """
    gradients = [n for n in model.graph if is_gradient(n)]
    gradients.sort(key=lambda n: bound.keys().isdisjoint(strings(n, "xs")))
    trained = {x for n in gradients for x in strings(n, "xs")}
    targets = [y for n in gradients if (y := target_name(n))]
    free = [v.name for v in algorithm.output if v.name not in bound.values()]
    return trained, (targets or free or [""])[0]


def _kind(name: str, merged: Merged, trained: set[str]) -> str:
    if name in trained:
        return "parameter"
    if name not in merged.own:
        return "statistic"
    return "optimizer" if merged.hosted[name].dtype.is_floating_point() else "counter"


def _wire(lowered: Lowered, state: Sequence[StateTensor], results: Sequence[str], index: int) -> list[str]:
    """Make the graph's outputs: one per state tensor, then the results; the names of the results."""
    graph = lowered.graph
    graph.outputs.clear()
    ends: list[ir.Value] = []
    for tensor in state:
        value = lowered.expose(tensor.output)
        _check_fits(
            value,
            tensor.initial,
            f"training entry {index}, update binding {tensor.name!r} ← {tensor.output!r}",
        )
        tensor.output = value.name or ""
        ends.append(value)
    names = []
    for name in results:
        value = lowered[name]
        if value not in ends or value.name != name:  # two names of one value are two results
            value = lowered.expose(name)
            ends.append(value)
        if value.dtype is None:
            raise BadInput(f"the type of {name!r} is not known; declare it in the model")
        names.append(value.name or "")
    graph.outputs.extend(ends)
    finish(graph)
    return names


def _check_fits(value: ir.Value, like: ir.TensorProtocol, where: str) -> None:
    """Refuse a next value that provably differs from its state tensor in type or shape."""
    shape = [int(d) for d in like.shape]  # type: ignore[arg-type]
    if value.dtype is not None and value.dtype != like.dtype:
        raise BadInput(f"{where}: a tensor of {type_text(like.dtype)} cannot take one of {type_text(value.dtype)}")
    if not allows(value.shape, shape):
        raise BadInput(f"{where}: a tensor of shape {shape} cannot take one of shape {shape_text(value.shape)}")
    value.type = ir.TensorType(like.dtype)
    value.shape = ir.Shape(shape)
