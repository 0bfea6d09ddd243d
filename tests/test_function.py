"""Function: models as Python functions of arrays. linear_operator: Jacobians that SciPy works with."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper
from scipy import optimize
from scipy.sparse import linalg

import onnxgrad
from onnxgrad import BadInput, Function, UnknownName, linear_operator
from tests.models import mlp, model, value
from tests.transforms.numbers import differences, net

rng = np.random.default_rng(8)
X = rng.standard_normal((5, 3))


def close(a, b, tolerance=1e-10):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def rosenbrock(n=4):
    """Σ 100·(xᵢ₊₁ - xᵢ²)² + (1 - xᵢ)²"""
    nodes = [
        helper.make_node("Slice", ["x", "one", "end"], ["after"]),
        helper.make_node("Slice", ["x", "zero", "last"], ["before"]),
        helper.make_node("Mul", ["before", "before"], ["square"]),
        helper.make_node("Sub", ["after", "square"], ["a"]),
        helper.make_node("Sub", ["unit", "before"], ["b"]),
        helper.make_node("Mul", ["a", "ten"], ["c"]),
        helper.make_node("Concat", ["b", "c"], ["r"], axis=0),
        helper.make_node("ReduceSumSquare", ["r"], ["f"], keepdims=0),
    ]
    weights = {"one": np.int64([1]), "end": np.int64([2**31]), "zero": np.int64([0]), "last": np.int64([-1]),
               "unit": np.float64(1), "ten": np.float64(10)}  # fmt: skip
    outputs = [value("r", [2 * n - 2], T.DOUBLE), value("f", [], T.DOUBLE)]
    return model(nodes, [value("x", [n], T.DOUBLE)], outputs, weights)


# --- calls ------------------------------------------------------------------------------------------


def test_a_call_takes_arguments_in_order_or_by_name():
    nodes = [helper.make_node("Sub", ["a", "b"], ["d"]), helper.make_node("Cast", ["d"], ["i"], to=T.INT64)]
    f = Function(model(nodes, [value("a", [2]), value("b", [2])], [value("d", [2]), value("i", [2], T.INT64)]))
    assert f.inputs == ["a", "b"]
    for got in (f([3, 4], [1, 1]), f([3, 4], b=np.ones(2)), f(b=np.ones(2, np.float16), a=np.array([3, 4]))):
        assert got["d"].tolist() == [2, 3]
        assert got["d"].dtype == np.float32
        assert got["i"].tolist() == [2, 3]
    for args, kwargs, problem in [
        (([1, 2],), {}, "no argument for 'b'"),
        (([1, 2], [1, 2], [1, 2]), {}, "3 arguments for 2 inputs"),
        (([1, 2], [1, 2]), {"a": [1, 2]}, "given twice"),
        ((np.array([1j, 2]), [1, 2]), {}, "is complex128, and the input takes float32"),
        (([1, 2, 3], [1, 2]), {}, "ONNX Runtime failed"),
    ]:
        with pytest.raises(BadInput, match=problem):
            f(*args, **kwargs)
    with pytest.raises(UnknownName, match="no input named 'c'"):
        f([1, 2], c=[1, 2])


def test_models_of_every_kind(tmp_path):
    import onnx

    onnx.save(mlp(), tmp_path / "m.onnx")
    x = X.astype(np.float32)
    want = Function(mlp())(x)
    for source in (tmp_path / "m.onnx", str(tmp_path / "m.onnx"), ir.from_proto(mlp())):
        close(Function(source)(x), want)


def test_an_initializer_that_is_an_input_may_be_given():
    source = mlp()
    source.graph.input.append(value("b", [2]))
    f = Function(source)
    assert f.inputs == ["x"]
    x = X.astype(np.float32)
    close(f(x), Function(mlp())(x))
    assert np.abs(f(x, b=np.zeros(2, np.float32)) - f(x)).max() > 1e-3


class Speaks:
    """Nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **more):
        return self.array.__dlpack__(**more)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack():
    f = Function(net([3, 4, 2]))
    close(f(Speaks(X)), f(X))
    close(np.from_dlpack(f(X)), f(X))


@pytest.mark.parametrize("outputs", [["y"], ["y", "m1", "v1"]])
def test_statistics_of_a_batch_norm_in_training_are_not_written_to(outputs):
    nodes = [helper.make_node("BatchNormalization", ["x", "s", "s", "m", "v"], ["y", "m1", "v1"], training_mode=1)]
    inputs = [value("x", ["N", 3]), *(value(n, [3]) for n in "smv")]
    shapes = {"y": ["N", 3], "m1": [3], "v1": [3]}
    f = Function(model(nodes, inputs, [value(n, shapes[n]) for n in outputs]))
    m, v = np.zeros(3, np.float32), np.ones(3, np.float32)
    f(X.astype(np.float32), np.ones(3), m, v)
    assert (m == 0).all()
    assert (v == 1).all()


