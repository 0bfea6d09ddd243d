"""Training: a loss and an optimizer attached to a model, compiled to one step graph, run in a loop.

Each name is imported on first use: a `Trainer` needs neither exports nor quantization.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxgrad._later import import_later

if TYPE_CHECKING:
    from onnxgrad.training.adapters.combine import combine_adapters
    from onnxgrad.training.adapters.config import IA3, LoHa, LoKr, LoRA, VeRA
    from onnxgrad.training.adapters.folder import load_adapter
    from onnxgrad.training.build.attach import attach
    from onnxgrad.training.build.heads import with_head
    from onnxgrad.training.build.initializers import initialize
    from onnxgrad.training.data import load_npz
    from onnxgrad.training.export.files import export_step
    from onnxgrad.training.export.web_report import web_report
    from onnxgrad.training.loop.callbacks import (
        AtEnd,
        Callback,
        EarlyStopping,
        KeepBest,
        Log,
        Metrics,
        Plateau,
        Pruning,
    )
    from onnxgrad.training.loop.checkpoint_parts import consolidate
    from onnxgrad.training.loop.evaluation import Evaluation
    from onnxgrad.training.loop.history import History
    from onnxgrad.training.loop.interruption import Interrupted
    from onnxgrad.training.loop.progress_bar import reporter
    from onnxgrad.training.loop.prune import prune
    from onnxgrad.training.loop.quantize import quantize
    from onnxgrad.training.loop.rewards import grpo
    from onnxgrad.training.loop.samples import Samples
    from onnxgrad.training.loop.trackers import MLflow, TensorBoard, Tracker, WandB
    from onnxgrad.training.loop.train import train
    from onnxgrad.training.loop.trainer import Trainer
    from onnxgrad.training.loss.config import Loss
    from onnxgrad.training.measure.evaluate import evaluate
    from onnxgrad.training.measure.generate import generate
    from onnxgrad.training.measure.predict import predict
    from onnxgrad.training.measure.teacher import teach
    from onnxgrad.training.measure.texts import compare_texts
    from onnxgrad.training.optim.as_functions import OptimizerFunctions, optimizer_functions
    from onnxgrad.training.optim.config import Group, Optimizer
    from onnxgrad.training.optim.schedules import Schedule
    from onnxgrad.training.spec.interchange import carry_training_info, renamed
    from onnxgrad.training.spec.lower_model import lower_gradients
    from onnxgrad.training.spec.optimizer_bodies import optimizer_function, with_optimizer_functions
    from onnxgrad.training.spec.reference_training import ReferenceTraining
    from onnxgrad.training.spec.validation import Problem, validate
    from onnxgrad.training.step.accumulate import Accumulating, SplitStep, split_step
    from onnxgrad.training.step.compile import compile_entries, compile_step
    from onnxgrad.training.step.memory_budget import within_memory
    from onnxgrad.training.step.step import StateTensor, Step

__all__ = [
    "IA3",
    "Accumulating",
    "AtEnd",
    "Callback",
    "EarlyStopping",
    "Evaluation",
    "Group",
    "History",
    "Interrupted",
    "KeepBest",
    "LoHa",
    "LoKr",
    "LoRA",
    "Log",
    "Loss",
    "MLflow",
    "Metrics",
    "Optimizer",
    "OptimizerFunctions",
    "Plateau",
    "Problem",
    "Pruning",
    "ReferenceTraining",
    "Samples",
    "Schedule",
    "SplitStep",
    "StateTensor",
    "Step",
    "TensorBoard",
    "Tracker",
    "Trainer",
    "VeRA",
    "WandB",
    "attach",
    "carry_training_info",
    "combine_adapters",
    "compare_texts",
    "compile_entries",
    "compile_step",
    "consolidate",
    "evaluate",
    "export_step",
    "generate",
    "grpo",
    "initialize",
    "load_adapter",
    "load_npz",
    "lower_gradients",
    "optimizer_function",
    "optimizer_functions",
    "predict",
    "prune",
    "quantize",
    "renamed",
    "reporter",
    "split_step",
    "teach",
    "train",
    "validate",
    "web_report",
    "with_head",
    "with_optimizer_functions",
    "within_memory",
]

#: The module of each name.
__getattr__ = import_later(
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
