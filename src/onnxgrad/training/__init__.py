"""Training: a loss and an optimizer attached to a model, compiled to one step graph, run in a loop."""

from onnxgrad.training.accumulate import Accumulating, SplitStep, split_step
from onnxgrad.training.attach import attach
from onnxgrad.training.data import load_npz
from onnxgrad.training.evaluation import Evaluation
from onnxgrad.training.export import export_step
from onnxgrad.training.functions import optimizer_function, with_optimizer_functions
from onnxgrad.training.heads import with_head
from onnxgrad.training.initializers import initialize
from onnxgrad.training.interchange import carry_training_info, renamed
from onnxgrad.training.lowering import lower_gradients
from onnxgrad.training.memory import within_memory
from onnxgrad.training.metrics import History
from onnxgrad.training.objective import LossTerm
from onnxgrad.training.optimizer_functions import OptimizerFunctions, optimizer_functions
from onnxgrad.training.oracle import ReferenceTraining
from onnxgrad.training.schedules import Schedule
from onnxgrad.training.step import StateTensor, Step, compile_entries, compile_step
from onnxgrad.training.trainer import Interrupted, Trainer
from onnxgrad.training.updating import Group
from onnxgrad.training.validation import Problem, validate

__all__ = [
    "Accumulating",
    "Evaluation",
    "Group",
    "History",
    "Interrupted",
    "LossTerm",
    "OptimizerFunctions",
    "Problem",
    "ReferenceTraining",
    "Schedule",
    "SplitStep",
    "StateTensor",
    "Step",
    "Trainer",
    "attach",
    "carry_training_info",
    "compile_entries",
    "compile_step",
    "export_step",
    "initialize",
    "load_npz",
    "lower_gradients",
    "optimizer_function",
    "optimizer_functions",
    "renamed",
    "split_step",
    "validate",
    "with_head",
    "with_optimizer_functions",
    "within_memory",
]
