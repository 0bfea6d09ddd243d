"""Alias module: after ``import onnxgrad.eager.as_autograd``, ``import autograd`` is `onnxgrad.eager.autograd`.

Submodules as well: ``autograd.numpy`` (with ``linalg``, ``fft``, ``random``), ``autograd.scipy`` if SciPy is installed,
``autograd.extend``, ``autograd.misc``, ``autograd.builtins``, ``autograd.test_util``. It raises if HIPS/autograd itself
is imported already: a program that mixed the two would fail later, and less clearly.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import numpy

from onnxgrad.eager import autograd


def _modules() -> dict[str, Any]:
    """The modules by the names that a program imports them by."""
    here = autograd.__name__
    names = {"": here, **{f".{n}": f"{here}.{n}" for n in ("builtins", "core", "extend", "misc", "test_util", "util")}}
    names |= {".numpy": "onnxgrad.eager.numpy"}
    names |= {f".numpy.{n}": f"onnxgrad.eager.xp.{n}" for n in ("linalg", "fft")}
    names |= {f".misc.{n}": f"{here}.misc" for n in ("flatten", "optimizers", "fixed_points")}
    names |= {".differential_operators": here, ".tracer": f"{here}.core", ".wrap_util": f"{here}.nary"}
    if importlib.util.find_spec("scipy"):
        parts = ("integrate", "linalg", "signal", "special", "stats", "stats.dirichlet", "stats.multivariate_normal")
        names |= {".scipy": "onnxgrad.eager.scipy", **{f".scipy.{n}": f"onnxgrad.eager.scipy.{n}" for n in parts}}
    modules = {k: importlib.import_module(v) for k, v in names.items()} | {".numpy.random": numpy.random}
    if stats := modules.get(".scipy.stats"):  # distributions are modules there
        modules |= {f".scipy.stats.{n}": getattr(stats, n) for n in stats.__all__}
    return modules


def _install() -> None:
    installed = sys.modules.get("autograd")
    if installed is not None and installed is not autograd:
        raise ImportError("HIPS/autograd is imported already\n  hint: import onnxgrad.eager.as_autograd before it")
    for name, module in _modules().items():
        sys.modules[f"autograd{name}"] = module
        parent, _, leaf = name.rpartition(".")
        if leaf and leaf not in ("flatten", "core") and not hasattr(sys.modules[f"autograd{parent}"], leaf):
            setattr(sys.modules[f"autograd{parent}"], leaf, module)


_install()
