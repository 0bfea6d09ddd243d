"""The Dirichlet distribution of probabilities that sum to one."""

from __future__ import annotations

from typing import Any

import scipy.stats as _scipy

from onnxgrad.eager import numpy as np
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.scipy import special as s
from onnxgrad.eager.xp.ufuncs import module_fallback


def logpdf(x: Any, alpha: Any) -> Array:
    """The logarithm of the density at `x`, whose first axis is that of the probabilities, all of them."""
    x, alpha = as_array(x), as_array(alpha)
    powers = np.reshape(alpha, (-1,) + (1,) * (x.ndim - 1)) - 1
    return np.sum(s.xlogy(powers, x), axis=0) + s.gammaln(np.sum(alpha)) - np.sum(s.gammaln(alpha))


def pdf(x: Any, alpha: Any) -> Array:
    """The density at `x`."""
    return np.exp(logpdf(x, alpha))


__getattr__ = module_fallback(_scipy.dirichlet, "scipy.stats.dirichlet")
