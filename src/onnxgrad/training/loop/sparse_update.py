"""Sparse updates: which weights train, chosen by their gradient for what training them costs.

The gradient of every weight is measured on the first rows. A weight is worth ‖g‖²; it costs the bytes of its state, of
its gradient and of what its layer reads, or the time of the product that computes its gradient. Weights are added in
the order of worth for cost as long as the step, compiled with them alone, is within the limit: its backward pass ends
at the first layer that trains. Outputs of weights are chosen likewise, in parts: `ChosenOutputs` cuts the gradient of a
weight to those that train. (Lin et al. 2022, arXiv:2206.15472.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import not_none
from onnxgrad.keywords import check_whole
from onnxgrad.remat import amount
from onnxgrad.remat.budget import megabytes
from onnxgrad.runtime import StepRunner
from onnxgrad.training.adapters.config import ChosenOutputs
from onnxgrad.training.adapters.sites import CONV, LINEAR
from onnxgrad.training.adapters.sites import weights as weights_of_layers
from onnxgrad.training.build.attach import attached
from onnxgrad.training.loop.gradients import gradients
from onnxgrad.training.loop.recipe import Recipe
from onnxgrad.training.option_strings import completed, spelled
from onnxgrad.training.spec.training_info import Source
from onnxgrad.training.step.compile import compile_step
from onnxgrad.training.step.memory_budget import within_memory
from onnxgrad.training.step.step import Step

_ROWS = 64
_ENOUGH = 1 << 50


def sparse_update(model: Any, data: Any, recipe: Recipe) -> Recipe:
    """`recipe` with the weights that `update` chooses in its place.

    Raises:
        BadInput: `update` is not spelled auto:bytes=… or auto:milliseconds=…, or no weight can train within the limit.
    """
    text = str(recipe.weights.update)
    name, given = spelled(text)
    limits = completed("update auto", {"bytes": None, "milliseconds": None, "channels": 1}, given)
    pieces = limits.pop("channels")
    chosen = [key for key, value in limits.items() if value is not None]
    if name != "auto" or len(chosen) != 1:
        raise BadInput(f"update is spelled auto:bytes=2MB or auto:milliseconds=5, not {text!r}")
    check_whole(1, channels=pieces)
    kind = chosen[0]
    most = float(amount(limits[kind])) if kind == "bytes" else float(limits[kind])
    if recipe.weights.trainable is not None:
        raise BadInput("update chooses what trains; leave trainable out")
    recipe = replace(recipe, weights=replace(recipe.weights, update=None))
    asked = recipe.algorithm()
    whole = attached(model, **asked)
    worth: dict[str, np.ndarray] = {}  # of every output of a weight, or of the weight as a whole
    divided = _outputs(whole) if pieces > 1 else {}
    for found in gradients(whole, data, _ROWS, recipe.held_out):
        for weight, g in found.items():
            axis = divided.get(weight)
            others = tuple(a for a in range(g.ndim) if a != axis) if axis is not None else None
            squares = np.asarray((g.astype(np.float64) ** 2).sum(others))
            worth[weight] = worth.get(weight, np.zeros(())) + squares
    orders = [_in_order(whole, {name: _parts(w, n) for name, w in worth.items()}, worth, kind) for n in {1, pieces}]
    rows = recipe.loop.batch_size

    def cost(parts: Sequence[Part]) -> float:
        step = compile_step(attached(model, **{**asked, **_algorithm(parts, worth)}))
        return step_bytes(step, rows, recipe.step.dims) if kind == "bytes" else _milliseconds(step, rows, recipe)

    def most_within(order: list[Part]) -> list[Part]:
        low, high = 0, len(order)
        while low < high:
            middle = (low + high + 1) // 2
            if cost(order[:middle]) <= most:
                low = middle
            else:
                high = middle - 1
        return order[:low]

    best = max((most_within(order) for order in orders), key=lambda parts: sum(_worth(worth, p) for p in parts))
    if not best:
        least, first = min((cost(order[:1]), order[0][0]) for order in orders)
        said = megabytes(least) if kind == "bytes" else f"{least:.3g} milliseconds"
        raise BadInput(f"no weight can train within {text!r}: {first!r} alone takes {said}")
    settings = _algorithm(best, worth)
    weights = replace(recipe.weights, trainable=settings["trainable"])
    return replace(recipe, weights=weights, adapter=replace(recipe.adapter, adapter=settings.get("adapter")))


#: A weight, and the numbers of some of its outputs.
Part = tuple[str, tuple[int, ...]]


def _outputs(source: Source) -> dict[str, int]:
    """The axis of the outputs of every weight whose outputs can train one by one."""
    found = weights_of_layers(source.model.graph)
    return {
        w.name: 0 if w.kind == CONV else 0 if w.transposed else 1
        for w in found.values()
        if w.kind in (CONV, LINEAR) and w.groups == 1 and not w.quantized and (w.kind == CONV or len(w.shape) == 2)
        and len({s.transposed for s in w.sites}) == 1
    }  # fmt: skip


def _parts(worth: np.ndarray, pieces: int) -> list[tuple[int, ...]]:
    """The outputs of a weight in parts, those of the most worth first."""
    order = np.argsort(-np.atleast_1d(worth), kind="stable")
    return [tuple(sorted(part.tolist())) for part in np.array_split(order, min(pieces, len(order)))]


def _worth(worth: Mapping[str, np.ndarray], part: Part) -> float:
    return float(np.atleast_1d(worth[part[0]])[list(part[1])].sum())


def _algorithm(parts: Sequence[Part], worth: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Settings of `attach` with which these parts train; weights of which all outputs do are trained as a whole."""
    outputs: dict[str, list[int]] = {}
    for name, part in parts:
        outputs.setdefault(name, []).extend(part)
    whole = [name for name, chosen in outputs.items() if len(chosen) == np.size(worth[name])]
    some = {name: sorted(chosen) for name, chosen in outputs.items() if name not in whole}
    return {"trainable": whole or None} | ({"adapter": ChosenOutputs(some)} if some else {})


