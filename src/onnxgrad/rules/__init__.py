"""The rules, one file per family; importing this package fills the registry."""

from onnxgrad.rules import (  # the one place where families are listed
    activation,
    arithmetic,
    linalg,
    reduce,
    shape,
    zero,
)
from onnxgrad.rules.registry import elementwise, linear, registry, rule, symmetric, undefined

__all__ = [
    "activation",
    "arithmetic",
    "elementwise",
    "linalg",
    "linear",
    "reduce",
    "registry",
    "rule",
    "shape",
    "symmetric",
    "undefined",
    "zero",
]
