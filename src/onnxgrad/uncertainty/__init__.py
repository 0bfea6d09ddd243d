"""Models whose outputs are a prediction and its spread, or sets that contain the label with a chosen probability."""

from onnxgrad.uncertainty.held_out import conformal, scaled
from onnxgrad.uncertainty.last_layer import laplace
from onnxgrad.uncertainty.samples import dropout, ensemble, train_members

__all__ = ["conformal", "dropout", "ensemble", "laplace", "scaled", "train_members"]
