"""Programs saved as models, models as functions, onnxscript functions."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as onp
import onnx
import onnxruntime
import pytest

import onnxgrad
import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad import BadInput, Function, NotDifferentiable, UnknownName
from onnxgrad.eager.core.plans import plans
from tests.eager.test_transforms import FUNCTIONS

rng = onp.random.default_rng(0)
X = rng.standard_normal((3, 4))


def run(model, *inputs):
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {i.name: onp.asarray(x) for i, x in zip(session.get_inputs(), inputs)})


def close(a, b, tolerance=1e-9):
    onp.testing.assert_allclose(onp.asarray(a), onp.asarray(b), rtol=tolerance, atol=tolerance)


#: What has no form in ONNX: factorizations, and masks that choose.
NOT_IN_ONNX = {
    "mask", "assignment", "inverse", "solve", "solve many", "determinant", "cholesky", "eigenvalues", "eigenvectors",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_recorded_program_computes_what_the_function_does(name):
    f = FUNCTIONS[name]
    if name in NOT_IN_ONNX:
        with pytest.raises(BadInput, match="cannot be recorded"):
            og.export(f, X)
        return
    model = og.export(f, X)
    onnx.checker.check_model(model, full_check=True)
    expected = f(np.asarray(X))
    try:
        found = Function(model)(X)
    except BadInput as error:  # ONNX Runtime has no kernel of float64 for some
        if "Could not find an implementation" not in str(error):
            raise
        found = onnx.reference.ReferenceEvaluator(model).run(None, {"x": X})[0]
    close(found, expected, 1e-6 if name == "operator by name" else 1e-9)


def layer(w, x):
    h = np.tanh(x @ w["a"] + w["b"])
    y = np.reshape(h, (h.shape[0] * h.shape[1],))[1:-1]
    return np.sum(y * y) / x.shape[0] + np.var(h[:, -1]), np.concat([h, h], axis=0)[::-1], h > 0


W = {"a": rng.standard_normal((4, 2)), "b": rng.standard_normal(2)}


def test_dynamic_sizes():
    model = og.export(layer, W, X, dynamic={"x": {0: "N"}})
    assert [i.name for i in model.graph.input] == ["w_a", "w_b", "x"]
    assert [d.dim_param or d.dim_value for d in model.graph.input[2].type.tensor_type.shape.dim] == ["N", 4]
    for n in (1, 3, 8):
        x = rng.standard_normal((n, 4))
        for mine, yours in zip(
            run(model, W["a"], W["b"], x), layer({k: np.asarray(v) for k, v in W.items()}, np.asarray(x))
        ):
            close(mine, yours)
    grown = onnxgrad.grad(model, wrt=["w_a", "x"], of="output_0")
    g = og.grad(lambda w, x: layer(w, x)[0], (0, 1))(W, x)
    close(run(grown, W["a"], W["b"], x)[0], g[0]["a"])
    close(run(grown, W["a"], W["b"], x)[1], g[1])


def test_two_dynamic_sizes():
    f = lambda x, y: np.reshape(x[:, None] * y[None, :], (-1,)) * (x.shape[0] - 1)  # noqa: E731
    model = og.export(f, onp.ones(3), onp.ones(4), dynamic={"x": {0: "N"}, "y": {0: "M"}})
    x, y = rng.standard_normal(5), rng.standard_normal(2)
    close(run(model, x, y)[0], onp.outer(x, y).reshape(-1) * 4)
    model = og.export(lambda x: np.roll(x, (1, -2), (0, 1)), X, dynamic={"x": {0: "N", 1: "M"}})
    for shape in ((1, 3), (5, 4)):
        x = rng.standard_normal(shape)
        close(run(model, x)[0], onp.roll(x, (1, -2), (0, 1)))


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: sum((x[i] for i in range(len(x))), 0.0), "does other operations at other sizes"),
        (lambda x: x * onp.arange(len(x), dtype=float)[:, None], "has the dynamic sizes in it"),
        (lambda x: x * float(len(x) ** 3), "cannot be written down"),
        (lambda x: og.grad(lambda x: np.sum(x**3))(x), "export the function, and derive the model"),
        (lambda x: np.linalg.inv(x @ x.T), "inv cannot be recorded"),
        (lambda x: x[x > 0], "a mask cannot be recorded"),
    ],
)
def test_what_cannot_be_recorded_is_refused(f, words):
    with pytest.raises(BadInput, match=words):
        og.export(f, X, dynamic={"x": {0: "N"}})


def test_export_says_which_inputs_there_are():
    with pytest.raises(BadInput, match="there are: x"):
        og.export(lambda x: x, X, dynamic={"y": {0: "N"}})
    with pytest.raises(BadInput, match="axis 2 of 'x'"):
        og.export(lambda x: x, X, dynamic={"x": {2: "N"}})


def test_derivatives_are_recorded():
    f = lambda x: np.sum(np.tanh(x) ** 2 * x[::-1])  # noqa: E731
    g = lambda x: anp.sum(anp.tanh(x) ** 2 * x[::-1])  # noqa: E731
    close(run(og.export(og.grad(f), X), X)[0], autograd.grad(g)(X))
    close(run(og.export(og.hessian(f), X[0]), X[0])[0], autograd.hessian(g)(X[0]))
    step = lambda x: x - 0.1 * og.grad(f)(x) + og.stop_gradient(x)  # noqa: E731
    close(run(og.export(step, X), X)[0], 2 * X - 0.1 * autograd.grad(g)(X))


def test_integers_and_booleans_are_inputs_too():
    f = lambda table, ids, keep: np.where(keep[:, None], np.take(table, ids, axis=0), 0.0)  # noqa: E731
    model = og.export(f, X, onp.array([0, 2]), onp.array([True, False]), dynamic={"ids": {0: "N"}, "keep": {0: "N"}})
    ids, keep = onp.array([1, 1, 0]), onp.array([True, False, True])
    close(run(model, X, ids, keep)[0], onp.where(keep[:, None], X[ids], 0))
    argmax = og.export(lambda x: (np.argmax(x, axis=1), np.argsort(x), np.count_nonzero(x > 0), x // 0.5), X)
    for mine, yours in zip(run(argmax, X), (X.argmax(1), X.argsort(), (X > 0).sum(), X // 0.5)):
        close(mine, yours)


# --- models ----------------------------------------------------------------------------------------

NET = """<ir_version: 10, opset_import: ["": %d]> net (double[N, 4] x, int64[1] k) => (double[N, 2] y, int64[N, 1] best)
    <double[4, 2] W = {1, -2, 3, 0.4, 0.5, 0.6, 0.1, 0.2}, int64[1] axes = {1}> {
        h = MatMul (x, W)
        t = Tanh (h)
        m = ReduceMean <keepdims = 1> (t, axes)
        y = Sub (t, m)
        v, best = TopK (y, k)
    }"""
WEIGHT = onp.array([[1, -2], [3, 0.4], [0.5, 0.6], [0.1, 0.2]])


@pytest.fixture(params=[18, 23])
def net(request):
    return og.from_onnx(onnx.parser.parse_model(NET % request.param))


def twin(x, w=WEIGHT):
    t = anp.tanh(x @ w)
    return t - anp.mean(t, axis=1, keepdims=True)


def test_a_model_is_a_function(net):
    assert net.inputs == ["x", "k"]
    out = net(X, onp.array([1]))
    close(out["y"], twin(X))
    assert out["best"].dtype == onp.int64
    close(net(x=X, k=[1])["y"], twin(X))
    f = lambda x: np.sum(net(x * 2.0, [1])["y"] ** 2 * x[:, :2])  # noqa: E731
    g = lambda x: anp.sum(twin(x * 2.0) ** 2 * x[:, :2])  # noqa: E731
    close(og.grad(f)(X), autograd.grad(g)(X))
    close(og.hvp(f)(X, X), autograd.grad(lambda x: anp.sum(autograd.grad(g)(x) * X))(X))
    close(og.jacobian(lambda x: net(x, [1])["y"], mode="forward")(X), autograd.jacobian(twin)(X))
    close(Function(og.export(f, X))(X), f(np.asarray(X)))


def test_the_weights_of_a_model_have_derivatives(net):
    f = lambda p, x: np.sum(net(x, [1], **p)["y"] ** 2)  # noqa: E731
    assert list(net.parameters) == ["W"]
    g = og.grad(f)(net.parameters, X)
    close(g["W"], autograd.grad(lambda w: anp.sum(twin(X, w) ** 2))(WEIGHT))
    close(f({"W": 0 * WEIGHT}, X), 0)


def test_a_model_runs_once_and_its_residuals_are_taken_along(net):
    og.grad(lambda x: np.sum(net(x, [1])["y"] ** 2))(X)
    plan = next(reversed(plans._held.values()))
    assert "Tanh" not in {n.op_type for n in plan.run.model.graph}


def test_a_model_with_random_numbers_is_differentiated_at_those_it_drew():
    text = """<ir_version: 10, opset_import: ["": 21]> noisy (double[4] x) => (double[4] y, double[4] n) {
        n = RandomNormalLike (x)
        s = Mul (x, x)
        y = Mul (s, n)
    }"""
    noisy = og.from_onnx(onnx.parser.parse_model(text))
    (_y, n), g = og.vjp(lambda x: tuple(noisy(x).values()), X[0])
    close(g((onp.ones(4), onp.zeros(4))), 2 * X[0] * onp.asarray(n))


def test_a_model_says_what_it_takes(net):
    for call, error, words in [
        (lambda: net(X), BadInput, "no argument for 'k'"),
        (lambda: net(X, [1], X), BadInput, "3 arguments for 2 inputs"),
        (lambda: net(X, [1], V=X), UnknownName, "no input or weight named 'V'"),
        (lambda: net(X, [1], x=X), BadInput, "given twice"),
        (lambda: net(onp.ones((2, 3)), [1]), BadInput, "ONNX Runtime failed"),
        (lambda: net(X, onp.array([1.5])), BadInput, "the argument for 'k' is float64"),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_a_model_without_derivative_runs_until_one_is_asked_for():
    text = """<ir_version: 10, opset_import: ["": 21]> n (double[4] x) => (double[4] y) { y = Round (x) }"""
    rounding = og.from_onnx(onnx.parser.parse_model(text))
    close(og.grad(lambda x: np.sum(rounding(x) * x))(X[0]), onp.round(X[0]))
    text = """<ir_version: 10, opset_import: ["": 21]> n (double[4] x) => (double[4] y) { y = Bernoulli (x) }"""
    drawing = og.from_onnx(onnx.parser.parse_model(text))
    assert drawing(onp.ones(4)).shape == (4,)
    with pytest.raises(NotDifferentiable, match="Bernoulli"):
        og.grad(lambda x: np.sum(drawing(x)))(onp.ones(4))


def test_a_function_with_a_loop_in_it():
    text = """<ir_version: 10, opset_import: ["": 21]> n (double[4] x) => (double[4] y)
        <int64 three = {3}, bool yes = {1}> {
        y = Loop (three, yes, x) <body = b (int64 i, bool c, double[4] s) => (bool d, double[4] t) {
            d = Identity (c)
            u = Tanh (s)
            t = Mul (u, x)
        }>
    }"""
    looped = og.from_onnx(onnx.parser.parse_model(text))

    def same(x):
        s = x
        for _ in range(3):
            s = anp.tanh(s) * x
        return anp.sum(s * x)

    f = lambda x: np.sum(looped(x) * x)  # noqa: E731
    close(og.grad(f)(X[0]), autograd.grad(same)(X[0]))
    close(og.hessian(f)(X[0]), autograd.hessian(same)(X[0]))


# --- operators and onnxscript ----------------------------------------------------------------------


def test_operators_by_name():
    x, w = rng.standard_normal((1, 2, 5, 5)), rng.standard_normal((3, 2, 3, 3))
    f = lambda x, w: np.sum(np.tanh(og.op.Conv(x, w, pads=[1, 1, 1, 1], strides=[2, 2])) ** 2)  # noqa: E731
    og.check_grads(f, x, w, order=1)
    g64 = og.grad(f, (0, 1))(x, w)
    for a, b in zip(g64, og.grad(f, (0, 1))(x.astype(onp.float32), w.astype(onp.float32))):
        close(a, b, 1e-4)
    values, _places = og.op.TopK(X, [2], outputs=2)
    close(values, -onp.sort(-X)[:, :2])
    close(
        og.grad(lambda x: np.sum(og.op.TopK(x, [2], outputs=2)[0] ** 2))(X),
        onp.where(values[:, 1:]._data <= X, 2 * X, 0),
    )
    close(og.op.ReduceSum(X, [1], keepdims=0), X.sum(1))
    close(og.op.Clip(X, None, 0.5), onp.clip(X, None, 0.5))
    close(og.op.Add(X, 1), X + 1)


def test_onnxscript_functions_run_on_the_tape():
    onnxscript = pytest.importorskip("onnxscript")
    from tests.eager import scripts

    assert onnxscript
    f = scripts.function
    x, w = X, rng.standard_normal((4, 2))
    og.check_grads(f, x, w)

    def same(x, w):
        h = anp.tanh(x @ w) * 2.0
        for _ in range(2):
            h = h + 1 / (1 + anp.exp(-h))
        s = anp.exp(anp.sum(h, axis=1))
        return s / anp.sum(s)

    close(f(x, w), same(x, w))
    close(og.jacobian(f)(x, w), autograd.jacobian(same)(x, w))
