"""The process in which a plan is measured: what it grows by from the model to the last of a few steps.

A tiny model is trained before, so that the code of the library is loaded: that does not depend on the plan.
"""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
import sys
from contextlib import suppress
from pathlib import Path

import onnx

from onnxgrad.errors import BadInput
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.loop.sparse_update import example_batch
from onnxgrad.training.loop.trainer_setup import set_up

_TINY = """<ir_version: 10, opset_import: ["": 21]>
    tiny (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }"""


def main() -> None:
    """Read a task from standard input, and print the bytes that it takes."""
    path, recipe, rows, steps = pickle.loads(sys.stdin.buffer.read())  # of the process that started this one
    try:
        tiny = Recipe.of("train", {"loss": "mse", "distributed": "none"}, (*TRAINER, *FIT))
        _train(onnx.parser.parse_model(_TINY), tiny, 2, 1)
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        plain = _train(path, recipe, rows, steps)
    except BadInput as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    print(json.dumps({"grown": resident("VmHWM") - before, "plain": plain}))


def _train(model: str | onnx.ModelProto, recipe: Recipe, rows: int, steps: int) -> int:
    """Take a few steps. Returns the bytes of results of a step that were predicted, 0 without a plan."""
    setup = set_up(model, recipe, rows)
    machine = setup.machine(setup.strategy, setup.options)
    batch = example_batch(setup.step, rows, recipe.step.dims)
    for _ in range(steps):
        machine.step(batch)
    return 0 if setup.plan is None else setup.plan.plain


def resident(field: str) -> int:
    """A line of the status of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) * 1024
