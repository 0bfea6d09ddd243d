"""Derivatives of a user's own: for an operator, a local function or a sub-graph of one model."""

from onnxgrad.custom.rules import CustomRule, custom_jvp, custom_rules, custom_vjp, load_rule
from onnxgrad.custom.writing import iterate, pullback

__all__ = ["CustomRule", "custom_jvp", "custom_rules", "custom_vjp", "iterate", "load_rule", "pullback"]
