"""A limit of memory as a promise: plans are tried in processes of their own until one is measured within it.

The memory is what a process that has loaded the library grows by for the model, its step, the session, the state and
the steps, the measurement of validation data and the files; data are the caller's. Plans are tried from the fastest to
the smallest: everything kept, results computed anew, batches in parts, adapters, and at last fewer layers that train.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model, save_model, training_info
from onnxgrad.model_io.hub import HubFile
from onnxgrad.model_io.read import as_given
from onnxgrad.remat import amount
from onnxgrad.remat.budget import megabytes
from onnxgrad.training.loop.recipe import DataRecipe, LogRecipe, Recipe

#: Layers that train where everything else is too large, from the last.
_LAYERS = (8, 4, 2, 1)
_RANK = 4
_STEPS = 3
#: Budgets of a plan that are tried: the sum of its results is predicted, the rest is not.
_BUDGETS = 3
CARRIES = "peak chooses how a model is trained; this one carries training information"
_CODE = "from onnxgrad.training.loop.peak_probe import main; main()"

Settings = dict[str, Any]
#: Measures a plan: its settings, with the budget of memory in numbers, and the bytes that it takes.
Measure = Callable[[Settings], tuple[Settings, float]]


def headroom(most: float) -> float:
    """The bytes that a measured plan leaves of a limit: allocators differ from run to run."""
    return max(1 << 20, most / 25)


def limit_for(taken: float) -> float:
    """The smallest limit that leaves `headroom` over `taken`."""
    return max(taken + (1 << 20), taken * 25 / 24)


def choose(groups: Sequence[Sequence[Settings]], measure: Measure, most: float) -> tuple[Settings, float]:
    """The first plan that is measured to take at most `most`, and the bytes that it takes.

    Few plans are measured: where the first group does not fit, the last plan of all decides whether any does.

    Args:
        groups: plans, the fastest group first. The plans of a group take less and less: its last one is measured
            first, so that a group without a plan that fits costs one measurement.
        measure: raises BadInput for a plan that is none.
        most: bytes.

    Returns:
        The plan and its bytes; if none fits, the smallest.

    Raises:
        BadInput: none can be measured.
    """
    known: dict[int, tuple[Settings, float]] = {}
    reasons: list[BadInput] = []

    def cost_of(plan: Settings) -> tuple[Settings, float] | None:
        if id(plan) not in known:
            try:
                known[id(plan)] = measure(plan)
            except BadInput as error:
                reasons.append(error)
                return None
        return known[id(plan)]

    for k, group in enumerate(groups):
        least = cost_of(groups[-1][-1]) if k == 1 else None
        if least is not None and least[1] > most:
            break
        low, high, fitting = 0, len(group), None
        while low < high:
            middle = high - 1 if fitting is None else (low + high) // 2
            found = cost_of(group[middle])
            if found is None and fitting is None:
                high = middle
            elif found is not None and found[1] <= most:
                fitting, high = found, middle
            else:
                low = high if fitting is None else middle + 1
        if fitting is not None:
            return fitting
    if not known:
        raise reasons[0]
    return min(known.values(), key=lambda plan: plan[1])


def within_peak(model: Any, recipe: Recipe, batch_size: int, is_validated: bool) -> tuple[Recipe, str]:
    """`recipe` with the first plan that is measured within its `peak`, and a note of it.

    Args:
        model: see `Trainer`.
        recipe: the settings of the run.
        batch_size: rows of a batch.
        is_validated: also measure validation data in between.

    Raises:
        BadInput: none is; the message has the smallest limit that can be met.
    """
    assert recipe.step.peak is not None
    most = amount(recipe.step.peak)
    target = most - headroom(most)
    held_out = DataRecipe(validation=is_validated or None)
    step = replace(recipe.step, peak=None)
    plain = replace(recipe, step=step, log=LogRecipe(), data=held_out)
    with tempfile.TemporaryDirectory(prefix="onnxgrad-", ignore_cleanup_errors=True) as folder:
        path = os.path.abspath(model) if _is_file(model) else os.path.join(folder, "model.onnx")
        if not _is_file(model):
            source = as_given(model)
            if training_info(source):
                raise BadInput(CARRIES)
            save_model(source, path)
        groups = plans(plain, batch_size, load_model(path, aside=True))

        def measure(settings: Settings) -> tuple[Settings, float]:
            tightest = settings is groups[-1][-1]
            return fit_memory(settings, lambda s: _measured(path, changed(plain, s), batch_size), target, tightest)

        settings, taken = choose(groups, measure, target)
    said = in_words(settings)
    if taken > target:
        raise BadInput(
            f"training with batches of {batch_size} rows cannot be done within {megabytes(most)}: the smallest limit "
            f"that can be met is {megabytes(limit_for(taken))} ({said})"
        )
    note = f"{megabytes(taken)} measured within {megabytes(most)}: {said}"
    return changed(replace(recipe, step=replace(recipe.step, peak=None)), settings), note


def held_out_rows(rows: int, recipe: Recipe) -> int:
    """Rows of a batch of validation data: those of a part of a batch of training."""
    return -(-rows // recipe.step.accumulate)


def _is_file(model: Any) -> bool:
    return isinstance(model, (str, os.PathLike)) and HubFile.of(model) is None


def in_words(settings: Settings) -> str:
    """The settings of a plan."""
    texts = {key: ",".join(value[:3]) if isinstance(value, list) else str(value) for key, value in settings.items()}
    return ", ".join(f"{key}={text}" for key, text in texts.items()) or "everything kept"


def plans(recipe: Recipe, rows: int, model: ir.Model) -> list[list[Settings]]:
    """Settings to try, in groups for `choose`; ``memory`` True: as much as is left."""
    parts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= rows]
    cut: list[Settings] = [{"memory": True} | ({"accumulate": n} if n > 1 else {}) for n in parts]
    trained: list[Settings] = [{}]
    if recipe.weights.trainable is None and recipe.weights.update is None and recipe.adapter.build_adapter() is None:
        narrow = [v.name or "" for v in model.graph.initializers.values() if _is_narrow(v)]
        adapters = {"lora": _RANK, "lora_targets": ["all", *(f"!{name}" for name in narrow)]}
        trained.append({**adapters, **({"trainable": narrow} if narrow else {})})
        trained += [{"trainable": [f"last:{layers}"]} for layers in _LAYERS]
    return [[{}], *([{**plan, **settings} for plan in cut] for settings in trained)]


def _is_narrow(weight: ir.Value) -> bool:
    """True for a matrix of fewer rows or columns than an adapter's rank: it trains as a whole."""
    shape = () if weight.const_value is None else weight.const_value.shape.numpy()
    is_float = weight.dtype is not None and weight.dtype.is_floating_point()
    return is_float and len(shape) > 1 and min(shape[0], math.prod(shape[1:])) < _RANK


