"""Each operator that has a stacked form, with operands of every rank: as many directions one by one."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from onnxgrad import jacobian, jvp, signature
from onnxgrad.batching import directions
from tests.models import assert_no_traps, model, nodes_of, value
from tests.transforms.numbers import session

rng = np.random.default_rng(1)


def ints(*numbers):
    return np.array(numbers, np.int64)


#: operator, shapes of its float operands, constants for further operands, attributes
CASES = [
    *[("MatMul", s, [], {}) for s in (
        [(3,), (3,)], [(3,), (3, 2)], [(2, 3), (3,)], [(2, 3), (3, 2)], [(4, 2, 3), (3, 2)], [(2, 3), (4, 3, 2)],
        [(3,), (4, 3, 2)], [(4, 2, 3), (3,)], [(4, 2, 3), (4, 3, 2)], [(1, 2, 3), (4, 3, 2)], [(5, 4, 2, 3), (4, 3, 2)],
    )],
    *[("Gemm", [(2, 3) if not a else (3, 2), (3, 4) if not b else (4, 3)], [], {"transA": a, "transB": b, "alpha": 1.5})
      for a in (0, 1) for b in (0, 1)],
    *[(op, s, [], {}) for op in ("Add", "Sub", "Mul", "Div", "Sum") for s in (
        [(2, 3), (2, 3)], [(3,), (2, 3)], [(2, 3), (3,)], [(), (2, 3)], [(2, 3), ()], [(2, 1), (1, 3)], [(), ()])],
    ("Neg", [(2, 3)], [], {}),
    ("Identity", [()], [], {}),
    ("Transpose", [(2, 3, 4)], [], {}),
    ("Transpose", [(2, 3, 4)], [], {"perm": [1, 2, 0]}),
    ("Reshape", [(2, 3, 4)], [ints(0, -1)], {}),
    ("Reshape", [(2, 3)], [ints(3, 2)], {}),
    ("Reshape", [(1, 1)], [ints()], {}),
    ("Expand", [(2, 1)], [ints(4, 1, 3)], {}),
    ("Expand", [(4, 2, 1)], [ints(1, 3)], {}),
    ("Expand", [()], [ints(2, 3)], {}),
    *[(op, [(2, 3, 4)], [ints(*axes)], {"keepdims": k}) for op in ("ReduceSum", "ReduceMean")
      for axes in ((0,), (-1, 0), (1,)) for k in (0, 1)],
    ("ReduceSum", [(2, 3)], [], {"keepdims": 0}),
    ("ReduceSum", [()], [], {"keepdims": 0}),
    ("ReduceSum", [(2, 3)], [ints()], {"noop_with_empty_axes": 1}),
    ("Unsqueeze", [(2, 3)], [ints(-1, 0)], {}),
    ("Squeeze", [(1, 3, 1)], [ints(-1)], {}),
    ("Squeeze", [(1, 3, 1)], [], {}),
    ("Slice", [(4, 5)], [ints(1), ints(9), ints(-1)], {}),
    ("Slice", [(4, 5)], [ints(3, 0), ints(0, 4), ints(0, 1), ints(-1, 2)], {}),
    ("Slice", [(4, 5)], [ints(1, 2), ints(3, 4)], {}),
    ("Concat", [(2, 3), (2, 1)], [], {"axis": -1}),
    ("Concat", [(2, 3), (1, 3)], [], {"axis": 0}),
    ("Gather", [(4, 3)], [ints(2, 0, 2)], {"axis": 1}),
    ("Gather", [(4, 3)], [np.array(1, np.int64)], {}),
    ("Cast", [(2,)], [], {"to": T.DOUBLE}),
]  # fmt: skip


def build(op, shapes, constants, attrs, symbolic):
    names = [f"x{i}" for i in range(len(shapes))]
    weights = {f"c{i}": c for i, c in enumerate(constants)}
    sizes = {d: f"D{d}" for d in (2, 3, 4, 5)} if symbolic else {}
    inputs = [value(n, [sizes.get(d, d) for d in s], T.DOUBLE) for n, s in zip(names, shapes)]
    return model(
        [helper.make_node(op, [*names, *weights], ["y"], **attrs)], inputs, [value("y", None, T.DOUBLE)], weights
    )


@pytest.mark.sweep(5)
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_directions_one_by_one(case, symbolic):
    op, shapes, constants, _ = case
    if op == "Squeeze" and not constants and symbolic:
        pytest.skip("its rank is not known")
    source = build(*case, symbolic)
    names = [f"x{i}" for i in range(len(shapes))]
    feeds = {n: rng.standard_normal(s) for n, s in zip(names, shapes)}
    for wrt in [[n] for n in names] + ([names] if len(names) > 1 else []):
        tangents = {f"{n}_tangent": rng.standard_normal((3, *feeds[n].shape)) for n in wrt}
        one = session(jvp(source, wrt=wrt))
        want = np.stack([one(feeds | {n: t[k] for n, t in tangents.items()})["y_tangent"] for k in range(3)])
        derived = jvp(source, wrt=wrt, directions="K" if symbolic else 3)
        onnx.checker.check_model(derived, full_check=True)
        assert_no_traps(derived, source)
        got = session(derived)(feeds | tangents)["y_tangent"]
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        if wrt == names and not symbolic:
            derived = jacobian(source, wrt=wrt, mode="reverse")
            got, out = session(derived)(feeds), signature(derived).jacobians["y"]
            for n in wrt:
                moved = session(jvp(source, wrt=n))(feeds | {f"{n}_tangent": np.ones_like(feeds[n])})["y_tangent"]
                np.testing.assert_allclose(got[out[n]].reshape(*moved.shape, -1).sum(-1), moved, atol=1e-12)


def test_a_selection_takes_no_scan():
    nodes = [helper.make_node("Where", ["c", "x", "z"], ["y"])]
    source = model(nodes, [value("c", [2, 3], T.BOOL), value("x", [3], T.DOUBLE), value("z", [2, 3], T.DOUBLE)],
                   [value("y", [2, 3], T.DOUBLE)])  # fmt: skip
    c, x, z = rng.standard_normal((2, 3)) > 0, rng.standard_normal(3), rng.standard_normal((2, 3))
    for mode in ("reverse", "forward"):
        derived = jacobian(source, wrt=["x", "z"], mode=mode)
        assert "Scan" not in {n.op_type for n in nodes_of(derived.graph)}
        got = session(derived)({"c": c, "x": x, "z": z})
        np.testing.assert_array_equal(got["y_x_jacobian"], np.where(c, 1, 0)[..., None] * np.eye(3)[None])
        want = np.where(c, 0, 1).reshape(-1, 1) * np.eye(6)
        np.testing.assert_array_equal(got["y_z_jacobian"].reshape(6, 6), want)


def test_large_stacks_are_not_made(monkeypatch):
    source = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", [8, 4], T.DOUBLE)],
                   [value("y", [8, 4], T.DOUBLE)], {"w": np.eye(4)})  # fmt: skip
    for most, scans in ((1024, 0), (1023, 1)):
        monkeypatch.setattr(directions, "MOST_ELEMENTS", most)
        assert sum(n.op_type == "Scan" for n in nodes_of(jacobian(source, wrt="x").graph)) == scans
