"""A model over data: its predictions, and metrics of them by name."""

from onnxgrad.training.measure.evaluate import evaluate
from onnxgrad.training.measure.generate import generate
from onnxgrad.training.measure.predict import predict
from onnxgrad.training.metrics.registry import METRICS

__all__ = ["METRICS", "evaluate", "generate", "predict"]