def changed(recipe: Recipe, settings: Settings) -> Recipe:
    """`recipe` with the settings of a plan."""
    own = {"step": ("memory", "accumulate"), "weights": ("trainable",), "adapter": ("lora", "lora_targets")}
    return replace(
        recipe,
        **{
            part: replace(getattr(recipe, part), **{key: settings[key] for key in keys if key in settings})
            for part, keys in own.items()
        },
    )


def fit_memory(
    settings: Settings, measured: Callable[[Settings], dict[str, float]], target: float, tightest: bool
) -> tuple[Settings, float]:
    """Settings of a plan with the largest budget for results that is measured within `target`.

    Args:
        settings: the plan; with ``memory`` True, the budget is sought.
        measured: the bytes that a process has ``grown`` by, of which the results are predicted to be ``plain``; or the
            ``least`` budget, where a smaller one is asked for.
        target: bytes.
        tightest: with no budget within `target`, find the smallest that can be met.
    """
    own = {key: value for key, value in settings.items() if key != "memory"}
    if "memory" not in settings:
        return own, measured(own)["grown"]
    whole = measured({**own, "memory": 1 << 50})
    best = own, whole["grown"]
    beside = whole["grown"] - whole["plain"]  # state, packed weights, the session
    budget, is_least = int(target - beside), False
    for _ in range(_BUDGETS):
        if best[1] <= target or (budget <= 0 and not tightest):
            break
        found = measured({**own, "memory": max(budget, 1)})
        if "least" in found:
            if not (tightest or beside + found["least"] <= target):
                break
            budget, is_least = int(found["least"]), True
            continue
        if found["grown"] < best[1]:
            best = {**own, "memory": budget}, found["grown"]
        if is_least:
            break
        budget -= int(found["grown"] - target) + (1 << 18)
    return best


def _measured(path: str | Path, recipe: Recipe, rows: int) -> dict[str, float]:
    """Measure how much a process grows in a few steps."""
    task = pickle.dumps((str(path), recipe, rows, _STEPS))
    done = subprocesses.run([*subprocesses.PYTHON, "-c", _CODE], input=task)
    if done.returncode == 2:
        raise BadInput(done.stderr.decode(errors="replace").strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"a plan cannot be measured: {done.stderr.decode(errors='replace')[-400:]}")
    return dict(json.loads(done.stdout))


def check_platform() -> None:
    """Raise BadInput where the memory of a process cannot be measured."""
    if sys.platform != "linux":
        raise BadInput(
            "peak measures the memory of a process, which needs Linux\n  hint: memory= plans without measuring"
        )
