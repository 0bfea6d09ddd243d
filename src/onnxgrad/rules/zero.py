"""Operators whose derivative is zero, and those that have none."""

from __future__ import annotations

from onnxgrad.rules.registry import undefined, zero

zero("Shape", "Size", "ConstantOfShape", "EyeLike", "NonZero", reason="only the shape or the pattern is read")
zero(*"ArgMax ArgMin Ceil Equal Floor Greater GreaterOrEqual Hardmax IsInf IsNaN Less LessOrEqual Round Sign".split())
undefined(*"Bernoulli Multinomial".split(), reason="its result is a random sample, which does not depend smoothly on x")
