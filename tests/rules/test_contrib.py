"""The operators of ONNX Runtime: what they are written out as against its kernels, and up the ladder."""

from math import erf

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxgrad import NotDifferentiable, grad
from onnxgrad.check import LOWERING, check, operators
from onnxgrad.lower.contrib import formals
from onnxgrad.testing import Case, node_model, reference
from tests.rules.contrib import MICROSOFT, body, contrib, whole
from tests.rules.dtypes import session
from tests.rules.ladder import ladder

X = (2, 3, 4)
IDS, SEGMENTS, SHOWN = whole(2, 3, high=5, dtype=np.int32), whole(2, 3, high=2, dtype=np.int32), [[1, 1, 0], [1, 1, 1]]
TABLES = [IDS, SEGMENTS, (5, 4), (6, 4), (2, 4), (4,), (4,)]
CONV, KERNEL = (1, 2, 4, 4), (3, 2, 3, 3)


def i32(x) -> np.ndarray:
    return np.asarray(x, np.int32)


def simplified(*inputs, **more) -> Case:
    return contrib("SimplifiedLayerNormalization", list(inputs), domain="", **more)


BLOCKS = [
    contrib("Gelu", [X]),
    contrib("BiasGelu", [X, (4,)]),
    contrib("FastGelu", [X]),
    contrib("FastGelu", [X, (4,)], note="bias"),
    contrib("QuickGelu", [X]),
    contrib("QuickGelu", [X], {"alpha": 1.3}, note="alpha"),
    contrib("QuickGelu", [X], opset=18, note="opset 18"),
    contrib("SkipLayerNormalization", [X, X, (4,)]),
    contrib("SkipLayerNormalization", [X, (3, 4), (4,), (4,), (4,)], {"epsilon": 0.1}, note="one skip for all"),
    contrib("SkipLayerNormalization", [X, (1, 3, 4), (4,), None, (4,)], note="one skip for all, rank 3"),
    contrib("SkipLayerNormalization", [X, X, (4,), (4,)], outputs=4, of=[0, 3], note="sum"),
    contrib("SkipSimplifiedLayerNormalization", [X, X, (4,)]),
    contrib("SkipSimplifiedLayerNormalization", [(6, 4), (6, 4), (4,), (4,)], {"epsilon": 0.1}, note="tokens"),
    simplified(X, (4,)),
    simplified(X, (3, 4), attrs={"axis": 1, "epsilon": 0.1, "stash_type": 1}, note="axis"),
    simplified(X, (4,), outputs=2, note="statistics"),
    contrib("EmbedLayerNormalization", TABLES, outputs=2),
    contrib("EmbedLayerNormalization", [*TABLES, i32(SHOWN)], outputs=3, note="mask"),
    contrib(
        "EmbedLayerNormalization",
        [IDS, None, (5, 4), (6, 4), None, (4,), (4,), i32(SHOWN), SEGMENTS],
        {"epsilon": 0.1},
        outputs=3,
        note="places",
    ),
]
PRODUCTS = [
    contrib("FusedMatMul", [(2, 3), (3, 4)], {"alpha": 0.5}),
    contrib("FusedMatMul", [(3, 2), (4, 3)], {"transA": 1, "transB": 1}, note="both"),
    contrib("TransposeMatMul", [(2, 3, 2), (2, 4, 3)], {"transA": 1, "transB": 1}),
    contrib("FusedMatMul", [(3, 2, 4), (2, 4, 2)], {"transBatchA": 1}, note="batch of A"),
    contrib("FusedMatMul", [(4, 2, 3), (2, 4, 2)], {"transBatchA": 1, "transA": 1}, note="batch of A, transposed"),
    contrib("FusedMatMul", [(2, 2, 3, 2), (4, 2, 2, 2)], {"transBatchB": 1, "transB": 1}, note="batch of B"),
    contrib("FusedMatMul", [(4,), (2, 4)], {"transA": 1, "transB": 1}, note="vector"),
    *[
        contrib("FusedConv", [CONV, KERNEL, (3,)], {"activation": a, **more}, note=a, symbolic={0: (0,)})
        for a, more in (
            ("Relu", {"pads": [1, 0, 1, 0], "strides": [2, 1]}),
            ("Tanh", {"auto_pad": "SAME_UPPER"}),
            ("Sigmoid", {"kernel_shape": [3, 3]}),
            ("HardSwish", {}),
            ("LeakyRelu", {"activation_params": [0.2]}),
            ("Clip", {"activation_params": [-0.5, 0.7]}),
            ("HardSigmoid", {"activation_params": [0.1, 0.4]}),
        )
    ],
    contrib("FusedConv", [CONV, KERNEL, None, (1, 3, 2, 2)], {"activation": "Relu"}, note="sum", symbolic={0: (0,)}),
    *[
        contrib(
            "FusedGemm",
            [(2, 3), (3, 4), (4,)],
            {"activation": a, "alpha": 0.5, "beta": 2.0, **{f"activation_{k}": v for k, v in more.items()}},
            note=a,
        )
        for a, more in (
            ("Relu", {}),
            ("Tanh", {}),
            ("Sigmoid", {}),
            ("Softplus", {}),
            ("Softsign", {}),
            ("LeakyRelu", {"alpha": 0.2}),
            ("Elu", {"alpha": 0.5}),
            ("Selu", {"alpha": 1.5, "gamma": 1.2}),
            ("HardSigmoid", {"alpha": 0.1, "beta": 0.4}),
            ("ScaledTanh", {"alpha": 0.4, "beta": 0.7}),
        )
    ],
    contrib("FusedGemm", [(3, 2), (4, 3)], {"activation": "Tanh", "transA": 1, "transB": 1}, note="transposed"),
]


