"""All callbacks of a run in one place: ``from onnxgrad.callbacks import EarlyStopping, TensorBoard``."""

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
from onnxgrad.training.loop.progress_bar import reporter
from onnxgrad.training.loop.samples import Samples
from onnxgrad.training.loop.trackers import MLflow, TensorBoard, Tracker, WandB

__all__ = [
    "AtEnd",
    "Callback",
    "EarlyStopping",
    "KeepBest",
    "Log",
    "MLflow",
    "Metrics",
    "Plateau",
    "Pruning",
    "Samples",
    "TensorBoard",
    "Tracker",
    "WandB",
    "reporter",
]
