"""Functions of SciPy with derivatives: `special`, `stats`, `linalg`, `signal`, `integrate`.

Values are SciPy's, which must be installed (``pip install scipy``). Names of SciPy that are not defined here work on
arrays without a derivative, and are refused on the others.
"""

import importlib as _importlib
import importlib.util as _util
from typing import TYPE_CHECKING
from typing import Any as _Any

if _util.find_spec("scipy") is None:
    needs = "onnxgrad.eager.scipy takes its values from SciPy\n  hint: pip install 'onnxgrad[scipy]'"
    raise ModuleNotFoundError(needs, name="scipy")

if TYPE_CHECKING:
    from onnxgrad.eager.scipy import integrate, linalg, signal, special, stats

__all__ = ["integrate", "linalg", "signal", "special", "stats"]


def __getattr__(name: str) -> _Any:
    if name in __all__:  # as SciPy does: stats alone takes half a second
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