def test_options_reach_the_runtime():
    f = Function(mlp(), threads=1, providers=["CPUExecutionProvider"])
    assert f.grad(wrt="x").options is f.options
    assert f.session.native.get_session_options().intra_op_num_threads == 1
    assert f.session.native.get_providers() == ["CPUExecutionProvider"]


# --- derivatives ------------------------------------------------------------------------------------


def test_derivatives_are_functions_of_the_same_kind():
    source = net([3, 4, 2])
    f = Function(source)
    j = differences(source, {"x": X}, "x", "y")
    close(f.jacobian(wrt="x")(X), j, 1e-7)
    close(f.jacobian(wrt="x", batch=0)(X), np.stack([j[n, :, n] for n in range(5)]), 1e-7)
    close(f.grad(wrt="x")(X), j.sum((0, 1)), 1e-7)
    u, v = rng.standard_normal((5, 2)), rng.standard_normal((5, 3))
    close(f.vjp(wrt="x")(X, u), np.tensordot(u, j, 2), 1e-7)
    close(f.jvp(wrt="x")(X, v), np.tensordot(j, v, 2), 1e-7)
    close(f.jvp(wrt="x", directions="K")(X, v[None])[0], np.tensordot(j, v, 2), 1e-7)
    h = f.hessian(wrt="x")(X)
    close(h, f.grad(wrt="x").jacobian(wrt="x")(X))
    close(f.hvp(wrt="x")(X, v), np.tensordot(h, v, 2))
    close(f.gauss_newton_vp(wrt="x")(X, v), np.tensordot(np.tensordot(j, v, 2), j, 2), 1e-7)
    close(f.per_example_grad(wrt="w0")(X).sum(0), f.grad(wrt="w0")(X))
    y, g = f.value_and_grad(wrt="x")(X)
    close(y, f(X))
    close(g, f.grad(wrt="x")(X))
    several = f.grad(wrt=["x", "w1"])(X)
    assert set(several) == {"x", "w1"}
    assert set(f.hessian(wrt=["x", "b0"])(X)["b0"]) == {"x", "b0"}


def test_a_derived_function_costs_only_itself():
    f = Function(net([3, 4, 2]))
    assert [o.name for o in f.jvp(wrt="x").model.graph.outputs] == ["y_tangent"]
    of_known_size = Function(net([3, 4, 2], batch=5))
    assert "Tanh" not in {n.op_type for n in of_known_size.grad(wrt="b1").model.graph}  # it needs no forward pass
    assert f.grad(wrt="x") is f.grad(wrt="x", of=["y"])
    assert f.grad(wrt="x") is not f.grad(wrt="w0")


def test_the_derivative_at_a_point_as_a_function():
    f = Function(net([3, 4, 2]))
    both = f.linearize(wrt=["x", "w1"])
    y, push = both(X)
    close(y, f(X))
    t, s = rng.standard_normal((5, 3)), rng.standard_normal((4, 2))
    close(push(t, s), f.jvp(wrt=["x", "w1"])(X, t, s))
    close(push(t, 0 * s), f.jvp(wrt="x")(X, t))
    y, pull = f.split_vjp(wrt=["x", "w1"])(x=X)
    u = rng.standard_normal((5, 2))
    want = f.vjp(wrt=["x", "w1"])(X, u)
    for name, g in pull(u).items():
        close(g, want[name])
    _, other = f.split_vjp(wrt=["x", "w1"])(0 * X)
    assert np.abs(other(u)["x"] - pull(u)["x"]).max() > 1e-3  # each holds its own point
    with pytest.raises(BadInput, match="1 arguments for 2 inputs"):
        push(t)
    with pytest.raises(BadInput, match="no argument for 'x'"):
        both()
    x = X.copy()
    operator, (_, held) = linear_operator(f, {"x": x}, wrt="w0"), f.split_vjp(wrt="w0")(x)
    before, product = held(u), operator @ np.ones(12)
    x += 1
    close(held(u), before)  # whatever happens to the arrays meanwhile
    close(operator @ np.ones(12), product)
    _, bent = f.grad(wrt="x").linearize(wrt="x")(X)
    close(bent(t), f.hvp(wrt="x")(X, t))


def test_from_many_threads():
    f, found, problems = Function(net([3, 4, 2])), [], []

    def work():
        try:
            found.append([f.grad(wrt="x")(X), f.hvp(wrt="x")(X, X), f(X)])
        except Exception as e:
            problems.append(e)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems
    assert len(found) == 16
    for each in found:
        for a, b in zip(each, found[0]):
            np.testing.assert_array_equal(a, b)


