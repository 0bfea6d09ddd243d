"""Training: a loss and an optimizer attached to a model, compiled to one step graph, run in a loop."""

from onnxgrad.training.adapters.combine import combine_adapters
from onnxgrad.training.adapters.config import IA3, LoHa, LoKr, LoRA, VeRA
from onnxgrad.training.adapters.folder import load_adapter
from onnxgrad.training.build.attach import attach
from onnxgrad.training.build.heads import with_head
from onnxgrad.training.build.initializers import initialize
from onnxgrad.training.data import load_npz
from onnxgrad.training.export.files import export_step
from onnxgrad.training.export.web_report import web_report
from onnxgrad.training.loop.callbacks import AtEnd, Callback, EarlyStopping, KeepBest, Log, Metrics, Plateau, Pruning
from onnxgrad.training.loop.checkpoint_parts import consolidate
from onnxgrad.training.loop.evaluation import Evaluation
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.interruption import Interrupted
from onnxgrad.training.loop.progress import reporter
from onnxgrad.training.loop.prune import prune
from onnxgrad.training.loop.quantize import quantize
from onnxgrad.training.loop.rewards import grpo
from onnxgrad.training.loop.samples import Samples
from onnxgrad.training.loop.trackers import MLflow, TensorBoard, Tracker, WandB
from onnxgrad.training.loop.train import train
from onnxgrad.training.loop.trainer import Trainer
from onnxgrad.training.loss.config import Loss
from onnxgrad.training.measure import evaluate, generate, predict
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
