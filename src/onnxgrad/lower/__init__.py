"""Operators without a rule: the specification's own function bodies."""

from onnxgrad.lower.bodies import expand

__all__ = ["expand"]
