"""Sparse Jacobians and Hessians against dense ones: every entry, and nothing outside the pattern."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from onnx import helper

from onnxgrad import (
    BadInput,
    Function,
    custom_rules,
    custom_vjp,
    hessian,
    jacobian,
    signature,
    sparse_hessian,
    sparse_jacobian,
)
from tests.models import assert_no_traps, model, nodes_of, value
from tests.transforms.numbers import net, session
from tests.transforms.programs import SHAPES, programs

sparse = pytest.importorskip("scipy.sparse")
SMALL = settings(max_examples=25, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                 suppress_health_check=list(HealthCheck))  # fmt: skip
rng = np.random.default_rng(5)
normal = rng.standard_normal
EVERY = "int64[1] o = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] m1 = {-1}, int64[1] m2 = {-2}, " \
        "int64[1] end = {9223372036854775807}"  # fmt: skip


def parsed(text: str, constants: str = EVERY) -> onnx.ModelProto:
    head, _, body = text.partition("{")
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {head} <{constants}> {{{body}')


def matrix(derived, feeds, of_size, wrt_size):
    """The matrix that the outputs of a derived model describe."""
    names = signature(derived)
    ((entries, where),) = names.patterns.items()
    found = session(derived)(feeds)
    assert found[where["indptr"]].shape == (of_size + 1,)
    return sparse.csr_array((found[entries], found[where["indices"]], found[where["indptr"]]), (of_size, wrt_size))


def check(source, feeds, wrt="x", of="y", entries=None, directions=None, shapes=None):
    derived = sparse_jacobian(source, wrt=wrt, of=of, shapes=shapes)
    onnx.checker.check_model(derived, full_check=True)
    assert_no_traps(derived, source)
    dense_model = jacobian(source, wrt=wrt, of=of)
    dense = session(dense_model)(feeds)[signature(dense_model).jacobians[of][wrt]]
    size = feeds[wrt].size
    dense = dense.reshape(-1, size)
    got = matrix(derived, feeds, len(dense), size)
    tolerance = 1e-11 if dense.dtype == np.float64 else 1e-5
    np.testing.assert_allclose(got.toarray(), dense, rtol=tolerance, atol=tolerance)
    assert entries is None or got.nnz == entries
    if directions is not None:
        held = {t.name: t.dims for t in derived.graph.initializer}
        seeds = [dims for name, dims in held.items() if name.startswith("const") and list(dims[1:]) == [size]]
        assert sum(d[0] for d in seeds) == directions
    return got


TRIDIAGONAL = """(double[N] x) => (double[M] y) {
    l = Slice(x, o, m2) c = Slice(x, one, m1) r = Slice(x, two, end)
    e = Exp(c) s = Add(l, r) y = Sub(s, e) }"""
ARROW = """(double[N] x) => (double[M] y) {
    h = Slice(x, o, one) t = Mul(x, h) s = Sin(x) a = ReduceSum <keepdims = 1> (s) y = Concat <axis = 0> (a, t) }"""
POISSON = """(float[1, 1, 6, 6] x) => (float[1, 1, 6, 6] y) {
    d = Conv <pads = [1, 1, 1, 1]> (x, k) e = Exp(x) y = Add(d, e) }"""
STENCIL = "float[1, 1, 3, 3] k = {0, 1, 0, 1, -4, 1, 0, 1, 0}"


def test_a_tridiagonal_jacobian_takes_three_directions():
    check(parsed(TRIDIAGONAL), {"x": normal(12)}, entries=30, directions=3, shapes={"x": [12]})
    x = normal(10_000)
    derived = sparse_jacobian(parsed(TRIDIAGONAL), wrt="x", shapes={"x": [10_000]})
    assert [3, 10_000] in [list(t.dims) for t in derived.graph.initializer]
    got = matrix(derived, {"x": x}, 9_998, 10_000)
    assert got.nnz == 3 * 9_998
    np.testing.assert_allclose(got.diagonal(1), -np.exp(x[1:-1]))


def test_a_stencil_leaves_out_where_the_kernel_is_zero():
    got = check(parsed(POISSON, STENCIL), {"x": normal((1, 1, 6, 6)).astype(np.float32)}, entries=36 + 4 * 30)
    assert not got.toarray()[0, 7]  # the corner of the kernel


def test_a_dense_row_and_a_dense_column_are_computed_apart():
    """By columns alone, or rows alone, as many directions as elements."""
    n = 40
    got = check(parsed(ARROW), {"x": normal(n)}, shapes={"x": [n]})
    assert got.nnz == n + (2 * n - 1)
    derived = sparse_jacobian(parsed(ARROW), wrt="x", shapes={"x": [n]})
    seeds = [t.dims for t in derived.graph.initializer if len(t.dims) == 2]
    assert sum(d[0] for d in seeds) <= 4


def test_a_wide_function_in_forward_mode_and_a_tall_one_in_reverse_mode():
    total = parsed("(double[9] x) => (double[1] y) { s = Sin(x) y = ReduceSum <keepdims = 1> (s) }")
    check(total, {"x": normal(9)}, entries=9)
    assert not [t for t in sparse_jacobian(total, wrt="x").graph.initializer if list(t.dims) == [9, 9]]
    spread = parsed("(double[1] x) => (double[9] y) { s = Sin(x) y = Expand(s, n) }", "int64[1] n = {9}")
    check(spread, {"x": normal(1)}, entries=9)


#: operators as text, with the shapes of x and y, constants, and how many entries there are
CASES = {
    "Transpose": ("double[2, 3] x", "double[3, 2] y", "y = Transpose(x)", "", 6),
    "Gather": ("double[4, 2] x", "double[3, 2] y", "y = Gather(x, i)", "int64[3] i = {1, 1, -1}", 6),
    "GatherElements": ("double[2, 2] x", "double[2, 1] y", "y = GatherElements <axis = 1> (x, i)",
                       "int64[2, 1] i = {1, 0}", 2),
    "GatherND": ("double[2, 2] x", "double[2] y", "y = GatherND(x, i)", "int64[2, 2] i = {1, 0, 0, 0}", 2),
    "Pad": ("double[3] x", "double[6] y", "y = Pad(x, p)", "int64[2] p = {1, 2}", 3),
    "Pad reflected": ("double[3] x", "double[6] y", 'y = Pad <mode = "reflect"> (x, p)', "int64[2] p = {1, 2}", 6),
    "Concat": ("double[3] x", "double[9] y", "y = Concat <axis = 0> (x, c, z) z = Sin(x)",
               "double[3] c = {1, 2, 3}", 6),
    "one value in two places": ("double[3] x", "double[6] y", "y = Concat <axis = 0> (x, x)", "", 6),
    "one constant in two places": ("double[3, 3] x", "double[3, 1] y", "y = Slice(x, a, b, a)",
                                   "int64[1] a = {1}, int64[1] b = {2}", 3),
    "Tile": ("double[3] x", "double[6] y", "y = Tile(x, n)", "int64[1] n = {2}", 6),
    "Split": ("double[6] x", "double[3] y", "a, b = Split <num_outputs = 2> (x) y = Mul(a, b)", "", 6),
    "Trilu": ("double[3, 3] x", "double[3, 3] y", "y = Trilu(x)", "", 6),
    "Broadcast": ("double[3, 1] x", "double[3, 4] y", "y = Mul(x, c)", "double[4] c = {1, 2, 3, 4}", 12),
    "Where": ("double[3] x", "double[3] y", "y = Where(c, x, n) n = Neg(x)", "bool[3] c = {1, 0, 1}", 3),
    "MatMul": ("double[2, 3] x", "double[2, 2] y", "y = MatMul(x, w)", "double[3, 2] w = {1, 0, 0, 2, 0, 3}", 6),
    "MatMul of stacks": ("double[2, 2, 3] x", "double[2, 2, 2] y", "y = MatMul(x, w)",
                         "double[3, 2] w = {1, 1, 1, 2, 1, 3}", 24),
    "MatMul of one matrix beside a stack": ("double[1, 1, 3] x", "double[2, 1, 2] y", "y = MatMul(x, w)",
                                            "double[2, 3, 2] w = {1, 1, 1, 2, 1, 3, 4, 1, 4, 2, 4, 3}", 12),
    "MatMul of vectors": ("double[3] x", "double[2] y", "y = MatMul(w, x)", "double[2, 3] w = {1, 0, 0, 2, 0, 3}", 3),
    "MatMul of itself": ("double[2, 2] x", "double[2, 2] y", "y = MatMul(x, x)", "", 12),
    "Gemm": ("double[3, 2] x", "double[2, 2] y", "y = Gemm <transA = 1, alpha = 0.5> (x, w, b)",
             "double[3, 2] w = {1, 0, 0, 2, 0, 3}, double[2] b = {1, 1}", 6),
    "Einsum": ("double[2, 3] x", "double[3] y", 'y = Einsum <equation = "ij,i->j"> (x, w)', "double[2] w = {1, 0}", 3),
    "ReduceSum": ("double[2, 3] x", "double[3] y", "y = ReduceSum <keepdims = 0> (x, a)", "int64[1] a = {0}", 6),
    "ReduceMax": ("double[2, 3] x", "double[1, 1] y", "y = ReduceMax(x)", "", 6),
    "Softmax": ("double[2, 3] x", "double[2, 3] y", "y = Softmax(x)", "", 18),
    "LayerNormalization": ("double[2, 3] x", "double[2, 3] y", "y = LayerNormalization(x, s)",
                           "double[3] s = {1, 2, 3}", 18),
    "CumSum": ("double[2, 3] x", "double[2, 3] y", "y = CumSum(x, a)", "int64 a = {1}", 12),
    "CumSum from the end": ("double[3] x", "double[3] y", "y = CumSum <reverse = 1> (x, a)", "int64 a = {0}", 6),
    "ScatterElements": ("double[2, 2] x", "double[4, 2] y", "y = ScatterElements(d, i, x)",
                        "double[4, 2] d = {1, 2, 3, 4, 5, 6, 7, 8}, int64[2, 2] i = {3, 1, 0, -2}", 4),
    "ScatterND": ("double[4] x", "double[4] y", 'y = ScatterND(x, i, u) u = Slice(x, o, two)',
                  EVERY + ", int64[2, 1] i = {3, 1}", 4),
    "Conv": ("float[1, 2, 4] x", "float[1, 2, 2] y", "y = Conv <group = 2, strides = [2], pads = [1, 0]> (x, w)",
             "float[2, 1, 2] w = {1, 2, 3, 0}", 4),
    "ConvTranspose": ("float[1, 2, 3] x", "float[1, 1, 6] y", "y = ConvTranspose <strides = [2]> (x, w)",
                      "float[2, 1, 2] w = {1, 2, 3, 4}", 12),
    "AveragePool": ("float[1, 2, 4] x", "float[1, 2, 2] y", "y = AveragePool <kernel_shape = [3], strides = [1]> (x)",
                    "", 12),
    "MaxPool": ("double[1, 1, 4, 4] x", "double[1, 1, 2, 2] y",
                "y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)", "", 16),
    "a shape": ("double[2, 3] x", "double[6] y", "s = Shape(x) n = ReduceProd <keepdims = 1> (s) y = Reshape(x, n)",
                "", 6),
    "rounding": ("double[3] x", "double[3] y", "r = Round(x) y = Mul(x, r)", "", 3),
    "an index that depends on the input": ("double[3] x", "double[3] y",
                                           "i = ArgMax <axis = 0> (x) h = Gather(x, i) y = Add(x, h)", "", 9),
    "a branch": ("double[2] x", "double[2] y", "c = Greater(x0, z) x0 = ReduceSum <keepdims = 0> (x) y = If (c) <"
                 "then_branch = t () => (double[2] a) { a = Sin(x) }, "
                 "else_branch = e () => (double[2] b) { b = Neg(x) }>",
                 "double z = {0.0}", 4),
    "an operator with a body": ("float[3] x", "float[3] y", "y = Softsign(x)", "", 3),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_operators(case):
    inputs, out, body, constants, entries = CASES[case]
    source = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({out}) {f"<{constants}>" if constants else ""} '
        f"{{ {_ordered(body)} }}"
    )
    dims = [d.dim_value for d in source.graph.input[0].type.tensor_type.shape.dim]
    kind = helper.tensor_dtype_to_np_dtype(source.graph.input[0].type.tensor_type.elem_type)
    check(source, {"x": normal(dims).astype(kind)}, entries=entries)


def _ordered(body: str) -> str:
    """Statements written after those that read them, before them: ``y = … z = …`` as ``z = … y = …``."""
    for last in ("z = Sin(x)", "n = Neg(x)", "u = Slice(x, o, two)", "x0 = ReduceSum <keepdims = 0> (x)"):
        if last in body and not body.startswith(last):
            body = f"{last} {body.replace(last, '')}"
    return body


@given(programs(symbolic=False))
@SMALL
@pytest.mark.filterwarnings("ignore::onnxgrad.ZeroDerivative")
def test_random_programs(program):
    feeds = {n: normal(s) for n, s in SHAPES.items()}
    check(program.model, feeds, "x")
    dense = session(hessian(program.model, wrt="x", of="y"))(feeds)["x_x_hessian"].reshape(6, 6)
    got = matrix(sparse_hessian(program.model, wrt="x", of="y"), feeds, 6, 6).toarray()
    np.testing.assert_allclose(got, dense, rtol=1e-9, atol=1e-10)


# --- Hessians --------------------------------------------------------------------------------------

CHAIN = """(double[N] x) => (double y) {
    a = Slice(x, o, m1) b = Slice(x, one, end) p = Mul(a, b) s = Sin(p) y = ReduceSum <keepdims = 0> (s) }"""


@pytest.mark.parametrize(("text", "entries", "most"), [(CHAIN, 58, 3), (ARROW, 3 * 20 - 2, 3)])
def test_hessians_take_a_star_colouring(text, entries, most):
    source, x = parsed(text), normal(20)
    derived = sparse_hessian(source, wrt="x", shapes={"x": [20]})
    onnx.checker.check_model(derived, full_check=True)
    got = matrix(derived, {"x": x}, 20, 20)
    dense = session(hessian(source, wrt="x"))({"x": x})["x_x_hessian"]
    np.testing.assert_allclose(got.toarray(), dense, rtol=1e-12, atol=1e-12)
    assert got.nnz == entries
    assert max(t.dims[0] for t in derived.graph.initializer if len(t.dims) == 2) <= most


def test_a_convolution_twice():
    """Its gradient is a ConvTranspose."""
    source = parsed("(float[1, 1, 6] x) => (float[1, 1, 4] y) { c = Conv(x, k) y = Tanh(c) }",
                    "float[1, 1, 3] k = {1, -2, 1}")  # fmt: skip
    x = normal((1, 1, 6)).astype(np.float32)
    dense = session(hessian(source, wrt="x"))({"x": x})["x_x_hessian"].reshape(6, 6)
    got = matrix(sparse_hessian(source, wrt="x"), {"x": x}, 6, 6)
    np.testing.assert_allclose(got.toarray(), dense, rtol=1e-5, atol=1e-5)
    assert got.nnz == 24  # the band of width five


# --- as functions ----------------------------------------------------------------------------------


def test_of_a_function_at_sizes_that_are_known_when_it_is_called():
    f = Function(parsed(TRIDIAGONAL))
    derive = f.sparse_jacobian(wrt="x", of="y")
    for n in (5, 9, 5):
        x = normal(n)
        got = derive(x)
        assert isinstance(got, sparse.csr_array)
        assert got.has_canonical_format
        np.testing.assert_allclose(got.toarray(), f.jacobian(wrt="x")(x), rtol=1e-12)
    got.indices[:] = 0  # the caller's
    np.testing.assert_allclose(derive(x=x).toarray(), f.jacobian(wrt="x")(x), rtol=1e-12)
    g = Function(parsed(CHAIN))
    np.testing.assert_allclose(g.sparse_hessian(wrt="x")(x).toarray(), g.hessian(wrt="x")(x), rtol=1e-12)
    dense = Function(net([3, 4, 2]))
    x = normal((2, 3))
    got = dense.sparse_jacobian(wrt="x")(x)
    assert got.nnz == 12  # rows of a batch do not meet
    np.testing.assert_allclose(got.toarray(), dense.jacobian(wrt="x")(x).reshape(4, 6), rtol=1e-12)
    weights = dense.sparse_jacobian(wrt="b1")(x)
    np.testing.assert_allclose(weights.toarray(), dense.jacobian(wrt="b1")(x).reshape(4, 2))


def test_the_kkt_matrix_of_optimal_control():
    """x⁺ = x + sin(x)/8 + u/8 over ten steps: the Hessian of the Lagrangian is banded, with the Jacobian as a block."""
    source = parsed("""(double[33] z) => (double lagrangian, double[10] g) {
        x = Slice(z, o, i11) u = Slice(z, i11, i21) m = Slice(z, i21, i31)
        now = Slice(x, o, m1) next = Slice(x, one, end) s = Sin(now) su = Add(s, u) d = Mul(su, h) to = Add(now, d)
        g = Sub(next, to) mg = Mul(m, g) c = ReduceSum <keepdims = 0> (mg) xx = ReduceSumSquare <keepdims = 0> (x)
        uu = ReduceSumSquare <keepdims = 0> (u) q = Add(xx, uu) lagrangian = Add(q, c) }""",
        EVERY + ", int64[1] i11 = {11}, int64[1] i21 = {21}, int64[1] i31 = {31}, double h = {0.125}")  # fmt: skip
    z = normal(33)
    f = Function(source)
    kkt = f.sparse_hessian(wrt="z", of="lagrangian")(z)
    np.testing.assert_allclose(kkt.toarray(), f.hessian(wrt="z", of="lagrangian")(z), atol=1e-14)
    constraints = f.sparse_jacobian(wrt="z", of="g")(z)
    assert constraints.nnz == 30
    np.testing.assert_allclose(kkt.toarray()[21:31], constraints.toarray(), atol=1e-14)
    derived = sparse_hessian(source, wrt="z", of="lagrangian")
    assert max(t.dims[0] for t in derived.graph.initializer if len(t.dims) == 2) <= 5


# --- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"wrt": "x"}, "the shape of 'x' is not known.*\n.*give `shapes`"),
        ({"wrt": "x", "shapes": {"q": [3]}}, "`shapes` names no input"),
        ({"wrt": "x", "shapes": {"x": [3, 3]}}, "'x' the shape \\[3, 3\\]"),
        ({"wrt": "x", "of": ["y", "e"], "shapes": {"x": [3]}}, "one of y, e with `of`"),
    ],
)
def test_refused(arguments, says):
    with pytest.raises(BadInput, match=says):
        sparse_jacobian(parsed(TRIDIAGONAL), **arguments)


def test_what_is_dense_is_refused_before_it_takes_all_memory():
    branches = {"then_branch": _branch("Sin", "a"), "else_branch": _branch("Cos", "b")}
    source = model([helper.make_node("If", ["c"], ["y"], **branches)],
                   [value("x", [20_000], 11), value("c", [], 9)], [value("y", [20_000], 11)])  # fmt: skip
    with pytest.raises(BadInput, match="not sparse: If node"):
        sparse_jacobian(source, wrt="x")


@pytest.mark.parametrize(
    ("shape", "sizes", "says"),
    [("1000000, 1000000", 1, "'x' has 1000000000000 elements"), ("1", 10**13, "Expand node")],
)
def test_sizes_that_no_pattern_can_have_are_refused_before_it_takes_all_memory(shape, sizes, says):
    statements = "s = Sin(x) e = Expand(s, n) y = ReduceSum <keepdims = 0> (e)"
    source = parsed(f"(double[{shape}] x) => (double y) {{ {statements} }}", f"int64[1] n = {{{sizes}}}")
    with pytest.raises(BadInput, match=says):
        sparse_jacobian(source, wrt="x")


def _branch(op, out):
    return helper.make_graph([helper.make_node(op, ["x"], [out])], out, [], [value(out, [20_000], 11)])


def test_nothing_connects_them():
    source = parsed("(double[3] x, double[2] u) => (double[2] y) { y = Sin(u) }")
    got = Function(source).sparse_jacobian(wrt="x")(normal(3), normal(2))
    assert (got.shape, got.nnz) == ((2, 3), 0)
    assert not any(n.op_type in ("Scan", "Loop") for n in nodes_of(sparse_jacobian(source, wrt="x").graph))


def test_the_pattern_of_a_rule_of_the_user_is_dense():
    source = parsed("(double[3] x) => (double[3] y) { y = Identity (x) }")
    with custom_rules(custom_vjp("Identity", lambda op, g, x: op.Expand(op.ReduceSum(g, keepdims=1), op.Shape(x)))):
        derived = sparse_jacobian(source, wrt="x", of="y")
    np.testing.assert_array_equal(matrix(derived, {"x": np.ones(3)}, 3, 3).toarray(), np.ones((3, 3)))
