"""The namespace: every name of the standard, values as numpy's, in every dtype."""

from __future__ import annotations

import numpy as onp
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from tests.eager import table


def test_the_page_is_what_the_namespace_does():
    assert table.PAGE.read_text() == table.page(), "run `python -m tests.eager.table`"
    assert table.REST.read_text() == table.page(first=False), "run `python -m tests.eager.table`"


def test_every_name_of_the_standard_is_there():
    assert "| no |" not in table.page()


def test_it_names_what_it_holds():
    public = {name for name in vars(np) if not name.startswith("_")} | {"__array_namespace_info__"}
    assert sorted(np.__all__) == sorted(public)
    for name, dtype in np.__array_namespace_info__().dtypes().items():
        assert onp.dtype(getattr(np, name)) == dtype


def test_it_says_what_it_is():
    x = np.ones(2)
    assert x.__array_namespace__() is np
    assert x.__array_namespace__(api_version="2024.12") is np
    with pytest.raises(ValueError, match="not among"):
        x.__array_namespace__(api_version="1999.12")
    info = np.__array_namespace_info__()
    assert info.default_dtypes()["real floating"] == np.float64
    assert set(info.dtypes(kind="bool")) == {"bool"}
    assert x.to_device(x.device) is x
    for call in (lambda: x.to_device("cuda"), lambda: np.zeros(1, device="cuda"), lambda: info.dtypes(device="cuda")):
        with pytest.raises(ValueError, match="'cuda'"):
            call()


def test_code_written_for_any_namespace():
    """A function that asks its arguments for their namespace is differentiated as it is."""

    def softmax(x):
        xp = x.__array_namespace__()
        e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
        return e / xp.sum(e, axis=-1, keepdims=True)

    x = onp.random.default_rng(0).standard_normal((2, 3))
    y = onp.asarray(softmax(np.asarray(x)))
    onp.testing.assert_allclose(y, softmax(x))  # numpy has the namespace too
    og.check_grads(softmax, x)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float32", "float64", "bool"])
def test_what_is_recorded_has_the_value_and_the_dtype_of_what_ran(dtype):
    """Operators of integers and booleans, saved as a model and run, against what numpy gave."""
    kind = onp.dtype(dtype).kind
    a = onp.array([[1, 0, 3], [2, 5, 7]]).astype(dtype)
    b = onp.array([[2, 1, 1], [3, 1, 2]]).astype(dtype)
    functions = {
        "b": [np.logical_and, np.logical_or, np.bitwise_xor, np.bitwise_and, lambda a, b: ~a, np.equal],
        "i": [
            np.add,
            np.multiply,
            np.floor_divide,
            np.remainder,
            np.maximum,
            np.less,
            lambda a, b: -a,
            lambda a, b: np.sign(a),
        ],
        "u": [np.add, np.multiply, np.bitwise_and, np.bitwise_left_shift, np.equal],
        "f": [
            np.divide,
            np.floor_divide,
            np.remainder,
            np.pow,
            np.minimum,
            np.not_equal,
            lambda a, b: np.signbit(a - b),
        ],
    }[kind]
    every = [
        lambda a, b: np.sum(a, axis=0), lambda a, b: np.astype(a, np.int64), lambda a, b: np.where(a > b, a, b),
        lambda a, b: np.any(a, axis=1), lambda a, b: np.all(b), lambda a, b: np.count_nonzero(a, axis=0),
        lambda a, b: np.concat([a, b]), lambda a, b: a[0], lambda a, b: np.isfinite(a), lambda a, b: a.T,
        lambda a, b: np.isnan(b), lambda a, b: a <= b, lambda a, b: a < b, lambda a, b: a >= b,
    ]  # fmt: skip
    for f in functions + every:
        ours = f(np.asarray(a), np.asarray(b))
        model = og.export(f, a, b)
        try:
            found = og.from_onnx(model)(a, b) if len(model.graph.input) == 2 else og.from_onnx(model)(a)
        except Exception as error:
            if "Could not find an implementation" in str(error):  # ONNX Runtime lacks some small integers
                continue
            raise
        assert found.dtype == ours.dtype
        onp.testing.assert_allclose(onp.asarray(found), onp.asarray(ours), rtol=1e-6)
