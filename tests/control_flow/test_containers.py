"""Derivatives by and of sequences and optionals: the oracle is the same program on the tensors in them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad import BadInput, Function
from onnxgrad.check import check
from tests.control_flow.compare import normal

T = "float[2,3]"
#: inputs (a list is a sequence) and outputs, each with the names of the tensors in it; the program; the plain program
PROGRAMS = {
    "a sequence in": (
        {"q": ["a", "b"], "x": "x"},
        {"y": "y"},
        f"(seq({T}) q, {T} x) => (float[4,3] y) {{ c = ConcatFromSequence <axis = 0> (q)"
        " n = Constant <value_int = -1> () e = SequenceAt (q, n) m = Mul (e, x)"
        " i = Concat <axis = 0> (m, m) y = Mul (c, i) }",
        f"({T} a, {T} b, {T} x) => (float[4,3] y)"
        " { c = Concat <axis = 0> (a, b) m = Mul (b, x) i = Concat <axis = 0> (m, m) y = Mul (c, i) }",
    ),
    "a sequence out": (
        {"x": "x", "z": "z"},
        {"q": ["a", "b"]},
        f"({T} x, {T} z) => (seq({T}) q) {{ s = Sin (x) m = Mul (s, z) q = SequenceConstruct (s, m) }}",
        f"({T} x, {T} z) => ({T} a, {T} b) {{ a = Sin (x) b = Mul (a, z) }}",
    ),
    "a sequence in and out": (
        {"q": ["a", "b"], "x": "x"},
        {"r": ["c", "d", "e"]},
        f"(seq({T}) q, {T} x) => (seq({T}) r) {{ n = Constant <value_int = 0> () e = SequenceAt (q, n) m = Mul (e, x)"
        " r = SequenceInsert (q, m) }",
        f"({T} a, {T} b, {T} x) => ({T} c, {T} d, {T} e) {{ c = Identity (a) d = Identity (b) e = Mul (a, x) }}",
    ),
    "a sequence that is handed on": (
        {"q": ["a", "b"]},
        {"r": ["c", "d"]},
        f"(seq({T}) q) => (seq({T}) r) {{ r = Identity (q) }}",
        f"({T} a, {T} b) => ({T} c, {T} d) {{ c = Identity (a) d = Identity (b) }}",
    ),
    "an optional in": (
        {"o": "a"},
        {"y": "y"},
        f"(optional({T}) o) => ({T} y) {{ a = OptionalGetElement (o) y = Sin (a) }}",
        f"({T} a) => ({T} y) {{ y = Sin (a) }}",
    ),
    "an optional out": (
        {"x": "x"},
        {"o": "y"},
        f"({T} x) => (optional({T}) o) {{ s = Sin (x) o = Optional (s) }}",
        f"({T} x) => ({T} y) {{ y = Sin (x) }}",
    ),
    "an optional sequence": (
        {"o": ["a", "b"]},
        {"r": ["c", "d"]},
        f"(optional(seq({T})) o) => (seq({T}) r) {{ q = OptionalGetElement (o)"
        f" r = SequenceMap <body = f ({T} e) => ({T} h) {{ h = Sin (e) }}> (q) }}",
        f"({T} a, {T} b) => ({T} c, {T} d) {{ c = Sin (a) d = Sin (b) }}",
    ),
}


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 18]> g ' + text)


def flat(values: list) -> list:
    return [a for v in values for a in (v if isinstance(v, list) else [v])]


def listed(found) -> list:
    return flat(list(found.values()) if isinstance(found, dict) else [found])


@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_by_and_of_containers(name):
    inputs, outputs, *texts = PROGRAMS[name]
    models = [parsed(text) for text in texts]
    functions = [Function(m) for m in models]

    def filled(ends: dict) -> list:
        return [[normal(2, 3) for _ in n] if isinstance(n, list) else normal(2, 3) for n in ends.values()]

    x, tangents = filled(inputs), filled(inputs)
    cotangents = filled(outputs) if name != "a sequence in" else [normal(4, 3)]
    ends = [(list(inputs), list(outputs)), (flat(list(inputs.values())), flat(list(outputs.values())))]
    found = []
    for f, (wrt, of), spread in zip(functions, ends, (list, flat)):
        results = [f(*spread(x)), f.grad(wrt=wrt)(*spread(x)), f.vjp(wrt=wrt, of=of)(*spread(x), *spread(cotangents))]
        results.append(f.jvp(wrt=wrt, of=of)(*spread(x), *spread(tangents)))
        results.append(f.jvp(wrt=wrt, of=of).grad(wrt=wrt)(*spread(x), *spread(tangents)))
        found.append([listed(r) for r in results])
    for got, want in zip(*found):
        assert len(got) == len(want)
        for g, w in zip(got, want):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
    for model, (wrt, of) in zip(models, ends):
        onnx.checker.check_model(onnxgrad.vjp(model, wrt=wrt, of=of), full_check=True)
        assert check(model, wrt=wrt, of=of).differentiable


def test_an_optional_that_holds_nothing():
    """It has a derivative of nothing, and takes no part."""
    model = parsed(f"""(optional({T}) o, {T} x) => ({T} y) {{ h = OptionalHasElement (o)
        y = If (h) <then_branch = t () => ({T} a) {{ v = OptionalGetElement (o) a = Mul (v, x) }},
                    else_branch = e () => ({T} b) {{ b = Sin (x) }}> }}""")
    f, x, v = Function(model).grad(wrt=["o", "x"]), normal(2, 3), normal(2, 3)
    found = f(v, x)
    np.testing.assert_allclose(found["o"], x, rtol=1e-6)
    np.testing.assert_allclose(found["x"], v, rtol=1e-6)
    found = f(None, x)
    assert found["o"] is None
    np.testing.assert_allclose(found["x"], np.cos(x), rtol=1e-5)


def test_what_takes_no_containers_says_so():
    model = parsed(PROGRAMS["a sequence in"][2])
    for transform in (
        lambda: onnxgrad.jacobian(model, wrt="q"),
        lambda: onnxgrad.hessian(model, wrt="q"),
        lambda: onnxgrad.vjp(model, wrt="q", directions=3),
    ):
        with pytest.raises(BadInput, match="'q' is a sequence; only float tensors have"):
            transform()
    with pytest.raises(BadInput, match="the argument for 'q' is a ndarray, and the input takes a list"):
        Function(model)(normal(2, 2, 3), normal(2, 3))
