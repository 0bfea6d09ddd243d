"""Reverse and forward mode over a list of nodes, by the rule of each node."""

from onnxgrad.engine.forward import forward
from onnxgrad.engine.reverse import reverse

__all__ = ["forward", "reverse"]
