"""Parts of a value to differentiate (``of="y[:, 3]"``), and derivatives that are zero wherever they are evaluated."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onnxgrad import BadInput, ZeroDerivative, grad, jvp, signature, vjp
from onnxgrad.check import check
from tests.commands import command

TEXT = """<ir_version: 10, opset_import: ["": 21]>
    g (float[{dims}] x) => (float[{dims}] y) {{
        y = Softmax (x)
        {more}
    }}"""
X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
C = "a = ArgMax <axis = 1> (x)  f = Cast <to = 1> (a)  c = ReduceSum <keepdims = 0> (f)"


def classifier(dims: str = "3, 4", more: str = "") -> onnx.ModelProto:
    return parser.parse_model(TEXT.format(dims=dims, more=more))


def pulled(cotangent: np.ndarray) -> np.ndarray:
    """The pullback of the softmax, in closed form."""
    y = np.exp(X - X.max(1, keepdims=True)).astype(np.float64)
    y /= y.sum(1, keepdims=True)
    return y * (cotangent - (cotangent * y).sum(1, keepdims=True))


@pytest.mark.parametrize("dims", ["3, 4", "N, M"])
@pytest.mark.parametrize(
    "key",
    ["[:,3]", "[:, -1]", "[1,2]", "[-1, 0]", "[..., 3]", "[0:2, 1:3]", "[::-2, 1]", "[2:0:-1, ::2]", "[ +1 ,1:-1,]",
     "[-2:, -3:-1]", "[...,1,:2]"],
)  # fmt: skip
def test_a_part_is_that_of_numpy(key: str, dims: str) -> None:
    weights = np.zeros((3, 4))
    exec(f"weights{key} = 1", {"weights": weights})  # numpy's own reading of it
    derived = grad(classifier(dims), wrt="x", of=f"y{key}")
    (found,) = ReferenceEvaluator(derived).run(None, {"x": X})
    np.testing.assert_allclose(found, pulled(weights), atol=1e-6)


def test_names_of_parts() -> None:
    derived = vjp(classifier(), wrt="x", of="y[:,3]")
    assert list(signature(derived).cotangents) == ["y[:,3]"]
    name = signature(derived).cotangents["y[:,3]"]
    found = dict(zip(["y", "g"], ReferenceEvaluator(derived).run(None, {"x": X, name: np.float32([1, 2, 3])})))
    np.testing.assert_allclose(found["g"], pulled(np.float32([1, 2, 3])[:, None] * (np.arange(4) == 3)), atol=1e-6)
    assert list(signature(jvp(classifier(), wrt="x", of=["y[0,1]", "y[1,1]"])).output_tangents) == ["y[0,1]", "y[1,1]"]
    assert check(classifier(), of="y[:,3]").of == ["y[:,3]"]


def test_a_name_that_holds_brackets_wins() -> None:
    model = classifier()
    model.graph.node.add(op_type="Exp", input=["x"], output=["y[:,3]"])
    (found,) = ReferenceEvaluator(grad(model, wrt="x", of="y[:,3]")).run(None, {"x": X})
    np.testing.assert_allclose(found, np.exp(X), rtol=1e-6)
    (found,) = ReferenceEvaluator(grad(model, wrt="x", of="y[:,3][0,:]")).run(None, {"x": X})
    np.testing.assert_allclose(found, np.exp(X) * (np.arange(3) == 0)[:, None], rtol=1e-6)


@pytest.mark.parametrize(
    ("of", "says"),
    [
        ("y[]", "'' is no index"),
        ("y[a]", "'a' is no index"),
        ("y[None]", "is no index"),
        ("y[1.5]", "is no index"),
        ("y[::0]", "is no index"),
        ("y[:,]]", "is no index"),
        ("y[1,,]", "is no index"),
        ("y[9]", "none of number 9"),
        ("y[:,-5]", "none of number -5"),
        ("y[2:2]", "picks nothing"),
        ("y[0,0,0]", "more than the 2 axes"),
        ("y[...,...]", "more than the 2 axes"),
        ("q[0]", "no value named 'q'"),
        ("y[" + "9" * 5000 + "]", "is no index"),
        ("a[0]", "only float tensors"),
        ("y]", "no value named"),
        ("[0]", "no value named"),
    ],
)
def test_an_expression_that_is_none_is_one_error(of: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        grad(classifier(more=C), wrt="x", of=of)
    assert says in str(caught.value)


def test_the_command_takes_parts(tmp_path) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(classifier(), source)
    weights = np.arange(4) == 3
    for i, options in enumerate((["--of", "y[:,3]"], ["--class", "3"], ["--of", "y", "--class", "-1"])):
        target = tmp_path / f"{i}.onnx"
        done = command("grad", source, "--wrt", "x", "-o", target, *options)
        assert done.returncode == 0, done.stderr
        (found,) = ReferenceEvaluator(onnx.load(target)).run(None, {"x": X})
        np.testing.assert_allclose(found, pulled(np.tile(weights, (3, 1))), atol=1e-6)


# --- zero -------------------------------------------------------------------------------------------


def test_the_sum_of_a_softmax_is_told_to_be_constant() -> None:
    for more, of in (
        ("", "y"),
        ("z = Transpose (y)  w = Identity (z)", "w"),
        ("", "y[:, :]"),
        ("", "y[0]"),
        ("", "y[1:]"),
    ):
        with pytest.warns(ZeroDerivative, match=r"(?s)rows of a Softmax sum to 1.*such as of=") as told:
            derived = grad(classifier(more=more), wrt="x", of=of)
        assert [w.filename for w in told] == [__file__]
        np.testing.assert_allclose(ReferenceEvaluator(derived).run(None, {"x": X})[0], 0, atol=1e-6)
        report = check(classifier(more=more), wrt="x", of=of)
        assert (report.zero, report.constant_sums) == ([], {of: "Softmax"})


def test_a_part_of_each_row_of_a_softmax_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for of in ("y[:, 0]", "y[0, 1:]", "y[1:, :-1]"):
            grad(classifier(), wrt="x", of=of)
            assert check(classifier(), wrt="x", of=of).constant_sums == {}


def test_a_derivative_that_nothing_leads_to_is_told() -> None:
    quantized = "s = Constant <value_float = 0.1> ()  q = QuantizeLinear (x, s)  d = DequantizeLinear (q, s)"
    for more, of, says in (
        (C, "c", "nothing but ArgMax connects them"),
        (quantized, "d", "nothing but QuantizeLinear connects them"),
        ("u = Shape (x)  v = Cast <to = 1> (u)", "v", "nothing connects them"),
        ("u = Constant <value_floats = [1.0]> ()", "u", "nothing connects them"),
    ):
        model = classifier(more=more)
        for derive in (grad, vjp, jvp):
            with pytest.warns(ZeroDerivative, match=says) as told:
                derive(model, wrt="x", of=of)
            assert [w.filename for w in told] == [__file__]  # the line that asked, not one behind the decorators
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = check(model, wrt="x", of=of)
        assert (report.differentiable, report.zero) == (True, ["x"])


def test_a_derivative_that_is_there_is_not_told_to_be_zero() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for of in ("y[:, 3]", ["z"]):
            grad(classifier(more="z = Mul (y, x)"), wrt="x", of=of)
        vjp(classifier(), wrt="x")  # no sum of it
        assert check(classifier(), wrt="x").zero == []


def test_the_command_tells_what_is_zero(tmp_path) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(classifier(more=C), source)
    done = command("check", source, "--wrt", "x", "--of", "c")
    assert "but zero everywhere with respect to x" in " ".join(done.stdout.split())


def test_the_command_tells_that_the_sum_of_a_softmax_is_constant(tmp_path) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(classifier(), source)
    done = command("check", source, "--wrt", "x")
    assert "but the gradient of the sum of y is zero: rows of a Softmax sum to 1" in " ".join(done.stdout.split())