def few_bits(bits: int, columns: int = 20, size: int = 16, *, zero=None, groups=None, bias=None) -> Case:
    """3 rows of weights in blocks."""
    blocks = -(-columns // size)
    zeros = {None: None, "packed": whole(3, -(-blocks * bits // 8), seed=1), "float": (3, blocks)}[zero]
    operands = [(2, columns), whole(3, blocks, size * bits // 8), (3, blocks), zeros, groups, bias]
    attrs = {"K": columns, "N": 3, "bits": bits, "block_size": size}
    note = f"{bits} bits, zero {zero}" + (", groups" if groups is not None else "")
    while operands[-1] is None:
        operands.pop()
    return contrib("MatMulNBits", operands, attrs, note=note, symbolic={0: (0,)})


BITS = [
    *[few_bits(bits) for bits in (2, 4, 8)],
    *[few_bits(bits, zero="packed", bias=(3,)) for bits in (2, 4, 8)],
    *[few_bits(bits, zero="float") for bits in (2, 4)],
    few_bits(4, groups=i32(np.arange(20)[::-1] // 16)),
]

B, S, T, H = 2, 3, 4, 2
SEQUENCE, WEIGHTS, HEADS = (B, S, 3), [(3, 12), (12,)], {"num_heads": H}
MASK, FILTER = i32([[1, 1, 0], [0, 1, 1]]), {"mask_filter_value": -5.0}
CAUSAL = {**HEADS, "unidirectional": 1}
PAST = (2, B, H, 2, 2)
QUERY, KEY = (B, S, 4), (B, T, 4)
CACHE = (B, H, 2, 2)


def light(note: str, more: dict) -> dict:
    """Second order and symbolic shapes for some: the kernels are compared with symbolic shapes for all."""
    return more if note in ("plain", "causal", "bias", "mask") else {"order": 1, "symbolic": False, **more}


def attention(*rest, attrs=None, note="plain", **more) -> Case:
    return contrib("Attention", [SEQUENCE, *WEIGHTS, *rest], {**HEADS, **(attrs or {})}, note, **light(note, more))


def many_heads(*rest, attrs=None, note="plain", **more) -> Case:
    return contrib("MultiHeadAttention", list(rest), {**HEADS, **(attrs or {})}, note, **light(note, more))


ATTENTION = [
    attention(),
    attention(attrs={"scale": 0.3}, note="scale"),
    attention(attrs=CAUSAL, note="causal"),
    attention(i32([2, 3]), attrs=FILTER, note="ends"),
    attention(i32([2, 3, 1, 0]), attrs=FILTER, note="ends and starts"),
    attention(i32([2, 3, 1, 0, 1, 2, 3, 1]), attrs=FILTER, note="ends and more"),
    attention(MASK, attrs=FILTER, note="mask"),
    attention(MASK, note="mask of -10000"),
    attention(i32([[0, 0, 0], [0, 1, 1]]), attrs=CAUSAL, note="a dead row"),
    attention(whole(B, S, S, high=2, dtype=np.int32), attrs={**FILTER, **CAUSAL}, note="mask by token, causal"),
    attention(None, PAST, outputs=2, note="past"),
    attention(whole(B, 5, high=2, dtype=np.int32), PAST, attrs=CAUSAL, outputs=2, note="past, mask, causal"),
    attention(None, None, (1, H, S, S), note="bias"),
    contrib("Attention", [SEQUENCE, (3, 10), (10,)], {**HEADS, "qkv_hidden_sizes": [4, 4, 2]}, "narrow values"),
    many_heads(QUERY, KEY, (B, T, 6)),
    many_heads(QUERY, KEY, (B, T, 6), (14,), attrs={"scale": 0.4}, note="bias"),
    many_heads(QUERY, KEY, KEY, None, i32([[1, 1, 0, 1], [0, 1, 1, 1]]), attrs=FILTER, note="mask"),
    many_heads(QUERY, KEY, KEY, None, i32([3, 4]), attrs=FILTER, note="ends"),
    many_heads(QUERY, KEY, KEY, None, whole(B, S, T, high=2, dtype=np.int32), attrs=FILTER, note="mask by token"),
    many_heads(QUERY, KEY, KEY, (12,), None, (B, 1, S, T), note="added"),
    many_heads(QUERY, KEY, KEY, attrs=CAUSAL, note="causal, more keys"),
    many_heads(QUERY, (B, H, T, 2), (B, H, T, 2), (12,), note="keys by head"),
    many_heads(QUERY, QUERY, QUERY, (12,), None, None, CACHE, CACHE, attrs=CAUSAL, outputs=3, note="past"),
]

ROTARY, ANGLES = whole(B, S, high=6, dtype=np.int64), [(6, 2), (6, 2)]


def rotary(x, places=ROTARY, attrs=None, note="plain") -> Case:
    return contrib("RotaryEmbedding", [x, places, *ANGLES], attrs or {}, note)


TURNS = [
    rotary((B, S, 8)),
    rotary((B, 2, S, 4), note="by head"),
    rotary((B, S, 8), attrs={"interleaved": 1, "num_heads": 2}, note="interleaved"),
    rotary((B, S, 8), np.array([2]), note="offset"),
    rotary((B, S, 12), attrs={"num_heads": 2, "rotary_embedding_dim": 4}, note="part"),
    rotary(
        (B, 2, S, 6), np.array([1]), {"num_heads": 2, "rotary_embedding_dim": 4, "interleaved": 1}, note="part by head"
    ),
]

SHARED = {"num_heads": 2, "kv_num_heads": 1}
LAST = [i32([2, 2]), i32(3)]
QKV = [(B, S, 16), (B, S, 8), (B, S, 8)]
COSINES = [(8, 4), (8, 4)]


def grouped(*rest, operands=None, attrs=None, note="plain", last=None, past=(None, None), **more) -> Case:
    return contrib(
        "GroupQueryAttention",
        [*(operands or QKV), *past, *(last or LAST), *rest],
        {**SHARED, **(attrs or {})},
        note,
        **light(note, {"outputs": 3, **more}),
    )


#: the kernel wants heads of a multiple of 16 for a rotation
WIDE = {"operands": [(1, S, 32), (1, S, 16), (1, S, 16)], "last": [i32([2]), i32(3)]}
ANGLES_16 = [(8, 8), (8, 8)]
FULL = (1, 1, 4, 16)
GROUPED = [
    grouped(),
    grouped(attrs={"scale": 0.3, "softcap": 1.5}, note="softcap"),
    grouped(attrs={"local_window_size": 2}, note="window"),
    grouped(attrs={"smooth_softmax": 1}, note="smooth"),
    grouped(attrs={"causal": 0}, note="both ways"),
    grouped(operands=[(B, S, 32), None, None], note="packed"),
    grouped(None, None, None, (1, 2, S, S), attrs={"softcap": 2.0}, note="bias"),
    grouped(None, None, None, None, (2,), note="sink"),
    grouped(last=[i32([1, 2]), i32(3)], note="padding"),
    grouped(attrs={"qk_output": 1, "softcap": 2.0}, outputs=4, of=[0, 3], note="scores"),
    grouped(attrs={"qk_output": 2}, outputs=4, of=[0, 3], note="probabilities"),
    grouped(*ANGLES_16, attrs={"do_rotary": 1}, note="rotary", **WIDE),
    grouped(*ANGLES_16, attrs={"do_rotary": 1, "rotary_interleaved": 1}, note="interleaved", **WIDE),
    grouped(*ANGLES_16, np.array([[2, 0, 1]]), attrs={"do_rotary": 1}, note="places", **WIDE),
    grouped(past=((B, 1, 0, 8), (B, 1, 0, 8)), note="an empty past"),
    grouped(past=((B, 1, 4, 8), (B, 1, 4, 8)), note="a buffer"),
    grouped(
        *ANGLES_16,
        operands=[(1, 1, 32), (1, 1, 16), (1, 1, 16)],
        last=[i32([2]), i32(3)],
        past=(FULL, FULL),
        attrs={"do_rotary": 1, "local_window_size": 2},
        note="one token",
    ),
]

CASES = [*BLOCKS, *PRODUCTS, *BITS, *ATTENTION, *TURNS, *GROUPED]
test_rule = ladder("contrib", CASES)


def stock(model: onnx.ModelProto, feeds: dict) -> list[np.ndarray]:
    """The results of ONNX Runtime's kernels."""
    return session(model).run(None, feeds)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES, ids=[c.id for c in CASES])
def test_kernel(case: Case) -> None:
    """A lowering equals the kernel of its operator, to the last digits, with and without known shapes."""
    rng = np.random.default_rng(1)
    feeds = {f"x{i}": _fed(x, rng) for i, x in enumerate(case.inputs) if x is not None}
    wanted = None
    for symbolic in (False, True):
        model = node_model(case, feeds, symbolic=symbolic, dtype=np.float32)
        given = {i.name: feeds[i.name] for i in model.graph.input}
        wanted = wanted or stock(model, given)
        for got, want in zip(stock(body(model), given), wanted):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6)


def _fed(x, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(x).astype(np.float32) if isinstance(x, tuple) else x


# --- what has no kernel for the CPU: by definition ---------------------------------------------------


def run_body(case: Case, *operands: np.ndarray) -> np.ndarray:
    feeds = {f"x{i}": x for i, x in enumerate(operands) if x is not None}
    return reference(body(node_model(case, feeds)), feeds)["y0"]


NO_KERNEL = [
    contrib("BiasSplitGelu", [(2, 3, 4), (4,)], runtime=True),
    contrib("NhwcConv", [(1, 4, 4, 2), (3, 3, 3, 2), (3,)], {"pads": [1, 0, 1, 0]}, symbolic={0: (0,)}),
    contrib("NhwcConv", [(1, 4, 4, 4), (4, 3, 3, 2)], {"group": 2}, "groups", symbolic={0: (0,)}),
    contrib("NhwcFusedConv", [(1, 4, 4, 2), KERNEL, (3,), (1, 2, 2, 3)], {"activation": "Tanh"}, symbolic={0: (0,)}),
    many_heads((B, S, H, 3, 2), note="packed"),
    many_heads(QUERY, (B, T, H, 2, 2), note="packed keys"),
]
test_rule_without_kernel = ladder("contrib_without_kernel", NO_KERNEL)


def test_bias_split_gelu_is_as_defined() -> None:
    x, bias = np.random.default_rng(0).standard_normal((2, 2, 6)), np.arange(6.0) / 6
    u, v = np.split(x + bias, 2, axis=-1)
    want = u * v * (1 + np.vectorize(erf)(v / np.sqrt(2))) / 2
    np.testing.assert_allclose(_of("BiasSplitGelu", x, bias), want, atol=1e-6)


def _of(op: str, *operands: np.ndarray, **attrs) -> np.ndarray:
    return run_body(contrib(op, list(operands), attrs), *operands)


def _convolved(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x[N, H, W, C] ⋆ w[M, kH, kW, C], by its definition."""
    n, h, k, _ = x.shape
    m, p, q, _ = w.shape
    y = np.zeros((n, h - p + 1, k - q + 1, m))
    for i, j in np.ndindex(y.shape[1:3]):
        y[:, i, j] = np.einsum("npqc,mpqc->nm", x[:, i : i + p, j : j + q], w)
    return y


@pytest.mark.parametrize("documented", [False, True])
def test_nhwc_conv_takes_weights_in_both_layouts(documented: bool) -> None:
    """Weights in the layout of the tools, and in that of the documentation, if sizes tell them apart."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 5, 6, 2)), rng.standard_normal((3, 3, 3, 2))
    given = w.transpose(0, 3, 1, 2) if documented else w
    np.testing.assert_allclose(_of("NhwcConv", x, given), _convolved(x, w), atol=1e-12)
    if documented:
        z = rng.standard_normal((2, 3, 4, 3))
        got = _of("NhwcFusedConv", x, given, np.zeros(3), z, activation="Relu")
        np.testing.assert_allclose(got, np.maximum(_convolved(x, w) + z, 0), atol=1e-12)


def test_packed_operands_are_the_same_side_by_side() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, B, S, H, 2))
    flat = [x.reshape(B, S, 4) for x in (q, k, v)]
    want = _of("MultiHeadAttention", *flat, **HEADS)
    np.testing.assert_allclose(_of("MultiHeadAttention", np.stack([q, k, v], 3), **HEADS), want, atol=1e-12)
    np.testing.assert_allclose(_of("MultiHeadAttention", flat[0], np.stack([k, v], 3), **HEADS), want, atol=1e-12)


# --- refusals --------------------------------------------------------------------------------------

REFUSED = [
    (attention(attrs={"do_rotary": 1}), "do_rotary"),
    (attention(None, None, None, i32(1)), "past_sequence_length"),
    (attention(i32([1, 2, 3])), "3 elements for a batch of 2"),
    (attention(np.ones((B, 1, S, S), np.int32)), "4 axes"),
    (rotary((B, S, 8), attrs={"scale": 2.0}), "scale is 2.0"),
    (grouped(attrs={"sliding_window_cache": 1}), "sliding_window_cache"),
    (grouped(*[None] * 7, (8,), (8,)), "q_norm_weight"),
    (
        contrib("MatMulNBits", [(2, 16), whole(3, 1, 6), (3, 1)], {"K": 16, "N": 3, "bits": 3, "block_size": 16}),
        "3 bits",
    ),
    (contrib("FusedConv", [CONV, KERNEL], {"activation": "Cube"}), "Cube"),
]


@pytest.mark.parametrize(("case", "says"), REFUSED, ids=[f"{c.op}: {s}" for c, s in REFUSED])
def test_what_a_node_may_not_ask_for(case: Case, says: str) -> None:
    rng = np.random.default_rng(1)
    feeds = {f"x{i}": _fed(x, rng) for i, x in enumerate(case.inputs) if x is not None}
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(case.inputs)]
    node = helper.make_node(case.op, names, ["y0"], "this_one", domain=MICROSOFT, **case.attrs)
    kinds = {n: helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in feeds.items()}
    infos = [helper.make_tensor_value_info(n, kinds[n], x.shape) for n, x in feeds.items()]
    graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name="y0")])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with pytest.raises(NotDifferentiable, match=says) as raised:
        grad(model, wrt="x0", of="y0")
    assert "this_one" in str(raised.value)
    assert "hint: " in str(raised.value)


# --- what is said of them --------------------------------------------------------------------------


def test_they_are_listed() -> None:
    listed = {(o.domain, o.op_type): o for o in operators() if o.status == LOWERING}
    assert set(formals) <= set(listed)
    assert listed[MICROSOFT, "FastGelu"].inputs == ["X", "bias"]
    assert "B" not in listed[MICROSOFT, "MatMulNBits"].inputs
    assert all(listed[key].formula for key in formals)


def test_check_says_how() -> None:
    info = helper.make_tensor_value_info("x", 1, ["n", 4])
    nodes = [helper.make_node("Gelu", ["x"], ["h"], domain=MICROSOFT), helper.make_node("Relu", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info], [helper.make_tensor_value_info("y", 1, None)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    report = check(helper.make_model(graph, opset_imports=opsets, ir_version=9))
    assert report.differentiable
    row = next(r for r in report.rows if r.op_type == "Gelu")
    assert (row.domain, row.status) == (MICROSOFT, LOWERING)
    assert "Erf" in row.detail


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_simplified_layer_norm_at_every_opset(opset: int) -> None:
    """It stands in the standard domain, of which no version specifies it."""
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", ["x", "s"], ["h"]),
        helper.make_node("ReduceSum", ["h", "axes"], ["y"], keepdims=0),
    ]
    infos = [helper.make_tensor_value_info("x", 1, ["n", 4]), helper.make_tensor_value_info("s", 1, [4])]
    axes = onnx.numpy_helper.from_array(np.array([0, 1]), "axes")
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", 1, [])], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    (gradient,) = session(grad(model, wrt="s")).run(None, {"x": x, "s": np.ones(4, np.float32)})
    np.testing.assert_allclose(gradient, (x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)).sum(0), rtol=1e-5)


def test_an_operand_that_must_be_there() -> None:
    info, out = (helper.make_tensor_value_info(n, 1, ["n", 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("BiasGelu", ["x"], ["y"], domain=MICROSOFT)], "g", [info], [out])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
    with pytest.raises(NotDifferentiable, match="its input B is left out"):
        grad(helper.make_model(graph, opset_imports=opsets, ir_version=9), wrt="x")
