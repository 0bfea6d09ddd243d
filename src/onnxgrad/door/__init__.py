"""The door: load and save, raise the opset, inline functions, name what is derived."""

from onnxgrad.door.external import files_of
from onnxgrad.door.opening import AnyModel, Opened, open_model
from onnxgrad.door.reading import load_model, training_info
from onnxgrad.door.saving import save_model, to_proto
from onnxgrad.door.signature import Signature, signature

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
