"""Attention and its cotangents without a matrix of scores, against the operators and float64."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels.elementwise import see_shapes
from onnxgrad.runtime.kernels.near_attention import bring_transposes_near
from onnxgrad.runtime.setting import Setting
from tests.runtime.kernels.pulled import Pulled
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import with_kernels

pytestmark = needs_kernels

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
BOTH = ["Attention", "AttentionGrad"]


def normal(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


def attention(q, k, v, scale="Mul", mask=None, layout="heads", symbolic=False, wrt=("q", "k", "v"), before=(), after=(),
              arrays=()):  # fmt: skip
    """softmax(s·q·kᵀ + mask)·v of operands [heads, rows, columns] or, in the layout "rows", with the rows first."""
    arrays = {"q0" if before else "q": q, "k": k, "v": v, **dict(arrays)}
    rank = q.ndim
    swap = {"heads": [*range(rank - 2), rank - 1, rank - 2], "rows": [0, 2, 3, 1]}[layout]
    nodes, names = [*before], ["q", "v"]
    if layout == "rows":
        names = ["q_heads", "v_heads"]
        nodes += [helper.make_node("Transpose", [x], [f"{x}_heads"], perm=[0, 2, 1, 3]) for x in ("q", "v")]
    nodes.append(helper.make_node("Transpose", ["k"], ["kt"], perm=swap))
    nodes.append(helper.make_node("MatMul", [names[0], "kt"], ["products"]))
    last = "products"
    if scale:
        arrays["s"] = np.float32(0.3 if scale == "Mul" else 3)
        nodes.append(helper.make_node(scale, [last, "s"], ["scaled"]))
        last = "scaled"
    if mask is not None:
        arrays["m"] = mask
        nodes.append(helper.make_node("Add", [last, "m"], ["masked"]))
        last = "masked"
    nodes.append(helper.make_node("Softmax", [last], ["p"], axis=-1))
    nodes.append(helper.make_node("MatMul", ["p", names[1]], ["y" if layout == "heads" else "y_heads"]))
    if layout == "rows":
        nodes.append(helper.make_node("Transpose", ["y_heads"], ["y"], perm=[0, 2, 1, 3]))
    return Pulled([*nodes, *after], arrays, wrt, symbolic)


def operands(batch, queries, keys, inside, outside):
    return normal(*batch, queries, inside), normal(*batch, keys, inside, seed=1), normal(*batch, keys, outside, seed=2)


def compare(operators, seed, kernels=BOTH):
    """Outputs and cotangents of both targets."""
    found = operators.compare(seed, kernels, **CLOSE)
    results, operators.results = operators.results, ["y"]
    operators.compare(seed, kernels, **CLOSE)
    operators.results = results
    return found


#: batch, queries, keys, columns of q and k, columns of v
SIZES = [
    ((2, 3), 5, 5, 4, 4),
    ((1, 1), 1, 1, 1, 1),
    ((2, 3), 16, 16, 32, 32),
    ((3,), 33, 17, 5, 9),
    ((1, 2), 70, 131, 48, 16),
    ((2, 2), 1, 40, 8, 8),
    ((2, 1), 19, 1, 3, 7),
    ((1, 1), 9, 2100, 4, 4),
    ((2, 2), 130, 64, 33, 65),
    ((40,), 3, 4, 2, 2),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention(sizes):
    batch, queries, _, _, outside = sizes
    compare(attention(*operands(*sizes)), normal(*batch, queries, outside, seed=3))


def test_attention_is_that_of_float64():
    q, k, v = operands((2, 2), 37, 50, 16, 24)
    seed = normal(2, 2, 37, 24, seed=3)
    found = compare(attention(q, k, v), seed)
    wide = [x.astype(np.float64) for x in (q, k, v, seed)]
    scores = 0.3 * wide[0] @ wide[1].swapaxes(2, 3)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = wide[3] @ wide[2].swapaxes(2, 3)
    ds = 0.3 * p * (dp - (p * dp).sum(-1, keepdims=True))
    exact = ds @ wide[1], ds.swapaxes(2, 3) @ wide[0], p.swapaxes(2, 3) @ wide[3]
    for a, b in zip(found, exact):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("scale", ["", "Mul", "Div"])
@pytest.mark.parametrize("symbolic", [False, True])
def test_heads_that_lie_between_the_rows(scale, symbolic):
    """Transposes around are taken in: nothing but the two calls is left."""
    rng = [normal(2, 21, 3, 16, seed=i) for i in range(4)]
    operators = attention(*rng[:3], scale, layout="rows", symbolic=symbolic)
    if symbolic:  # sizes of heads that may be broadcast
        assert operators.kernels == []
        return
    compare(operators, rng[3])


@pytest.mark.parametrize(("batch", "heads", "rows", "columns"), [(3, 2, 7, 5), (1, 1, 5, 3), (2, 4, 33, 8)])
def test_heads_beside_the_batch(batch, heads, rows, columns):
    """As PyTorch's MultiheadAttention has them: nothing is transposed around the calls."""
    nodes = []
    for x in "qkv":
        nodes += [
            helper.make_node("Reshape", [x, "beside"], [f"{x}_beside"]),
            helper.make_node("Transpose", [f"{x}_beside"], [f"{x}_ahead"], perm=[1, 0, 2]),
            helper.make_node("Reshape", [f"{x}_ahead", "apart"], [f"{x}_heads"]),
        ]
    nodes += [
        helper.make_node("Mul", ["q_heads", "s"], ["q_scaled"]),
        helper.make_node("Transpose", ["k_heads"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("Div", ["kt", "t"], ["k_scaled"]),
        helper.make_node("MatMul", ["q_scaled", "k_scaled"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v_heads"], ["y_heads"]),
        helper.make_node("Transpose", ["y_heads"], ["y_rows"], perm=[2, 0, 1, 3]),
        helper.make_node("Reshape", ["y_rows", "joined"], ["y"]),
    ]
    shapes = {"beside": [rows, -1, columns], "apart": [-1, heads, rows, columns], "joined": [rows, -1, heads * columns]}
    nodes = [
        *(helper.make_node("Constant", [], [name], value_ints=shape) for name, shape in shapes.items()),
        helper.make_node("Constant", [], ["s"], value_floats=[0.7]),
        helper.make_node("Constant", [], ["t"], value_float=3.0),
        *nodes,
    ]
    arrays = {x: normal(rows, batch, heads * columns, seed=i) for i, x in enumerate("qkv")}
    operators = Pulled(nodes, arrays, "qkv")
    compare(operators, normal(rows, batch, heads * columns, seed=3))
    assert not [n for n in with_kernels(operators.model).graph if n.op_type == "Transpose"]


def test_transposes_of_a_batch_that_a_run_tells():
    """Those around a product come next to it, over Reshapes that cut or join axes; others stay."""
    text = """
        a = Reshape(x, beside) b = Transpose<perm=[1, 0, 2]>(a) c = Reshape(b, apart) q = Mul(c, half)
        d = Reshape(w, mixed) k = Transpose<perm=[0, 2, 1, 3]>(d)
        p = MatMul(q, k)
        e = Mul(p, half) f = Reshape(e, together) g = Transpose<perm=[1, 0, 2]>(f) z = Reshape(g, rows)"""
    ends = """(float[7,N,6] x, float[N,2,12] w) => (float[7,N,8] z)
        <float half = {0.5}, int64[3] beside = {7,-1,3}, int64[4] apart = {-1,2,7,3}, int64[4] mixed = {-1,3,2,4},
         int64[3] together = {-1,7,4}, int64[3] rows = {7,-1,8}>"""
    parsed = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g ' + ends + "{" + text + "}")
    model = ir.from_proto(parsed)
    see_shapes(model)
    bring_transposes_near(Setting(model.graph, "native").builder(model.graph, "near"))
    (product,) = [n for n in model.graph if n.op_type == "MatMul"]
    (after,) = product.outputs[0].consumers()
    assert [n.op_type for n in (*product.predecessors(), after)] == ["Transpose"] * 3
    assert [n.op_type for n in model.graph].count("Transpose") == 3
    for batch in (1, 5):
        feeds = {"x": normal(7, batch, 6), "w": normal(batch, 2, 12, seed=1)}
        models = model, ir.from_proto(parsed)
        found, expected = (Session(m, Options(target="portable")).run(feeds)["z"] for m in models)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "shape", [(11, 13), (1, 13), (11, 1), (13,), (2, 1, 1, 13), (3, 11, 13), (1, 3, 1, 1), (2, 3, 11, 13)]
)
def test_masks(shape):
    mask = normal(*shape, seed=4)
    mask[np.abs(mask) > 1] = -np.inf
    if shape[-1] > 1:
        mask[..., 0] = 0  # no row is masked wholly
    else:
        mask[:] = 0.5
    compare(attention(*operands((2, 3), 11, 13, 8, 8), mask=mask), normal(2, 3, 11, 8, seed=3))


def test_heads_with_what_is_not_finite_are_the_only_ones():
    q, k, v = operands((2, 3), 7, 20, 4, 4)
    q[0, 1, 2], k[1, 2, 3, 1], v[1, 0, 0, 0] = np.nan, np.inf, -np.inf
    seed = normal(2, 3, 7, 4, seed=3)
    seed[0, 2, 5, 3] = np.nan
    found = attention(q, k, v).native(seed)
    expected = attention(q, k, v).run(seed, "portable")
    for a, b in zip(found, expected):
        finite = np.isfinite(b).all(axis=(2, 3))
        np.testing.assert_array_equal(np.isfinite(a).all(axis=(2, 3)), finite)
        np.testing.assert_allclose(a[finite], b[finite], **CLOSE)


def test_a_row_that_is_masked_wholly_is_nan_as_in_the_operators():
    mask = np.zeros((6, 6), np.float32)
    mask[2] = -np.inf
    dq, dk, dv = compare(attention(*operands((1, 2), 6, 6, 4, 4), mask=mask), normal(1, 2, 6, 4, seed=3))
    assert np.isnan(dq[:, :, 2]).all()
    assert np.isfinite(np.delete(dq, 2, axis=2)).all()
    assert np.isnan(dk).all()
    assert np.isnan(dv).all()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 7, 7), (0, 7, 7), (2, 0, 9), (3, 5, 40)])
