"""Functions of SciPy with derivatives: `special`, `stats`, `linalg`, `signal`, `integrate`.

Values are SciPy's, which must be installed (``pip install scipy``). Names of SciPy that are not defined here work on
arrays without a derivative, and are refused on the others.
"""

import importlib.util as _util

if _util.find_spec("scipy") is None:
    needs = "onnxgrad.eager.scipy takes its values from SciPy\n  hint: pip install 'onnxgrad[scipy]'"
    raise ModuleNotFoundError(needs, name="scipy")

from onnxgrad.eager.scipy import integrate, linalg, signal, special, stats

__all__ = ["integrate", "linalg", "signal", "special", "stats"]
