"""The tape: what it keeps and what it frees, plans that are made once, threads, the array object."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import weakref

import numpy as onp
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad import BadInput, NotDifferentiable
from onnxgrad.eager.core import plans
from onnxgrad.eager.core.tape import Node

rng = onp.random.default_rng(0)
X = rng.standard_normal((3, 4))


def nodes_alive():
    gc.collect()
    return sum(type(o) is Node for o in gc.get_objects())


def deep(x, n=50):
    for _ in range(n):
        x = np.tanh(x) * 1.1
    return np.sum(x)


def test_nothing_outlives_a_gradient():
    before = nodes_alive()
    g = og.grad(deep)(X)
    h = og.hessian(lambda x: np.sum(np.sin(x) ** 3))(X[0])
    value, aux = og.value_and_grad(lambda x: (deep(x), x * 2), has_aux=True)(X)[0]
    j = og.jacobian(np.tanh)(X[0])
    t = og.jvp(deep, X, X)
    c = og.grad(lambda x: np.sum(np.linalg.inv(x @ x.T)))(X)
    m = og.grad(lambda x: np.sum(np.where(x > 0, x, x[::-1]) * np.astype(x > 1, float)))(X)
    for array in (g, h, value, aux, j, *t, c, m):
        assert array._node is None
    assert nodes_alive() == before


def test_a_part_of_the_tape_is_freed_without_the_collector():
    gc.disable()
    try:
        held = []

        def f(x):
            y = np.tanh(x)
            held.append(weakref.ref(np.exp(y)._node))  # nobody uses it
            return np.sum(y)

        og.grad(f)(X)
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_pullback_keeps_its_tape_and_no_longer():
    before = nodes_alive()
    y, pullback = og.vjp(deep, X)
    assert nodes_alive() > before
    assert float(y) == float(deep(X))
    pullback(1.0)
    del pullback
    assert nodes_alive() == before


def test_a_structure_is_planned_once():
    f = og.grad(lambda x, n: np.sum(np.exp(x * float(n)) ** 2))
    f(X, 1)
    made = plans.plans.made
    for n in range(5):
        f(X + n, n)  # other numbers, the same structure
    assert plans.plans.made == made
    f(X[:2], 1)
    assert plans.plans.made == made + 1  # another shape
    f(X.astype(onp.float32), 1)
    assert plans.plans.made == made + 2  # another dtype
    og.grad(lambda x: np.sum(np.exp(x) ** 3))(X)
    assert plans.plans.made == made + 3  # another exponent: it is part of the operator
    before = plans.plans.made
    for _ in range(2):
        og.hessian(lambda x: np.sum(np.sin(x) * x[::-1]))(X[0])
        once, before = plans.plans.made - before, plans.plans.made
    assert once == 0


def test_a_residual_is_not_computed_again():
    og.grad(lambda x: np.sum(np.tanh(np.exp(x))))(X)
    plan = next(reversed(plans.plans._held.values()))
    assert {n.op_type for n in plan.run.model.graph}.isdisjoint({"Tanh", "Exp"})


def test_an_indexed_table_does_not_depend_on_its_indices():
    table = rng.standard_normal((50, 3))
    f = og.grad(lambda t, i: np.sum(t[np.asarray(i)] ** 2))
    f(table, [1, 2])
    made = plans.plans.made
    g = f(table, [7, 7])
    assert plans.plans.made == made
    assert float(g[7, 0]) == pytest.approx(4 * table[7, 0])


def test_threads():
    plans.plans.clear()
    expected = {n: onp.asarray(og.grad(lambda x: np.sum(np.sin(x) ** n))(X)) for n in range(2, 6)}  # noqa: B023
    plans.plans.clear()
    wrong = []

    def work(n):
        for _ in range(20):
            g = og.grad(lambda x: np.sum(np.sin(x) ** n))(X)
            if not onp.array_equal(g, expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(2 + i % 4,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_exporting_in_one_thread_does_not_touch_another():
    started, done, kinds = threading.Event(), threading.Event(), []

    def other():
        started.wait(5)
        kinds.append(og.grad(lambda x: np.sum(og.stop_gradient(x) * x))(X)._node)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def f(x):
        started.set()
        done.wait(5)
        return x

    og.export(f, X)
    thread.join()
    assert kinds == [None]


# --- the array object ------------------------------------------------------------------------------


def test_numpy_dispatches():
    x = np.asarray(X)
    for y in (onp.sin(x), 2.0 * x, X + x, onp.sum(x, axis=0), onp.concatenate([x, x]), onp.linalg.norm(x), X @ x.T):
        assert isinstance(y, og.Array)
    assert onp.asarray(x) is not None
    onp.testing.assert_array_equal(onp.from_dlpack(x), X)
    assert onp.array_equal(x, X)  # not in the namespace: numpy's, of an array that is on no tape
    with pytest.raises(NotDifferentiable, match=r"(?s)numpy.spacing has no derivative.*hint: use stop_gradient"):
        og.grad(lambda x: onp.sum(onp.spacing(x)))(X)
    with pytest.raises(
        NotDifferentiable, match=r"(?s)numpy.add with 'where' has no derivative.*hint: use stop_gradient"
    ):
        og.grad(lambda x: onp.sum(onp.add(x, 1.0, where=X > 0)))(X)
    with pytest.raises(NotDifferentiable, match=r"numpy.add.at has no derivative"):
        og.grad(lambda x: onp.add.at(x, [0], 1.0))(X)
    with pytest.raises(NotDifferentiable, match=r"numpy.add.reduce with 'out' has no derivative"):
        og.grad(lambda x: onp.add.reduce(x, out=onp.zeros(X.shape[1:])))(X)
    with pytest.raises(IndexError, match="from 0 to"):
        onp.add.reduceat(x, [0, 99])
    assert onp.add(x, 1.0, dtype=onp.float32).dtype == onp.float32


def test_a_value_can_be_printed_and_branched_on():
    seen = []

    def f(x):
        truths, n = x > 0, np.astype(x[1], int)  # these carry no derivative, and no mean of them does
        assert float(np.mean(np.astype(truths, float))) == 1.0
        seen.append((f"{x}", f"{x[0]:.3f}", repr(x), bool(truths[0]), len(x), truths.tolist(), int(n), [1, 2, 3][n]))
        constant = og.stop_gradient(x)
        assert (float(constant[0]), constant.tolist(), onp.asarray(constant).shape) == (1.5, [1.5, 2.0], (2,))
        return x[0] if x[0] > 0 else x[1]

    og.grad(f)(onp.array([1.5, 2.0]))
    assert seen[0] == ("[1.5 2. ]", "1.500", "Array([1.5, 2. ])", True, 2, [True, True], 2, 3)


READERS = {
    "float": lambda x: float(x[0]) * x[1],
    "int": lambda x: int(x[0]) * x[1],
    "bool": lambda x: x[1] if x[0] else x[0],
    "complex": lambda x: np.real(complex(x[0]) * x[1]),
    "item": lambda x: x[0].item() * x[1],
    "tolist": lambda x: np.sum(np.asarray(x.tolist()) ** 2),
    "math": lambda x: math.sin(x[0]) * x[1],
    "numpy array": lambda x: np.sum(onp.asarray(x) * x),
    "numpy array of a list": lambda x: np.sum(onp.array([x[0], x[1]]) * x),
    "numpy scalar": lambda x: onp.float64(x[0]) * x[1],
    "dlpack": lambda x: np.sum(np.from_dlpack(x) * x),
    "pickle": lambda x: np.sum(pickle.loads(pickle.dumps(x)) ** 2),
    "attribute": lambda x: np.sum(og.op.LeakyRelu(x - 2, alpha=x[0])),
}


@pytest.mark.parametrize("read", READERS.values(), ids=list(READERS))
def test_what_would_lose_a_derivative_is_refused(read):
    for derive in (og.grad(read), lambda x: og.jvp(read, x, x), lambda x: og.export(read, x)):
        with pytest.raises(NotDifferentiable, match=r"(?s)of an array on the tape would lose.*hint: .*stop_gradient"):
            derive(onp.array([1.5, 2.0]))
    assert isinstance(read(np.asarray([1.5, 2.0])), og.Array)  # on no tape there is nothing to lose


def test_a_metric_of_another_library_is_refused():
    metrics = pytest.importorskip("sklearn.metrics")
    with pytest.raises(NotDifferentiable, match="a numpy array of an array on the tape"):
        og.grad(lambda x: metrics.mean_squared_error(x, onp.ones(2)))(onp.array([1.5, 2.0]))


def test_what_is_read_while_recording_is_a_constant_only_if_it_is_said():
    x = onp.array([1.5, 2.0])
    model = og.export(lambda x: x * float(og.stop_gradient(x)[0] * 1.0) if x[0] > 1 else x, x)
    assert og.from_onnx(model)(2 * x).tolist() == [4.5, 6.0]
    with pytest.raises(NotDifferentiable, match="would be a constant in the recorded program"):
        og.export(lambda x: onp.asarray(x > 0), x)


def test_a_copy_keeps_its_derivative():
    for copied in (copy.copy, copy.deepcopy, lambda x: copy.deepcopy({"of": [x]})["of"][0]):
        assert og.grad(lambda x: np.sum(copied(x) ** 2))(onp.array([1.5, 2.0])).tolist() == [3.0, 4.0]  # noqa: B023
    x = np.asarray([1.5, 2.0])
    y = copy.deepcopy(x)
    y[0] = 7.0
    assert x.tolist() == [1.5, 2.0]


def test_a_range_has_the_derivatives_of_its_start_and_its_step():
    og.check_grads(lambda x: np.arange(x[0], 9.0, x[1]) ** 2, onp.array([1.5, 2.0]))


def test_assignment_makes_another_array():
    x = np.asarray(X)
    y, z = x, x * 1.0
    z[0] = 0.0
    assert float(x[0, 0]) == X[0, 0]
    y[0, 0] = 7.0  # the same object
    assert float(x[0, 0]) == 7.0
    assert X[0, 0] != 7.0

    def f(x):
        w = np.asarray(onp.ones(3))
        product = w * x
        w[0] = 100.0  # after it was used
        w += 1.0
        return np.sum(product)

    assert og.grad(f)(onp.ones(3)).tolist() == [1, 1, 1]
    w = np.ones(1)
    with pytest.raises(ValueError, match="in place"):
        w += np.ones(3)


def test_arrays_are_not_hashed_and_not_pickled_with_a_tape():
    with pytest.raises(TypeError):
        hash(np.ones(1))
    assert pickle.loads(pickle.dumps(np.ones(2))).tolist() == [1, 1]


def test_the_derivative_of_a_random_operator_that_would_be_drawn_again_is_refused():
    def f(x):
        return np.sum(og.op.RandomNormalLike(x) * x * x)

    g = og.grad(f)(X)  # the numbers drawn are on the tape
    assert g.shape == X.shape
    with pytest.raises(BadInput, match="Nonsense"):
        og.op.apply("Nonsense", X)


# --- memory that is used again ---------------------------------------------------------------------


def test_memory_of_the_pool_belongs_to_one_array_at_a_time():
    from onnxgrad.eager.core import buffers

    buffers.release()
    big = rng.standard_normal((300, 300))
    addresses, kept = [], []

    def f(x):
        y = np.sin(x)
        addresses.append(y._data.ctypes.data)
        kept.append(y._data[5:])  # a view outlives the tape
        return np.sum(np.exp(y * 2.0) + y)

    expected = [onp.sin(big + i)[5:] for i in range(4)]
    for i in range(4):
        g = og.grad(f)(big + i)
        onp.testing.assert_allclose(onp.asarray(g), onp.cos(big + i) * (2 * onp.exp(2 * onp.sin(big + i)) + 1))
    for view, value in zip(kept, expected):
        onp.testing.assert_array_equal(view, value)
    assert len(set(addresses)) == 4  # all of them are still in use
    kept.clear()
    og.grad(f)(big)
    assert addresses[-1] in addresses[:-1]


def test_the_pool_takes_only_results_that_fit():
    x = np.asarray(rng.standard_normal((190, 190)))

    def f(x):
        parts = [x[:, None] * x[:1], x > 0, np.isnan(x), x.T * x, 2.0**x, x[0] + x, x[:, 0] * x, x // 0.3, x @ x]
        assert [p.dtype for p in parts[1:3]] == [bool, bool]
        assert parts[0].shape == (190, 1, 190)
        return sum(np.sum(p * 1.0) for p in parts)

    y = onp.asarray(x)
    expected = [y[:, None] * y[:1], y > 0, onp.isnan(y), y.T * y, 2.0**y, y[0] + y, y[:, 0] * y, y // 0.3, y @ y]
    value, _ = og.value_and_grad(f)(x)
    assert float(value) == pytest.approx(sum(float(onp.sum(p)) for p in expected))
    assert og.grad(lambda x: np.sum(x * x))(x.astype(onp.float32)).dtype == onp.float32