@pytest.mark.parametrize("layout", ["heads", "rows"])
def test_sizes_that_only_a_run_tells(batch, queries, keys, layout):
    """Also of nothing, around which derivatives write guards for the products of ONNX Runtime."""
    whole = {"q": ["N", 3, "T", 8], "k": ["N", 3, "S", 8], "v": ["N", 3, "S", 4]}
    arrays, seed = operands((batch, 3), queries, keys, 8, 4), normal(batch, 3, queries, 4, seed=3)
    if layout == "rows":
        whole = {name: [dims[i] for i in (0, 2, 1, 3)] for name, dims in whole.items()}
        *arrays, seed = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (*arrays, seed))
    operators = attention(*arrays, layout=layout, symbolic=whole)
    compare(operators, seed)
    assert not {"MatMul", "Softmax", "Where"} & {node.op_type for node in with_kernels(operators.model).graph}


def test_a_guard_that_others_share_does_not_keep_the_scores():
    """T is asked for once, of a matrix of scores, for every product over T."""
    dims = {"q": ["N", 2, "T", 4], "k": ["N", 2, "T", 4], "v": ["N", 2, "T", 4]}
    square = [
        helper.make_node("Transpose", ["q0"], ["qt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["qt", "q0"], ["qq"]),
        helper.make_node("MatMul", ["q0", "qq"], ["q"]),
    ]
    q, k, v = operands((2, 2), 5, 5, 4, 4)
    operators = attention(q, k, v, symbolic={**dims, "q0": dims["q"]}, wrt=("q0", "k", "v"), before=square)
    graph = operators.model.graph
    softmax = next(node for node in graph if node.op_type == "Softmax").outputs[0]
    turned = next(node for node in softmax.consumers() if node.op_type == "Transpose").outputs[0]
    for shape in [node for node in graph if node.op_type == "Shape"]:
        shape.replace_input_with(0, turned)
    graph.sort()
    compare(operators, normal(2, 2, 5, 4, seed=3))
    kinds = [node.op_type for node in with_kernels(operators.model).graph]
    assert "Where" in kinds
    assert "Softmax" not in kinds


def test_scores_that_something_else_reads_stay():
    sizes = ((2, 3), 5, 6, 4, 4)
    q, k, v = operands(*sizes)
    mask = normal(5, 6, seed=4)
    assert attention(q, k, v, mask=mask, wrt=("q", "k", "v", "m")).kernels == []  # the mask's cotangent
    assert attention(q, k, v, wrt=("q", "k")).kernels == []
    shown = attention(q, k, v)
    shown.model.graph.outputs.append(next(n for n in shown.model.graph if n.op_type == "Softmax").outputs[0])
    assert shown.kernels == []


@pytest.mark.parametrize("hidden", [False, True])
def test_a_softmax_beside_attention_stays_operators(hidden):
    """Also where a Where discards a row that has none."""
    q, k, v = operands((2, 3), 9, 6, 4, 5)
    if hidden:
        q[0, 1, 2] = np.inf
    nodes = [helper.make_node("Softmax", ["y"], ["z"], axis=2)]
    arrays = {"m": np.zeros((2, 3, 9, 5), bool), "nothing": np.zeros(1, np.float32)} if hidden else {}
    if hidden:
        arrays["m"][0, 1] = True
        nodes.append(helper.make_node("Where", ["m", "nothing", "z"], ["w"]))
    operators = attention(q, k, v, after=nodes, arrays=arrays)
    found = operators.compare(normal(2, 3, 9, 5, seed=3), BOTH, **CLOSE)
    assert all(np.isfinite(x[1]).all() and x[1].any() for x in found)


def test_operands_that_are_broadcast_or_wide_stay_operators():
    q, k, v = operands((2, 3), 5, 6, 4, 4)
    assert attention(q[:1], k, v).kernels == []
    assert attention(*(x.astype(np.float64) for x in (q, k, v)), scale="").kernels == []


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (2, 9, 24)], ids=str)
def test_the_operator_attention(causal, shape):
    """The operator lowered for its derivative; with a mask, whose rows may hide every key, too."""
    arrays = {name: normal(*shape, seed=i) for i, name in enumerate("qkv")}
    heads = {"q_num_heads": 3, "kv_num_heads": 3} if len(shape) == 3 else {}
    node = helper.make_node("Attention", [*arrays], ["y"], is_causal=causal, **heads)
    compare(Pulled([node], arrays, [*arrays], opset=23), normal(*shape, seed=3))
    masked = helper.make_node("Attention", [*arrays, "m"], ["y"], is_causal=causal, **heads)
    mask = normal(9, 9, seed=4)
    mask[mask > 1], mask[4], mask[0, 0] = -np.inf, -np.inf, 0
    found = compare(Pulled([masked], {**arrays, "m": mask}, [*arrays], opset=23), normal(*shape, seed=3))
    assert all(np.isfinite(x).all() for x in found)
    assert not found[0].reshape(2, -1, 9, 8)[:, :, 4].any() or len(shape) == 3


