"""The process in which a plan is measured: what it grows by from the model to the files of a run of a few steps.

A tiny model is trained before, so that the code of the library is loaded: that does not depend on the plan.
"""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, OnnxGradError
from onnxgrad.model_io import load_model, training_info
from onnxgrad.remat.budget import OverBudget
from onnxgrad.training.loop.checkpoint import Checkpoint
from onnxgrad.training.loop.peak import CARRIES, held_out_rows
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.loop.sparse_update import example_batch
from onnxgrad.training.loop.trainer import Trainer

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
        source = load_model(path, aside=True)  # the caller holds it, as the command does
        if training_info(source):
            raise BadInput(CARRIES)
        plain = _train(source, recipe, rows, steps)
    except OverBudget as error:
        print(json.dumps({"least": error.least}))
        return
    except BadInput as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    print(json.dumps({"grown": resident("VmHWM") - before, "plain": plain}))


def _train(model: ir.Model | onnx.ModelProto, recipe: Recipe, rows: int, steps: int) -> int:
    """Take a few steps, and write the files of a run.

    Returns:
        The bytes of results of a step that were predicted, 0 without a plan.
    """
    trainer = Trainer(model, recipe=recipe, batch_size=rows)
    batch = example_batch(trainer.step, rows, recipe.step.dims)
    for _ in range(steps):
        trainer.machine.step(batch)
    kept = {}
    if recipe.watch.keep_best or recipe.watch.keep:
        kept = {name: array.copy() for name, array in trainer.machine.held.items()}
    with tempfile.TemporaryDirectory(prefix="onnxgrad-", ignore_cleanup_errors=True) as folder:
        if recipe.loop.checkpoint is not None:
            Checkpoint(dict(trainer.machine.held)).save(Path(folder, "checkpoint"))
        file = Path(folder, "trained.onnx")
        trainer.save(file)
        if recipe.data.measures:
            with suppress(OnnxGradError), warnings.catch_warnings(action="ignore"):  # of numbers that mean nothing
                held_out, most = trainer.data(batch), held_out_rows(rows, recipe)
                trainer.evaluation(trainer.strategy.inference_state(), held_out, most, recipe.watch.metrics)
                trainer.evaluation.file(file, held_out, most)
    del kept
    return 0 if trainer.plan is None else trainer.plan.plain


def resident(field: str) -> int:
    """A line of the status of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) * 1024
