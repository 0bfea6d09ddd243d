"""Operators as the specification has them, where the reference evaluator departs from it."""

from math import erf

import numpy as np
from onnx.reference.op_run import OpRun


class Erf(OpRun):
    """In the dtype of x; the evaluator's own computes in float32 and so spoils central differences."""

    op_domain = ""

    def _run(self, x):
        return (np.vectorize(erf, otypes=[np.float64])(x).astype(x.dtype),)


class Gelu(OpRun):
    """In the dtype of x; see Erf."""

    op_domain = ""

    def _run(self, x, approximate="none"):
        if approximate == "tanh":
            inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
            return ((0.5 * x * (1 + np.tanh(inner))).astype(x.dtype),)
        return ((0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2)))).astype(x.dtype),)


class Flatten(OpRun):
    """Of empty tensors too, where the evaluator's own asks numpy to infer a dimension."""

    op_domain = ""

    def _run(self, x, axis=1):
        return (x.reshape(int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:]))),)


class AffineGrid(OpRun):
    """In the dtype of theta, which the evaluator's own rounds to float32."""

    op_domain = ""

    def _run(self, theta, size, align_corners=0):
        axes = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in size[2:]]
        grid = np.meshgrid(*axes, indexing="ij")
        points = np.stack([*grid[::-1], np.ones(size[2:])], axis=-1)
        return (np.einsum("nij,...j->n...i", theta, points).astype(theta.dtype),)


class Cast(OpRun):
    """Does not round to float32, in which statistics and scores are declared whatever the type of x."""

    op_domain = ""

    def _run(self, x, to=None, saturate=None, round_mode=None):
        return (x.astype({1: np.float64, 11: np.float64, 7: np.int64, 9: np.bool_}[to]),)


class DequantizeLinear(OpRun):
    """The reference evaluator's own computes in float32."""

    op_domain = ""

    def _run(self, x, scale, zero=None, axis=1, block_size=0, output_dtype=0):
        def along(v):
            if np.ndim(v) == 1 and not block_size:
                return np.reshape(v, [-1 if a == axis % x.ndim else 1 for a in range(x.ndim)]) if v.size > 1 else v[0]
            repeated = np.repeat(v, block_size, axis) if block_size else v
            return repeated if not block_size else np.take(repeated, range(x.shape[axis]), axis)

        shift = 0.0 if zero is None else along(np.asarray(zero, np.float64))
        y = (np.asarray(x, np.float64) - shift) * along(np.asarray(scale, np.float64))
        return (y if scale.dtype == np.float64 else y.astype(scale.dtype),)
