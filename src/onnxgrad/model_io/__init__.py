"""Models in and out: load and save, upgrade the opset, inline functions, record the signature of a derived model."""

from onnxgrad.external_data import files_of
from onnxgrad.model_io.open import AnyModel, Opened, open_model
from onnxgrad.model_io.read import load_model, training_info
from onnxgrad.model_io.save import save_model, to_proto
from onnxgrad.model_io.signature import Signature, signature

__all__ = [
    "AnyModel",
    "Opened",
    "Signature",
    "files_of",
    "load_model",
    "open_model",
    "save_model",
    "signature",
    "to_proto",
    "training_info",
]
