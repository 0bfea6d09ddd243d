"""The shared library of kernels: built when the package was installed, chosen once per process.

A wheel for a platform and an installation from source with a C compiler contain a library for each kind of processor.
Nothing is compiled while the package runs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from onnxgrad.errors import BadInput
from onnxgrad.runtime.failures import one_line
from onnxgrad.runtime.kernels.processors import name_library, supported_kinds

SOURCES = Path(__file__).parent / "source"
#: The folder of the libraries.
FOLDER = Path(__file__).parent / "prebuilt"
#: The variable of the environment that names another library, such as one with sanitizers.
LIBRARY = "ONNXGRAD_LIBRARY"

_HINT = (
    "  hint: install a wheel for this platform, or install onnxgrad again where there is a C compiler "
    "(Debian, Ubuntu: apt install gcc), or use target 'portable'"
)


@dataclass(frozen=True)
class Kernels:
    """The library that this process uses, or the reason why it uses none by default.

    Attributes:
        place: the library; None if there is none for this processor.
        missing: why the target "auto" is "portable"; empty if it is "native".
    """

    place: Path | None
    missing: str = ""


@functools.cache
def installed() -> Kernels:
    """The best library for this processor that ONNX Runtime loads. Decided once per process."""
    place = _find(FOLDER)
    if place is None:
        return Kernels(None, _reason(FOLDER))
    if sys.platform != "linux" and not os.environ.get(LIBRARY):
        return Kernels(place, f"kernels have not been tested on {sys.platform}; target 'native' runs them")
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(place))
    except Exception as error:  # ONNX Runtime's exceptions have no other base class in common
        return Kernels(None, f"ONNX Runtime cannot load {place.name}: {one_line(error)}")
    return Kernels(place)


def has_kernels() -> bool:
    """True if the target "auto" is "native" on the CPU."""
    return not installed().missing


def library() -> Path:
    """The library of kernels for this processor.

    Raises:
        BadInput: there is none.
    """
    kernels = installed()
    if kernels.place is None:
        raise BadInput(f"target 'native' has no kernels here: {kernels.missing}\n{_HINT}")
    return kernels.place


def overwrites() -> ctypes.c_int64:
    """The number of updates by kernels, in this process so far, that have overwritten their operands."""
    return ctypes.c_int64.in_dll(ctypes.CDLL(str(library())), "onnxgrad_overwrites")


def _find(folder: Path) -> Path | None:
    if other := os.environ.get(LIBRARY):
        return Path(other).resolve()
    places = (folder / name_library(SOURCES, kind) for kind in supported_kinds())
    return next((place for place in places if place.is_file()), None)


def _reason(folder: Path) -> str:
    if folder.is_dir() and any(folder.iterdir()) and supported_kinds():
        reason = "the kernels were built from other sources or for another processor; install onnxgrad again"
        warnings.warn(reason, stacklevel=2)
        return reason
    return "this installation has no kernels, since no C compiler was found when it was installed"
