"""The rules, one file per family; importing this package fills the registry."""

from onnxgrad.rules import (  # the one place where families are listed
    activation,
    arithmetic,
    conv,
    dropout,
    extrema,
    index,
    linalg,
    loss,
    pad,
    reduce,
    scatter,
    shape,
    softmax,
    trigonometry,
    zero,
)
from onnxgrad.rules.registry import elementwise, linear, registry, rule, symmetric, undefined

__all__ = [
    "activation",
    "arithmetic",
    "conv",
    "dropout",
    "elementwise",
    "extrema",
    "index",
    "linalg",
    "linear",
    "loss",
    "pad",
    "reduce",
    "registry",
    "rule",
    "scatter",
    "shape",
    "softmax",
    "symmetric",
    "trigonometry",
    "undefined",
    "zero",
]