def discarding(asked="p", zero=0.0):
    """Attention as PyTorch exports it: scaled before, a Cast that changes nothing, NaN discarded."""
    rng = operands((2, 2), 40, 90, 8, 8)
    mask = np.zeros((40, 90), np.float32)
    mask[~np.tri(40, 90, 50, dtype=bool)] = -np.inf
    mask[:3] = -np.inf  # three queries see nothing
    arrays = {**dict(zip("qkv", rng)), "m": mask, "s": np.float32(0.6)}
    nodes = [
        helper.make_node("Constant", [], ["zero"], value_float=zero), helper.make_node("Mul", ["q", "s"], ["qs"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("Mul", ["kt", "s"], ["ks"]), helper.make_node("MatMul", ["qs", "ks"], ["products"]),
        helper.make_node("Add", ["products", "m"], ["masked"]), helper.make_node("Softmax", ["masked"], ["p"], axis=-1),
        helper.make_node("IsNaN", [asked], ["lost"]), helper.make_node("Where", ["lost", "zero", "p"], ["p1"]),
        helper.make_node("Cast", ["p1"], ["p2"], to=1), helper.make_node("MatMul", ["p2", "v"], ["y"]),
    ]  # fmt: skip
    return Pulled(nodes, arrays, ["q", "k", "v"])


def test_probabilities_that_are_no_numbers_are_discarded():
    found = compare(discarding(), normal(2, 2, 40, 8, seed=3))
    assert all(np.isfinite(x).all() for x in found)
    assert not found[0][:, :, :3].any()
    assert found[0][:, :, 3:].all()


def test_what_discards_something_else_keeps_the_scores():
    assert "Attention" not in discarding("masked").kernels
    assert "Attention" not in discarding(zero=0.5).kernels


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("window", [(-200, 0), (-9, 9), (20, 300)], ids=str)
def test_keys_that_a_mask_hides_at_both_ends(window, lowest):
    """Left out where all queries of a band see some key; also where one of them sees none."""
    place = np.subtract.outer(np.arange(90), np.arange(200)) * -1
    mask = np.where((place >= window[0]) & (place <= window[1]), 0, lowest).astype(np.float32)
    mask[70] = lowest if np.isfinite(lowest) else 0
    compare(attention(*operands((1, 2), 90, 200, 16, 8), mask=mask), normal(1, 2, 90, 8, seed=3))
    per_head = np.stack([mask, np.zeros_like(mask)])
    compare(attention(*operands((1, 2), 90, 200, 16, 8), mask=per_head), normal(1, 2, 90, 8, seed=3))
