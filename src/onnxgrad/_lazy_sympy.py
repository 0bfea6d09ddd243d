"""Have onnx_ir and onnx_shape_inference imported without sympy, which takes longer than all else of a derivation.

They need sympy for arithmetic with symbolic dimensions only, but import it at once. While they are imported after
onnxgrad, stand-ins take the place of sympy, and of the module that builds a table of its classes. A stand-in loads its
module when anything of it is used. Other imports of sympy are not affected. If sympy has been imported before, or a
version of the packages needs more of it at once, they are imported as usual.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: Packages to import without sympy, each with a module of it that it imports later.
_PACKAGES = {"onnx_ir": "onnx_ir.serde", "onnx_shape_inference": "onnx_shape_inference._ops"}
_REPLACED = ("sympy", "onnx_shape_inference._constraints")


class SympyFunction:
    """A function of sympy that was looked up before sympy was loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any) -> Any:
        """Call the function of sympy."""
        return getattr(importlib.import_module("sympy"), self._name)(*arguments)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            return SympyFunction(name)
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _stand_ins() -> Iterator[None]:
    made = {name: _StandIn(name) for name in _REPLACED if name not in sys.modules}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, stand_in in made.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


class _WithoutSympy(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        try:
            with _stand_ins():
                self._loader.exec_module(module)
                importlib.import_module(_PACKAGES[name])
        except Exception:
            for inner in [n for n in sys.modules if n.startswith(f"{name}.")]:
                del sys.modules[inner]
            self._loader.exec_module(module)


class Finder(MetaPathFinder):
    """Finds the two packages, once each."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual place of one of the packages, with a loader that leaves sympy out; None for other modules."""
        if fullname not in _PACKAGES or "sympy" in sys.modules:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithoutSympy(spec.loader)
        return spec
