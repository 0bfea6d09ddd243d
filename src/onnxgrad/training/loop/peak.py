"""A limit of memory as a promise: plans are tried in processes of their own until one is measured within it.

The memory is what a process that has loaded the library grows by for the model, its step, the session, the state and
the steps; data are the caller's. Plans are tried from the fastest to the smallest: everything kept, results computed
anew, batches in parts, and at last fewer layers that train.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.model_io import save_model, training_info
from onnxgrad.model_io.hub import HubFile
from onnxgrad.remat import amount
from onnxgrad.remat.budget import megabytes
from onnxgrad.training.loop.recipe import LogRecipe, Recipe, WatchRecipe
from onnxgrad.training.measure.predict import as_given

#: Layers that train where everything else is too large, from the last.
_LAYERS = (8, 4, 2, 1)
_STEPS = 3
CARRIES = "peak chooses how a model is trained; this one carries training information"
_CODE = "from onnxgrad.training.loop.peak_probe import main; main()"


def within_peak(model: Any, recipe: Recipe, batch_size: int) -> tuple[Recipe, str]:
    """`recipe` with the first plan that is measured within its `peak`, and a note of it.

    Raises:
        BadInput: none is; the message has the smallest limit that can be met.
    """
    assert recipe.step.peak is not None
    most = amount(recipe.step.peak)
    plain = replace(recipe, step=replace(recipe.step, peak=None), watch=WatchRecipe(), log=LogRecipe())
    with tempfile.TemporaryDirectory(prefix="onnxgrad-", ignore_cleanup_errors=True) as folder:
        path = os.path.abspath(model) if _is_file(model) else os.path.join(folder, "model.onnx")
        if not _is_file(model):
            source = as_given(model)
            if training_info(source):
                raise BadInput(CARRIES)
            save_model(source, path)
        least, reasons = float("inf"), ""
        for changes in _plans(plain, batch_size):
            found = _fit_plan(path, plain, changes, batch_size, most)
            if isinstance(found, str):
                reasons = found
                continue
            settings, measured = found
            if measured <= most:
                said = ", ".join(f"{key}={_text(value)}" for key, value in settings.items()) or "everything kept"
                note = f"{megabytes(measured)} measured within {megabytes(most)}: {said}"
                return _changed(replace(recipe, step=replace(recipe.step, peak=None)), settings), note
            least = min(least, measured)
    said = f"the smallest limit that can be met is {megabytes(least)}" if least < float("inf") else reasons
    raise BadInput(f"training with batches of {batch_size} rows cannot be done within {megabytes(most)}: {said}")


def _is_file(model: Any) -> bool:
    return isinstance(model, (str, os.PathLike)) and HubFile.of(model) is None


def _text(value: Any) -> str:
    return value[0] if isinstance(value, list) else str(value)


def _plans(recipe: Recipe, rows: int) -> Iterator[dict[str, Any]]:
    """Settings to try, the fastest first; ``memory`` True: as much as is left."""
    yield {}
    parts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= rows]
    for accumulate in parts:
        yield {"memory": True, "accumulate": accumulate} if accumulate > 1 else {"memory": True}
    if recipe.weights.trainable is None and recipe.adapter.build_adapter() is None:
        for layers in _LAYERS:
            yield {"memory": True, "accumulate": parts[-1], "trainable": [f"last:{layers}"]}


def _changed(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    step = {key: settings[key] for key in ("memory", "accumulate") if key in settings}
    weights = {key: settings[key] for key in ("trainable",) if key in settings}
    return replace(recipe, step=replace(recipe.step, **step), weights=replace(recipe.weights, **weights))


def _fit_plan(
    path: str, recipe: Recipe, changes: dict[str, Any], rows: int, most: int
) -> tuple[dict[str, Any], float] | str:
    """Settings of a plan, and the measured memory; the reason why the plan is none, as text."""
    settings = {key: value for key, value in changes.items() if key != "memory"}
    if "memory" not in changes:
        return settings, _measured(path, _changed(recipe, settings), rows)["grown"]
    try:
        whole = _measured(path, _changed(recipe, {**settings, "memory": 1 << 50}), rows)
    except BadInput as error:
        return str(error)
    if whole["grown"] <= most:
        return settings, whole["grown"]
    best = settings, whole["grown"]
    beside = whole["grown"] - whole["plain"]  # state, packed weights, the session
    budget = int(most - beside)
    for _ in range(2):
        if budget <= 0:
            break
        try:
            found = _measured(path, _changed(recipe, {**settings, "memory": budget}), rows)
        except BadInput:
            break
        if found["grown"] < best[1]:
            best = {**settings, "memory": budget}, found["grown"]
        if found["grown"] <= most:
            break
        budget -= int(found["grown"] - most) + (1 << 18)
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
