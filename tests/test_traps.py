"""No derivative of any rule's cases, of first or second order, holds what ONNX Runtime computes wrongly."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest

import tests.rules
from onnxgrad import jvp, signature, vjp
from onnxgrad.testing import Case, _array, node_model
from tests.models import assert_no_traps

FAMILIES = sorted(m.name for m in pkgutil.iter_modules(tests.rules.__path__) if m.name.startswith("test_"))


def _cases(family: str) -> list[Case]:
    return list(getattr(importlib.import_module(f"tests.rules.{family}"), "CASES", []))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_traps(family):
    for case in _cases(family):
        rng = np.random.default_rng(0)
        feeds = {f"x{i}": _array(x, rng) for i, x in enumerate(case.inputs) if x is not None}
        primal = node_model(case, feeds)
        floats = [i for i, x in enumerate(case.inputs) if x is not None and feeds[f"x{i}"].dtype.kind == "f"]
        wrt = [f"x{i}" for i in (floats if case.wrt is None else case.wrt)]
        of = None if case.of is None else [f"y{i}" for i in case.of]
        pulled, pushed = vjp(primal, wrt=wrt, of=of), jvp(primal, wrt=wrt, of=of)
        derived = [pulled, pushed]
        if case.order > 1:
            names = signature(pulled)
            through = [*wrt, *names.cotangents.values()]
            gradients = list(names.gradients.values())
            derived += [mode(pulled, wrt=through, of=gradients) for mode in (vjp, jvp)]
        for model in derived:
            assert_no_traps(model, primal)


def test_there_are_cases():
    assert sum(len(_cases(family)) for family in FAMILIES) > 50
