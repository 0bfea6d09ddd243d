"""Elementwise arithmetic and elementary functions up the ladder, and their edges."""

import numpy as np

from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes
from tests.rules.evaluators import Erf
from tests.rules.ladder import ladder

POSITIVE = np.array([[0.3, 1.2, 2.5], [0.7, 4.0, 1.5]])
SIGNED = np.array([[-1.3, 0.4, 2.1], [0.9, -0.6, 1.7]])
INSIDE = np.array([[-0.8, 0.3, 0.5], [0.1, -0.4, 0.9]])  # between -1 and 1
BASES = np.array([0.0, 0.0, 0.0, 0.0, 1.5, -1.5, -2.0])
POWERS = np.array([3.0, 2.0, 4.0, 3.0, 0.5, 2.0, -3.0])  # whole for the bases that have no logarithm
CONDITION = np.array([[True, False, True], [False, False, True]])

BINARY = ["Add", "Sub", "Mul", "Div", "Max", "Min"]
VARIADIC = ["Sum", "Mean", "Max", "Min"]

CASES = [
    *[Case(op, [SIGNED, POSITIVE]) for op in BINARY],
    *[Case(op, [(2, 1, 3), (4, 1)]) for op in ("Add", "Sub", "Mul", "Max", "Min")],
    *[Case(op, [(2, 3), ()]) for op in ("Add", "Sub", "Mul", "Max", "Min")],
    Case("Div", [(2, 1, 3), np.array([[1.5], [-0.7]])]),
    Case("Div", [(), POSITIVE]),
    Case("Add", [(0, 3), (3,)]),
    *[Case(op, [(2, 3), (2, 3), (3,)], note="three") for op in VARIADIC],
    *[Case(op, [(2, 3), (2, 1), (3,), ()], note="four") for op in VARIADIC],
    *[Case(op, [(2, 3)], note="one") for op in VARIADIC],
    *[
        Case(op, [SIGNED])
        for op in ("Neg", "Reciprocal", "Exp", "Abs", "Sign", "Floor", "Ceil", "Round", "Identity")
    ],
    *[Case(op, [SIGNED]) for op in ("Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Tanh", "Asinh")],
    Case("Erf", [SIGNED], evaluators=[Erf]),
    *[Case(op, [INSIDE]) for op in ("Asin", "Acos", "Atanh")],
    *[Case(op, [POSITIVE]) for op in ("Log", "Sqrt")],
    Case("Acosh", [POSITIVE + 1]),
    Case("Pow", [POSITIVE, SIGNED]),
    Case("Pow", [POSITIVE, np.array([1.5, -0.5, 0.0])], note="exponent of zero"),
    Case("Pow", [POSITIVE, ()]),
    Case("Pow", [np.array(1.7), SIGNED]),
    Case("Pow", [BASES, POWERS], wrt=[0], atol=1e-5),
    Case("Pow", [SIGNED, np.array([[2, 3, 0], [1, -1, -2]])], note="whole exponents"),
    *[Case("Pow", [SIGNED, np.array(k)], note=f"to the {k}") for k in (0, 1, 2, 3, -1, -2)],
    Case("Mod", [SIGNED * 3.1, POSITIVE], {"fmod": 1}),
    Case("Mod", [SIGNED * 3.1, np.array(-0.7)], {"fmod": 1}),
    Case("Clip", [SIGNED, np.array(-0.5), np.array(1.0)]),
    Case("Clip", [SIGNED, np.array(-0.5)], note="low only"),
    Case("Clip", [SIGNED, None, np.array(1.0)], note="high only"),
    Case("Clip", [SIGNED], note="no bounds"),
    Case("Clip", [SIGNED, np.array(1.0), np.array(-0.5)], note="bounds crossed", runtime=False),
    Case("Where", [CONDITION, (2, 3), (2, 3)]),
    Case("Where", [CONDITION, (3,), (4, 1, 1)]),
    Case("Where", [CONDITION, (), (2, 3)]),
    Case("Cast", [(2, 3)], {"to": 11}, runtime=False),
]
test_rule = ladder("arithmetic", CASES)
test_dtype = dtypes([c for c in CASES if c.op != "Cast"])
