"""The door: load and save, raise the opset, inline functions, name what is derived."""

from onnxgrad.door.opening import AnyModel, Opened, open_model
from onnxgrad.door.signature import Signature, signature

__all__ = ["AnyModel", "Opened", "Signature", "open_model", "signature"]
