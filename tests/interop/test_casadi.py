"""The files that CasADi looks for: seeds and sensitivities of several directions, and CasADi's own derivatives."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxgrad
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.interop.casadi import family

MLP = (
    "double[3] x, double[2, 4] u", "double[3] y, double[2, 4] z",
    "s = Sin(x)\n y = Mul(s, x)\n m = MatMul(u, w)\n t = Tanh(m)\n r = ReduceSum<keepdims=0>(x)\n z = Mul(t, r)",
    {"w": np.random.default_rng(0).standard_normal((4, 4))},
)  # fmt: skip
CONV = (
    "float[36] x", "float[1, 2, 4, 4] y",
    "i = Reshape(x, shape)\n c = Conv(i, k)\n y = Sigmoid(c)",
    {"shape": np.array([1, 1, 6, 6]), "k": np.random.default_rng(1).standard_normal((2, 1, 3, 3)).astype(np.float32)},
)  # fmt: skip
LSTM = (
    "float[4, 2] x", "float[3, 1] y",
    "b = Constant<value_ints=[1]>()\n s = Unsqueeze(x, b)\n h, l = LSTM<hidden_size=3>(s, w, r)\n"
    "shape = Constant<value_ints=[3, 1]>()\n y = Reshape(l, shape)",
    {
        "w": np.random.default_rng(0).standard_normal((1, 12, 2)).astype(np.float32),
        "r": np.random.default_rng(1).standard_normal((1, 12, 3)).astype(np.float32),
    },
)  # fmt: skip


def model(inputs, outputs, body, weights):
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {body} }}'
    )
    for name, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def io(path):
    session = onnxruntime.InferenceSession(path)
    return [(v.name, v.shape) for v in session.get_inputs()], [(v.name, v.shape) for v in session.get_outputs()]


def test_names_and_shapes_of_the_files(tmp_path):
    files = family(model(*MLP), tmp_path / "gen")
    assert [p.name for p in files] == ["f.onnx", "fwd_f.onnx", "adj_f.onnx", "fwd_adj_f.onnx"]
    own, given = io(files[0])
    assert io(files[1]) == (
        [*own, ("fwd_x", [3, "nfwd"]), ("fwd_u", [2, "nfwd_x4"])],
        [*given, ("fwd_y", [3, "nfwd"]), ("fwd_z", [2, "nfwd_x4"])],
    )
    assert io(files[2]) == (
        [*own, ("adj_y", [3, "nadj"]), ("adj_z", [2, "nadj_x4"])],
        [*given, ("adj_x", [3, "nadj"]), ("adj_u", [2, "nadj_x4"])],
    )
    inputs, outputs = io(files[3])
    assert inputs[4:] == [
        ("fwd_x", [3, "nfwd"]), ("fwd_u", [2, "nfwd_x4"]),
        ("fwd_adj_y", [3, "nfwd_nadj"]), ("fwd_adj_z", [2, "nfwd_nadj_x4"]),
    ]  # fmt: skip
    assert outputs[4:] == [("fwd_adj_x", [3, "nfwd_nadj"]), ("fwd_adj_u", [2, "nfwd_nadj_x4"])]


def test_directions_lie_side_by_side(tmp_path):
    """Forward and reverse of several directions are one bilinear form: ⟨adj, J·fwd⟩ either way, pair by pair."""
    _, fwd, adj, _ = family(model(*MLP), tmp_path)
    rng = np.random.default_rng(2)
    primal = {"x": rng.standard_normal(3), "u": rng.standard_normal((2, 4))}
    seeds = {"fwd_x": rng.standard_normal((3, 2)), "fwd_u": rng.standard_normal((2, 8))}
    weights = {"adj_y": rng.standard_normal((3, 5)), "adj_z": rng.standard_normal((2, 20))}

    def run(path, feeds):
        session = onnxruntime.InferenceSession(path)
        return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))

    moved, pulled = run(fwd, primal | seeds), run(adj, primal | weights)

    def block(matrix, k, columns):
        return matrix[:, k * columns : (k + 1) * columns]

    for i in range(2):
        for j in range(5):
            a = np.sum(block(moved["fwd_y"], i, 1) * block(weights["adj_y"], j, 1))
            a += np.sum(block(moved["fwd_z"], i, 4) * block(weights["adj_z"], j, 4))
            b = np.sum(block(seeds["fwd_x"], i, 1) * block(pulled["adj_x"], j, 1))
            b += np.sum(block(seeds["fwd_u"], i, 4) * block(pulled["adj_u"], j, 4))
            assert a == pytest.approx(b, rel=1e-10)


@pytest.fixture(scope="module")
def casadi():
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
    if library is None:
        pytest.skip("this onnxruntime has no library that CasADi could load")
    os.environ["CASADI_ONNXRUNTIME_LIB"] = str(library)
    return pytest.importorskip("casadi", minversion="3.8")


def derivatives(casadi, what, folder):
    """Values, the Jacobian of all outputs by all inputs, gradient and Hessian of half the sum of their squares."""
    f = casadi.GraphBuilder(str(family(model(*what), folder)[0])).create("f")
    inputs = [casadi.MX.sym(f.name_in(i), *f.size_in(i)) for i in range(f.n_in())]
    given = f(*inputs)
    found = casadi.vertcat(*[casadi.vec(y) for y in (given if isinstance(given, tuple) else (given,))])
    flat = casadi.vertcat(*[casadi.vec(x) for x in inputs])
    hessian, gradient = casadi.hessian(casadi.sumsqr(found) / 2, flat)
    derived = casadi.Function("d", inputs, [found, casadi.jacobian(found, flat), gradient, hessian])
    sizes = [f.size_in(i) for i in range(f.n_in())]

    def at(z):
        parts = np.split(z, np.cumsum([a * b for a, b in sizes])[:-1])
        return [np.array(m) for m in derived(*(p.reshape(s, order="F") for p, s in zip(parts, sizes)))]

    return at, np.random.default_rng(3).standard_normal(sum(a * b for a, b in sizes))


def test_jacobian_and_hessian_of_casadi_by_differences(casadi, tmp_path):
    at, z = derivatives(casadi, MLP, tmp_path)
    _, jacobian, _, hessian = at(z)
    steps = [(at(z + s), at(z - s)) for s in np.eye(len(z)) * 1e-5]
    np.testing.assert_allclose(jacobian, np.hstack([(a[0] - b[0]) / 2e-5 for a, b in steps]), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(hessian, np.hstack([(a[2] - b[2]) / 2e-5 for a, b in steps]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("what", [CONV, LSTM], ids=["conv", "lstm"])
def test_jacobian_and_hessian_of_casadi_in_float32(casadi, what, tmp_path):
    at, z = derivatives(casadi, what, tmp_path)
    values, jacobian, _, hessian = at(z)
    shape = [d.dim_value for d in model(*what).graph.input[0].type.tensor_type.shape.dim]
    f = onnxgrad.Function(model(*what))
    x = z.reshape(shape, order="F" if len(shape) == 2 else "C").astype(np.float32)

    def columns(array):  # the axes of x as CasADi counts its elements
        rows = array.reshape(-1, *shape)
        return rows.reshape(len(rows), -1) if len(shape) != 2 else rows.transpose(0, 2, 1).reshape(len(rows), -1)

    expected = columns(f.jacobian(wrt="x", of="y")(x))
    np.testing.assert_allclose(jacobian, expected, rtol=1e-5, atol=1e-6)
    y = model(*what)
    y.graph.node.extend([
        onnx.helper.make_node("ReduceSumSquare", ["y"], ["squares"], keepdims=0),
        onnx.helper.make_node("Constant", [], ["half"], value_float=0.5),
        onnx.helper.make_node("Mul", ["squares", "half"], ["total"]),
    ])  # fmt: skip
    y.graph.output.append(onnx.helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))
    second = onnxgrad.Function(y).hessian(wrt="x", of="total")(x).reshape(*shape, *shape)
    wide = columns(second.reshape(-1, *shape))
    whole = columns(wide.T.reshape(-1, *shape)).T
    np.testing.assert_allclose(hessian, whole, rtol=1e-4, atol=1e-5)
    assert values.size == expected.shape[0]


def test_sizes_that_are_open_are_given_or_refused(tmp_path):
    batch = model("double[N, 3] x", "double[N, 3] y", "y = Sin(x)", {})
    with pytest.raises(BadInput, match=r"has a size that is not fixed \(N\)"):
        family(batch, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(UnknownName, match="no dimension named 'M'"):
        family(batch, tmp_path / "a", dims={"M": 1})
    (f, *_) = family(batch, tmp_path / "a", dims={"N": 2})
    assert io(f)[1] == [("y", [2, 3])]
