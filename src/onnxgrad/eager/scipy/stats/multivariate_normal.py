"""The normal distribution of vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy
import scipy.stats as _scipy

from onnxgrad.eager import numpy as np
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.xp.ufuncs import module_fallback


def logpdf(x: Any, mean: Any, cov: Any, allow_singular: bool = False) -> Array:
    """The logarithm of the density at `x`, of shape (…, n).

    Args:
        x: vectors of n numbers.
        mean: a vector of n numbers, or one number.
        cov: the symmetric covariance, of shape (n, n), or one number.
        allow_singular: whether `cov` may be singular: the density is then that on the subspace it spans, in which
            `x` − `mean` must lie, and the derivative by `cov` is one among matrices of the same rank.
    """
    cov = as_array(cov)
    cov = cov if cov.ndim else np.reshape(cov, (1, 1))
    away = as_array(x) - mean
    away = away if away.ndim else np.reshape(away, (1,))
    if allow_singular:
        values = np.linalg.eigvalsh(cov)
        kept = values._data > 1e6 * numpy.finfo(values.dtype).eps * numpy.max(numpy.abs(values._data))
        count = int(numpy.sum(kept))
        logdet = np.sum(np.log(np.where(kept, values, 1.0)))
        square = np.sum((away @ np.linalg.pinv(cov)) * away, axis=-1)
    else:
        count = cov.shape[0]
        low = np.linalg.cholesky(cov)
        logdet = 2 * np.sum(np.log(np.diagonal(low)))
        rows = np.reshape(away, (-1, count))
        square = np.reshape(np.sum(np.linalg.solve(low, rows.T) ** 2, axis=0), away.shape[:-1])
    return -(count * math.log(2 * math.pi) + logdet + square) / 2


def pdf(x: Any, mean: Any, cov: Any, allow_singular: bool = False) -> Array:
    """The density at `x`; arguments are those of `logpdf`."""
    return np.exp(logpdf(x, mean, cov, allow_singular))


def entropy(mean: Any, cov: Any) -> Array:
    """The differential entropy; it does not depend on the mean."""
    cov = as_array(cov)
    return (cov.shape[0] * (1 + math.log(2 * math.pi)) + np.linalg.slogdet(cov)[1]) / 2


__getattr__ = module_fallback(_scipy.multivariate_normal, "scipy.stats.multivariate_normal")
