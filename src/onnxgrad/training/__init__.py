"""Training: a loss and an optimizer attached to a model, compiled to one step graph, run in a loop."""

from onnxgrad.training.attach import attach
from onnxgrad.training.data import load_npz
from onnxgrad.training.evaluation import Evaluation
from onnxgrad.training.functions import optimizer_function, with_optimizer_functions
from onnxgrad.training.heads import with_head
from onnxgrad.training.initializers import initialize
from onnxgrad.training.interchange import carry_training_info, renamed
from onnxgrad.training.lowering import lower_gradients
from onnxgrad.training.metrics import History
from onnxgrad.training.objective import LossTerm
from onnxgrad.training.oracle import ReferenceTraining
from onnxgrad.training.step import StateTensor, Step, compile_entries, compile_step
from onnxgrad.training.trainer import Interrupted, Trainer
from onnxgrad.training.updating import Group
from onnxgrad.training.validation import Problem, validate

__all__ = [
    "Evaluation",
    "Group",
    "History",
    "Interrupted",
    "LossTerm",
    "Problem",
    "ReferenceTraining",
    "StateTensor",
    "Step",
    "Trainer",
    "attach",
    "carry_training_info",
    "compile_entries",
    "compile_step",
    "initialize",
    "load_npz",
    "lower_gradients",
    "optimizer_function",
    "renamed",
    "validate",
    "with_head",
    "with_optimizer_functions",
]
