"""The rules, one file per family; importing this package fills the registry."""

from onnxgrad.rules import (  # the one place where families are listed
    activation,
    arithmetic,
    dropout,
    extrema,
    index,
    linalg,
    loss,
    reduce,
    shape,
    softmax,
    trigonometry,
    zero,
)
from onnxgrad.rules.registry import elementwise, linear, registry, rule, symmetric, undefined

__all__ = [
    "activation",
    "arithmetic",
    "dropout",
    "elementwise",
    "extrema",
    "index",
    "linalg",
    "linear",
    "loss",
    "reduce",
    "registry",
    "rule",
    "shape",
    "softmax",
    "symmetric",
    "trigonometry",
    "undefined",
    "zero",
]
