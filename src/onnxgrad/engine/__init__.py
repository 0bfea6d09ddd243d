"""Reverse and forward mode over a list of nodes; knows no operator by name."""

from onnxgrad.engine.forward import forward
from onnxgrad.engine.reverse import reverse

__all__ = ["forward", "reverse"]