def _in_order(
    source: Source, parts: Mapping[str, list[tuple[int, ...]]], worth: Mapping[str, np.ndarray], kind: str
) -> list[Part]:
    """Parts of weights, those with the most worth for their cost first."""
    graph, ratios = source.model.graph, {}
    for name, own in parts.items():
        value = graph.initializers[name]
        size = 0 if value.const_value is None else value.const_value.size
        reads = [n.inputs[0] for n, at in value.uses() if at == 1 and n.op_type in ("Conv", "Gemm", "MatMul")]
        read = sum(_count(x) for x in reads if x is not None)
        for part in own:
            share = len(part) / np.size(worth[name])
            cost = (
                4.0 * (3 * size * share + read)
                if kind == "bytes"
                else 1e3 + 2.0 * size * share * max(read / max(_width(value), 1), 1)
            )
            ratios[name, part] = _worth(worth, (name, part)) / cost
    return sorted(ratios, key=lambda part: -ratios[part])


def _count(value: ir.Value) -> int:
    """The elements of a value, with 32 in place of sizes that are not known."""
    return int(np.prod([d if isinstance(d, int) else 32 for d in value.shape or ()]))


def _width(value: ir.Value) -> int:
    return (
        int(value.shape[-1]) if value.shape is not None and len(value.shape) and isinstance(value.shape[-1], int) else 1
    )


def step_bytes(step: Step, rows: int, dims: Mapping[str, int] | None) -> int:
    """The predicted bytes of a step: its results at their fullest, and the state."""
    plan = not_none(within_memory(step, _ENOUGH, rows, dims).plan)
    return plan.plain + sum(t.initial.nbytes for t in step.state.values())


def example_batch(step: Step, rows: int, dims: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
    """Numbers in the shapes of a batch of `step` (see `example_arrays`)."""
    return example_arrays(step.model, step.batch, rows, dims)


def example_arrays(
    model: ir.Model, names: Sequence[str], rows: int, dims: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Numbers in the shapes of the inputs `names` of a model.

    Raises:
        BadInput: a dimension is unknown.
    """
    rng = np.random.default_rng(0)
    inputs = {v.name: v for v in model.graph.inputs}
    found = {}
    for name in names:
        value = inputs[name]
        shape = []
        for axis, dim in enumerate(value.shape or ()):
            known = dim if isinstance(dim, int) else rows if axis == 0 else (dims or {}).get(dim.value or "")
            if known is None:
                raise BadInput(f"say how large the dimension {dim} of {name!r} is, as in dims={{'{dim}': 64}}")
            shape.append(known)
        dtype = (value.dtype or ir.DataType.FLOAT).numpy()
        found[name] = (rng.standard_normal(shape) if dtype.kind not in "iub" else np.zeros(shape)).astype(dtype)
    return found


def _milliseconds(step: Step, rows: int, recipe: Recipe) -> float:
    """The median time of a step, run as `recipe` says."""
    runner = StepRunner(step, options=recipe.runtime.build_options())
    batch = example_batch(step, rows, recipe.step.dims)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        runner.step(batch)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times[2:]))
