"""Sparse updates: which weights train, chosen by their gradient for what training them costs.

The gradient of every weight is measured on the first rows. A weight is worth ‖g‖²; it costs the bytes of its state, of
its gradient and of what its layer reads, or the time of the product that computes its gradient. Weights are added in
the order of worth for cost as long as the step, compiled with them alone, is within the limit: its backward pass ends
at the first layer that trains. (Lin et al. 2022, arXiv:2206.15472.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.remat import amount
from onnxgrad.remat.budget import megabytes
from onnxgrad.runtime import StepRunner
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
    limits = completed("update auto", {"bytes": None, "milliseconds": None}, given)
    chosen = [key for key, value in limits.items() if value is not None]
    if name != "auto" or len(chosen) != 1:
        raise BadInput(f"update is spelled auto:bytes=2MB or auto:milliseconds=5, not {text!r}")
    kind = chosen[0]
    most = float(amount(limits[kind])) if kind == "bytes" else float(limits[kind])
    if recipe.weights.trainable is not None:
        raise BadInput("update chooses what trains; leave trainable out")
    recipe = replace(recipe, weights=replace(recipe.weights, update=None))
    asked = recipe.algorithm()
    whole = attached(model, **asked)
    worth: dict[str, float] = {}
    for found in gradients(whole, data, _ROWS):
        for weight, g in found.items():
            worth[weight] = worth.get(weight, 0.0) + float((g.astype(np.float64) ** 2).sum())
    order = _in_order(whole, worth, kind)
    rows = recipe.loop.batch_size

    def cost(names: Sequence[str]) -> float:
        step = compile_step(attached(model, **{**asked, "trainable": list(names)}))
        return step_bytes(step, rows, recipe.step.dims) if kind == "bytes" else _milliseconds(step, rows, recipe)

    low, high = 0, len(order)
    while low < high:  # the most weights within the limit
        middle = (low + high + 1) // 2
        if cost(order[:middle]) <= most:
            low = middle
        else:
            high = middle - 1
    if not low:
        least = cost(order[:1])
        said = megabytes(least) if kind == "bytes" else f"{least:.3g} milliseconds"
        raise BadInput(f"no weight can train within {text!r}: {order[0]!r} alone takes {said}")
    return replace(recipe, weights=replace(recipe.weights, trainable=order[:low]))


def _in_order(source: Source, worth: Mapping[str, float], kind: str) -> list[str]:
    """The weights, those with the most worth for their cost first."""
    graph = source.model.graph
    costs = {}
    for name in worth:
        value = graph.initializers[name]
        size = 0 if value.const_value is None else value.const_value.size
        reads = [n.inputs[0] for n, at in value.uses() if at == 1 and n.op_type in ("Conv", "Gemm", "MatMul")]
        read = sum(_count(x) for x in reads if x is not None)
        costs[name] = (
            4.0 * (3 * size + read) if kind == "bytes" else 1e3 + 2.0 * size * max(read / max(_width(value), 1), 1)
        )
    return sorted(worth, key=lambda name: -worth[name] / costs[name])


def _count(value: ir.Value) -> int:
    """The elements of a value, with 32 in place of sizes that are not known."""
    return int(np.prod([d if isinstance(d, int) else 32 for d in value.shape or ()]))


def _width(value: ir.Value) -> int:
    return (
        int(value.shape[-1]) if value.shape is not None and len(value.shape) and isinstance(value.shape[-1], int) else 1
    )


def step_bytes(step: Step, rows: int, dims: Mapping[str, int] | None) -> int:
    """The predicted bytes of a step: its results at their fullest, and the state."""
    plan = within_memory(step, _ENOUGH, rows, dims).plan
    assert plan is not None
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