# --- SciPy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrt", ["x", "w0"])
def test_the_jacobian_as_a_linear_operator(wrt):
    f = Function(net([3, 4, 2]))
    j = f.jacobian(wrt=wrt)(X).reshape(10, -1)
    a = linear_operator(f, {"x": X}, wrt=wrt)
    assert a.shape == j.shape
    assert a.dtype == np.float64
    v, u = rng.standard_normal(j.shape[1]), rng.standard_normal(10)
    close(a @ v, j @ v)
    close(a.rmatvec(u), j.T @ u)
    m, n = rng.standard_normal((j.shape[1], 4)), rng.standard_normal((10, 3))
    close(a @ m, j @ m)
    close(a.H @ n, j.T @ n)
    close(a @ m[:, :1], j @ m[:, :1])
    close(a.matmat(m[:, :0]), np.zeros((10, 0)))
    step = linalg.lsqr(a, u, atol=1e-14, btol=1e-14)[0]
    close(step, np.linalg.lstsq(j, u, rcond=None)[0], 1e-6)
    close(linalg.svds(a, k=2)[1], np.linalg.svd(j)[1][1::-1], 1e-7)


def test_a_linear_operator_of_a_model_without_residuals_and_of_one_output_of_two():
    w = linear_operator(net([3, 2]), {"x": X}, wrt="x")
    close(w.matmat(np.eye(15)), Function(net([3, 2])).jacobian(wrt="x")(X).reshape(10, 15))
    with pytest.raises(BadInput, match="2 float outputs"):
        linear_operator(rosenbrock(), {"x": np.zeros(4)}, wrt="x")
    assert linear_operator(rosenbrock(), {"x": np.zeros(4)}, wrt="x", of="f").shape == (1, 4)
    with pytest.raises(BadInput, match="no input or initializer"):
        linear_operator(net([3, 2]), {"x": X}, wrt="h0")


@pytest.mark.parametrize("method", ["Newton-CG", "trust-krylov", "trust-ncg"])
def test_second_order_minimization(method):
    f = Function(rosenbrock())
    fun, jac, hvp = (lambda x: float(f(x)["f"])), f.grad(wrt="x", of="f"), f.hvp(wrt="x", of="f")
    start = np.array([1.3, 0.7, 0.8, 1.9])
    by_product = optimize.minimize(fun, start, jac=jac, hessp=hvp, method=method)
    close(by_product.x, np.ones(4), 1e-4)
    by_operator = optimize.minimize(fun, start, jac=jac, method="trust-constr",
                                    hess=lambda x: linear_operator(jac, {"x": x}, wrt="x"))  # fmt: skip
    close(by_operator.x, np.ones(4), 1e-4)


def test_least_squares():
    f = Function(rosenbrock())
    found = optimize.least_squares(lambda x: f(x)["r"], [1.3, 0.7, 0.8, 1.9], method="trf",
                                   jac=lambda x: linear_operator(f, {"x": x}, wrt="x", of="r"))  # fmt: skip
    close(found.x, np.ones(4), 1e-6)


def test_float32_operators():
    f = Function(mlp())
    a = linear_operator(f, {"x": X}, wrt="x")
    assert a.dtype == np.float32
    j = f.jacobian(wrt="x")(X).reshape(10, 15)
    close(a @ np.arange(15.0), j @ np.arange(15.0, dtype=np.float32), 1e-4)


def test_every_public_name_is_there_when_asked_for():
    assert len(set(onnxgrad.__all__)) == len(onnxgrad.__all__)
    for name in onnxgrad.__all__:
        assert getattr(onnxgrad, name).__name__ == name
        assert name in dir(onnxgrad)
    assert onnxgrad.Trainer is onnxgrad.training.Trainer
    assert onnxgrad.Session is onnxgrad.runtime.Session


def test_importing_the_package_imports_nothing_heavy():
    heavy = {"numpy", "onnx", "onnx_ir", "onnxruntime", "scipy", "rich", "onnxgrad.transforms", "onnxgrad.training"}
    code = f"import sys, onnxgrad; assert not {heavy} & set(sys.modules), sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy = {"onnxruntime", "scipy", "rich", "onnxgrad.runtime", "onnxgrad.training"}
    code = f"import sys; from onnxgrad import grad; assert not {heavy} & set(sys.modules), sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = (
        "import sys; sys.modules['scipy'] = None; import onnxgrad\n"
        "try: onnxgrad.linear_operator(None, {}, wrt='x')\n"
        "except ImportError as e: assert 'pip install' in str(e)\n"
        "else: raise SystemExit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError):
        onnxgrad.nothing  # noqa: B018


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_copies_are_the_same_function(copied):
    f = Function(mlp())
    name = f.inputs[0]
    shape = [4 if not isinstance(d, int) else d for d in f.model.graph.inputs[0].shape]
    x = np.random.default_rng(1).standard_normal(shape).astype(f.model.graph.inputs[0].dtype.numpy())
    for one in (f, f.grad(wrt=name), f.jacobian(wrt=name), f.grad(wrt=name).jacobian(wrt=name)):
        np.testing.assert_array_equal(copied(one)(x), one(x))
    np.testing.assert_array_equal(copied(f).grad(wrt=name)(x), f.grad(wrt=name)(x))
