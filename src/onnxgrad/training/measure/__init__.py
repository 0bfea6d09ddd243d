"""A model over data: its predictions, and metrics of them by name."""

from onnxgrad.training.measure.evaluate import evaluate
from onnxgrad.training.measure.metrics import METRICS
from onnxgrad.training.measure.predict import predict

__all__ = ["METRICS", "evaluate", "predict"]
