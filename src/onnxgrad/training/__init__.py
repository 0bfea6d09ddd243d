"""Training: a loss and an optimizer attached to a model, compiled to one step graph, run in a loop.

Each name is imported on first use: a `Trainer` needs neither exports nor quantization.
"""

# ruff: noqa: I001
from __future__ import annotations

from typing import TYPE_CHECKING

from onnxgrad._later import import_later

if TYPE_CHECKING:  # ``import x as x`` exports a name to type checkers
    from onnxgrad.training.adapters.combine import combine_adapters as combine_adapters
    from onnxgrad.training.adapters.config import IA3 as IA3, LoHa as LoHa, LoKr as LoKr, LoRA as LoRA, VeRA as VeRA
    from onnxgrad.training.adapters.folder import load_adapter as load_adapter
    from onnxgrad.training.build.attach import attach as attach
    from onnxgrad.training.build.heads import with_head as with_head
    from onnxgrad.training.build.initializers import initialize as initialize
    from onnxgrad.training.data import load_npz as load_npz
    from onnxgrad.training.export.files import export_step as export_step
    from onnxgrad.training.export.web_report import web_report as web_report
    from onnxgrad.training.loop.callbacks import (
        AtEnd as AtEnd,
        Callback as Callback,
        EarlyStopping as EarlyStopping,
        KeepBest as KeepBest,
        Log as Log,
        Metrics as Metrics,
        Plateau as Plateau,
        Pruning as Pruning,
    )
    from onnxgrad.training.loop.checkpoint_parts import consolidate as consolidate
    from onnxgrad.training.loop.evaluation import Evaluation as Evaluation
    from onnxgrad.training.loop.history import History as History
    from onnxgrad.training.loop.interruption import Interrupted as Interrupted
    from onnxgrad.training.loop.progress_bar import reporter as reporter
    from onnxgrad.training.loop.prune import prune as prune
    from onnxgrad.training.loop.quantize import quantize as quantize
    from onnxgrad.training.loop.rewards import grpo as grpo
    from onnxgrad.training.loop.samples import Samples as Samples
    from onnxgrad.training.loop.trackers import (
        MLflow as MLflow,
        TensorBoard as TensorBoard,
        Tracker as Tracker,
        WandB as WandB,
    )
    from onnxgrad.training.loop.train import train as train
    from onnxgrad.training.loop.trainer import Trainer as Trainer
    from onnxgrad.training.loss.config import Loss as Loss
    from onnxgrad.training.measure.evaluate import evaluate as evaluate
    from onnxgrad.training.measure.generate import generate as generate
    from onnxgrad.training.measure.predict import predict as predict
    from onnxgrad.training.measure.teacher import teach as teach
    from onnxgrad.training.measure.texts import compare_texts as compare_texts
    from onnxgrad.training.optim.as_functions import (
        OptimizerFunctions as OptimizerFunctions,
        optimizer_functions as optimizer_functions,
    )
    from onnxgrad.training.optim.config import Group as Group, Optimizer as Optimizer
    from onnxgrad.training.optim.schedules import Schedule as Schedule
    from onnxgrad.training.spec.interchange import carry_training_info as carry_training_info, renamed as renamed
    from onnxgrad.training.spec.lower_model import lower_gradients as lower_gradients
    from onnxgrad.training.spec.optimizer_bodies import (
        optimizer_function as optimizer_function,
        with_optimizer_functions as with_optimizer_functions,
    )
    from onnxgrad.training.spec.reference_training import ReferenceTraining as ReferenceTraining
    from onnxgrad.training.spec.validation import Problem as Problem, validate as validate
    from onnxgrad.training.step.accumulate import (
        Accumulating as Accumulating,
        SplitStep as SplitStep,
        split_step as split_step,
    )
    from onnxgrad.training.step.compile import compile_entries as compile_entries, compile_step as compile_step
    from onnxgrad.training.step.memory_budget import within_memory as within_memory
    from onnxgrad.training.step.step import StateTensor as StateTensor, Step as Step

#: The module of each name.
__getattr__, __all__ = import_later(
    __name__,
    {
        "adapters.combine": ("combine_adapters",),
        "adapters.config": ("IA3", "LoHa", "LoKr", "LoRA", "VeRA"),
        "adapters.folder": ("load_adapter",),
        "build.attach": ("attach",),
        "build.heads": ("with_head",),
        "build.initializers": ("initialize",),
        "data": ("load_npz",),
        "export.files": ("export_step",),
        "export.web_report": ("web_report",),
        "loop.callbacks": ("AtEnd", "Callback", "EarlyStopping", "KeepBest", "Log", "Metrics", "Plateau", "Pruning"),
        "loop.checkpoint_parts": ("consolidate",),
        "loop.evaluation": ("Evaluation",),
        "loop.history": ("History",),
        "loop.interruption": ("Interrupted",),
        "loop.progress_bar": ("reporter",),
        "loop.prune": ("prune",),
        "loop.quantize": ("quantize",),
        "loop.rewards": ("grpo",),
        "loop.samples": ("Samples",),
        "loop.trackers": ("MLflow", "TensorBoard", "Tracker", "WandB"),
        "loop.train": ("train",),
        "loop.trainer": ("Trainer",),
        "loss.config": ("Loss",),
        "measure.evaluate": ("evaluate",),
        "measure.generate": ("generate",),
        "measure.predict": ("predict",),
        "measure.teacher": ("teach",),
        "measure.texts": ("compare_texts",),
        "optim.as_functions": ("OptimizerFunctions", "optimizer_functions"),
        "optim.config": ("Group", "Optimizer"),
        "optim.schedules": ("Schedule",),
        "spec.interchange": ("carry_training_info", "renamed"),
        "spec.lower_model": ("lower_gradients",),
        "spec.optimizer_bodies": ("optimizer_function", "with_optimizer_functions"),
        "spec.reference_training": ("ReferenceTraining",),
        "spec.validation": ("Problem", "validate"),
        "step.accumulate": ("Accumulating", "SplitStep", "split_step"),
        "step.compile": ("compile_entries", "compile_step"),
        "step.memory_budget": ("within_memory",),
        "step.step": ("StateTensor", "Step"),
    },
)
