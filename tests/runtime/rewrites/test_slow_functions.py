"""Softplus, Mish, Elu and PRelu by quicker operators: the numbers of float64, and those of the operators if odd."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.session import passes_of

FUNCTIONS = {
    "Softplus": lambda x: np.logaddexp(x, 0),
    "Mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "Elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "Elu <alpha = 0.3>": lambda x: np.where(x > 0, x, 0.3 * np.expm1(np.minimum(x, 0))),
    "PRelu": lambda x: np.where(x > 0, x, np.float64([0.25, -2, 0]) * x),
    "Pow": lambda x: x * x,
}
OPERANDS = {"PRelu": ", slope", "Pow": ", two"}


def _model(function, kind="float", rows="N", exponent="float two = {2}"):
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g ({kind}[{rows}, 3] x) => ({kind}[{rows}, 3] y) <{kind}[3] slope = {{0.25, -2, 0}}, {exponent}>
        {{ y = {function} (x{OPERANDS.get(function, "")}) }}"""
    )


def _applied(model, target="portable"):
    return (
        "slow_functions"
        in passes_of(ir.from_proto(onnx.shape_inference.infer_shapes(model)), Options(target=target)).applied
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_numbers(name):
    model, (run, plain) = (
        _model(name),
        [Session(_model(name), Options(target="portable", layout=layout)) for layout in ("auto", "plain")],
    )
    assert _applied(model)
    x = np.random.default_rng(0).standard_normal((500, 3)).astype(np.float32) * 5
    exact = FUNCTIONS[name](x.astype(np.float64))
    # log(1 + e) is exact to the unit of 1, which Mish multiplies by x
    assert (abs(run.run({"x": x})["y"] - exact) <= 2e-6 * abs(exact) + 1e-7 * np.maximum(1, abs(x))).all()
    odd = np.float32([[np.inf, -np.inf, np.nan], [0, -0.0, 1e-30], [100, -100, 3e38], [-3e38, 20, -20]])
    np.testing.assert_allclose(run.run({"x": odd})["y"], plain.run({"x": odd})["y"], rtol=1e-6, atol=1e-7)
    assert run.run({"x": odd[:0]})["y"].shape == (0, 3)


def test_others_stay():
    assert _applied(_model("Softplus", rows="400"))
    assert not _applied(_model("Softplus", rows="300"))
    assert not _applied(_model("Softplus", "double"))
    assert not _applied(_model("Tanh"))
    assert not _applied(_model("Softplus"), "native")


@pytest.mark.parametrize(
    ("exponent", "applies"),
    [
        ("int64 two = {2}", True),
        ("float two = {2.5}", False),
        ("float[1, 1, 1] two = {2}", False),
        ("float[3] two = {2, 2, 2}", False),
    ],
)
def test_which_powers(exponent, applies):
    given = _model("Pow", exponent=exponent)
    if "1, 1, 1" in exponent:
        given = onnx.parser.parse_model(onnx.printer.to_text(given).replace("=> (float[N,3] y)", "=> (float[1,N,3] y)"))
    assert _applied(given) == applies
    x = np.float32([[3, 0, 1e20], [1, np.inf, np.nan]])
    run = Session(given, Options(target="portable")).run({"x": x})["y"]
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(run.reshape(x.shape), x ** np.float32(2.5 if "2.5" in exponent else 2), rtol=1e-6)


def test_a_gradient():
    gradient = vjp(_model("Softplus"), wrt="x")
    x = np.float32([[-3, 0, 2]])
    found = Session(gradient, Options(target="portable")).run({"x": x, "y_cotangent": np.ones_like(x)})
    np.testing.assert_allclose(found["x_grad"], 1 / (1 + np.exp(-x)), rtol=1e-6)
