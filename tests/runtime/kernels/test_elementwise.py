"""Groups of elementwise operators as one kernel: the same bits as the operators, where these round once."""

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels.elementwise_programs import KERNELS
from onnxgrad.runtime.kernels.libraries import SOURCES
from onnxgrad.runtime.kernels.programs import CODES, KINDS
from onnxgrad.runtime.kernels.substitute import DOMAIN
from onnxgrad.training import attach, compile_step
from tests.runtime.kernels.twins import needs_kernels
from tests.runtime.passes import fused

pytestmark = needs_kernels

OPERATORS = Options(threads=1, target="portable")
#: Zeros, denormals, the ends of the range, halves, where exp overflows and underflows, infinities, NaN.
SPECIAL = np.float32(
    [0, -0.0, 1e-45, -1e-45, 1e-39, 1.1754944e-38, -1.1754944e-38, 1e-30, -1e-9, 1e-4, -0.25, 0.5, -0.5, 0.62, 0.63,
     0.91, 0.93, -0.92, 1, -1, 1.5, 2.5, -2.5, 3, -3.9, 4.1, 9, -9.1, 17.5, -18.5, 80, 87.5, -87.3, 88.8, -88.8, -95,
     -103.5, -120, 1e3, 8388609, -8388607, 1e10, -1e30, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan]
)  # fmt: skip


def model_of(text, ends, opset=21):
    """`text` between the inputs and outputs that `ends` declares."""
    head = f'<ir_version: 10, opset_import: ["": {opset}]> g '
    return ir.from_proto(onnx.parser.parse_model(head + ends + "{" + text + "}"))


def groups(model):
    return [n for g in fused(model).graphs() for n in g if n.domain == DOMAIN and n.op_type.startswith("Elementwise")]


def same(model, feeds, rtol=0.0, atol=0.0, threads=(1, 2), count=None):
    """The same numbers with and without groups, of which there are `count` (or some)."""
    found = len(groups(model))
    assert found == count if count is not None else found
    expected = Session(model, OPERATORS).run(feeds)
    for number in threads:
        results = Session(model, Options(threads=number, target="native")).run(feeds)
        for name, array in results.items():
            assert array.dtype == expected[name].dtype, name
            assert array.shape == expected[name].shape, name
            np.testing.assert_allclose(array, expected[name], rtol=rtol, atol=atol, err_msg=name)
            if not rtol and array.dtype.kind == "f":
                there = ~np.isnan(array)
                np.testing.assert_array_equal(np.signbit(array[there]), np.signbit(expected[name][there]), err_msg=name)


def test_codes_are_those_of_the_kernel():
    header = (SOURCES / "elementwise.h").read_text()
    source = (SOURCES / "elementwise.c").read_text()
    operations = re.findall(r"X(?:\(|, )([A-Z_\d]+),", header.split("#define OPERATIONS(X)")[1])
    assert (*operations, "COPY", "SUM", "MEAN", "PRODUCT") == CODES
    kinds = re.search(r"enum \{ (REGISTER.*), KINDS", (SOURCES / "program.h").read_text())
    assert kinds is not None
    assert kinds[1].split(", ") == list(KINDS)
    for kernel, operands, results in KERNELS.values():
        assert f'.name = "{kernel}", .inputs = "{operands}", .outputs = "{results}"' in source


#: Operators that round once, or copy bits.
_ALONE = "Neg Abs Sqrt Relu Sign Floor Ceil Round Reciprocal Identity".split()  # noqa: SIM905
EXACT = [
    *(f"{name}(x)" for name in _ALONE),
    *(f"{name}(x, y)" for name in ["Add", "Sub", "Mul", "Div", "Sum"]), "Sum(x, y, x)",
    "Pow(x, two)", "Pow(x, three)", "Clip(x, low, high)", 'Clip(x, "", high)', "Clip(x, low)",
    "LeakyRelu<alpha=0.1>(x)", "HardSigmoid(x)", "HardSigmoid<alpha=3e38, beta=0.0>(x)", "Softsign(x)",
    *(f"Cast<to=1>({name}(x, y))" for name in ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"]),
    "Cast<to=1>(IsNaN(x))", "Cast<to=1>(Cast<to=9>(x))", "Where(Less(x, y), x, y)", "Where(Not(Less(x, one)), y, one)",
    "Cast<to=1>(And(Less(x, one), Or(Less(y, one), Xor(Less(x, y), IsNaN(y)))))", "Cast<to=1>(Cast<to=6>(Less(x, y)))",
]  # fmt: skip
#: Others: relative and absolute tolerance, which is how far those of ONNX Runtime are from the numbers.
ROUNDED = {
    "Exp(x)": (2e-6, 1e-37), "Log(x)": (3e-7, 1e-7), "Erf(x)": (1e-6, 1e-7), "Tanh(x)": (1e-6, 3e-7),
    "Sigmoid(x)": (1e-6, 1e-7), "Softplus(x)": (1e-6, 1e-6), "Gelu(x)": (1e-5, 1e-6), "Mish(x)": (1e-5, 1e-6),
    "Elu(x)": (1e-6, 3e-7), "Elu<alpha=0.3>(x)": (1e-6, 1e-7), "Selu(x)": (1e-6, 1e-6),
    "Selu<alpha=0.5, gamma=2.0>(x)": (1e-6, 1e-6),
    'Gelu<approximate="tanh">(x)': (1e-5, 1e-6), "PRelu(x, y)": (1e-12, 0),  # but for signs of zeros
}  # fmt: skip
_CONSTANTS = "<float one = {1}, float[1] two = {2.0}, float three = {3.0}, float low = {-1.5}, float high = {2.25}>"


def nested(text):
    """Nodes for a nested expression, whose last result is `z`."""
    nodes = []

    def emit(expression):
        match = re.fullmatch(r"\s*(\w+)(<.*?>)?\((.*)\)\s*", expression)
        if not match:
            return expression.strip()
        depth, parts = 0, [""]
        for c in match[3]:
            depth += (c == "(") - (c == ")")
            if c == "," and not depth:
                parts.append("")
            else:
                parts[-1] += c
        operands = ", ".join([emit(p) for p in parts])
        nodes.append(f"t{len(nodes)} = {match[1]}{match[2] or ''}({operands})")
        return f"t{len(nodes) - 1}"

    last = emit(text)
    return f"{' '.join(nodes)} z = Mul({last}, w)"


def pairs(repeat):
    x, y = (a.reshape(-1) for a in np.meshgrid(SPECIAL, SPECIAL))
    rng = np.random.default_rng(0)
    x, y = (np.concatenate([a, rng.standard_normal(repeat).astype(np.float32) * 3]) for a in (x, y))
    return {"x": x, "y": y, "w": np.ones_like(x)}


@pytest.mark.parametrize("text", [*EXACT, *ROUNDED])
def test_every_operation(text):
    feeds = pairs(1000)
    if "Where" in text:  # ONNX Runtime makes a zero that it picks a positive one
        feeds = {name: array + 0.0 for name, array in feeds.items()}
    ends = "(float[N] x, float[N] y, float[N] w) => (float[N] z) " + _CONSTANTS
    rtol, atol = ROUNDED.get(text, (0.0, 0.0))
    same(model_of(nested(text), ends), feeds, rtol, atol, threads=(2,), count=1)


@pytest.mark.parametrize("name", ["Min", "Max"])
def test_smaller_and_larger(name):
    """NaN wherever there is one; of zeros of both signs, ONNX Runtime gives sometimes the one, sometimes the other."""
    ends = "(float[N] x, float[N] y, float[N] w) => (float[N] z) " + _CONSTANTS
    feeds = {k: a + 0.0 for k, a in pairs(1000).items()}
    same(model_of(nested(f"{name}(x, y, one)"), ends), feeds, count=1)


INTEGERS = [
    "Add(x, y)", "Sub(x, y)", "Mul(x, y)", "BitwiseAnd(x, y)", "BitwiseOr(x, y)", "BitwiseXor(x, y)", "BitwiseNot(x)",
    *(f"Cast<to=6>({name}(x, y))" for name in ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"]),
    "Cast<to=6>(Cast<to=12>(x))", "Cast<to=6>(Cast<to=9>(x))", "Where(Less(x, y), x, y)",
    'Cast<to=6>(BitShift<direction="RIGHT">(Cast<to=12>(x), five))',
    'Cast<to=6>(BitShift<direction="LEFT">(Cast<to=12>(x), five))',
    "Cast<to=6>(BitwiseXor(Cast<to=12>(x), Cast<to=12>(y)))", "Cast<to=6>(Less(Cast<to=12>(x), Cast<to=12>(y)))",
]  # fmt: skip


@pytest.mark.parametrize("text", INTEGERS)
def test_integers(text):
    """The hash of Dropout, with its overflows."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-(1 << 31), 1 << 31, (2, 3000)).astype(np.int32)
    x[:500] = y[:500]
    x[500:600] = 0
    ends = "(int32[N] x, int32[N] y, int32[N] w) => (int32[N] z) <uint32 five = {5}>"
    same(model_of(nested(text), ends), {"x": x, "y": y, "w": np.ones_like(x)}, count=1)
    ends = "(int32[N] x, float[N] w) => (float[N] z)"
    same(model_of(nested("Cast<to=1>(x)"), ends), {"x": x, "w": np.ones(3000, np.float32)}, count=1)


def test_results_and_operands_of_all_types():
    text = """c = Less(x, y) d = Or(c, b) i = Cast<to=6>(d) j = Add(i, n) u = Cast<to=12>(j)
        f = Cast<to=1>(j) e = Where(d, f, x)"""
    ends = """(float[A, B] x, float[B] y, bool[A, B] b, int32[A, B] n)
        => (bool[A, B] d, int32[A, B] j, uint32[A, B] u, float[A, B] e)"""
    rng = np.random.default_rng(0)
    for shape in ((0, 3), (1, 1), (7, 33), (300, 100)):
        x = rng.standard_normal(shape).astype(np.float32)
        feeds = {"x": x, "y": x.sum(0), "b": x > 1, "n": rng.integers(-9, 9, shape).astype(np.int32)}
        same(model_of(text, ends), feeds, count=1)


# --- random graphs ---------------------------------------------------------------------------------------------------

_SIZES = (1, 2, 3, 5, 8, 16, 17, 31, 64, 100)


def random_graph(seed, real="float"):
    """Operators that are exact, over operands of a type that broadcast in every way; (model, feeds).

    Of odd seeds, operands and results are those of other operators, so results may take the memory of operands.
    """
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 5))
    shape = [int(d) for d in rng.choice(_SIZES, rank)]
    if rng.random() < 0.1:
        shape[int(rng.integers(rank))] = 0
    while np.prod(shape) > 200_000:
        shape[int(np.argmax(shape))] //= 2
    if rng.random() < 0.15:
        shape = [int(rng.integers(20_000, 100_000))]
    named = bool(rng.random() < 0.5)
    dims = [f"D{k}" if named else str(d) for k, d in enumerate(shape)]
    feeds, declared = {}, []
    for k in range(int(rng.integers(2, 7))):
        skip = 0 if k == 0 or rng.random() < 0.6 else int(rng.integers(0, len(shape) + 1))
        ones = [k > 0 and rng.random() < 0.3 for _ in shape[skip:]]
        own = [1 if one else d for one, d in zip(ones, shape[skip:])]
        array = rng.standard_normal(own).astype(np.float32 if real == "float" else np.float64)
        array.reshape(-1)[: min(array.size, 48)] = SPECIAL[: array.size]
        feeds[f"x{k}"] = array.T if seed % 2 else array
        own = ["1" if one else d for one, d in zip(ones, dims[skip:])]
        declared.append(f"{real}[{','.join(own[::-1])}] t{k}" if seed % 2 else f"{real}[{','.join(own)}] x{k}")
    values, nodes, ends = ["x0", *feeds], [], []
    if seed % 2:
        nodes += [f"{x} = Transpose(t{x[1:]})" for x in feeds]
        feeds = {f"t{x[1:]}": array for x, array in feeds.items()}
    for k in range(int(rng.integers(3, 30))):
        a, b, c = (values[-1 - min(int(rng.exponential(4)), len(values) - 1)] for _ in range(3))
        kind = rng.choice(["two", "one", "where", "number"], p=[0.6, 0.2, 0.1, 0.1])
        if kind == "two":
            op = rng.choice(["Add", "Sub", "Mul", "Div"])
            nodes.append(f"v{k} = {op}({a}, {b})")
        elif kind == "one":
            op = rng.choice(["Neg", "Abs", "Relu", "Sqrt", "Floor", "Sign", "Reciprocal", "Identity"])
            nodes.append(f"v{k} = {op}({a})")
        elif kind == "where":
            nodes.append(f"m{k} = Less({a}, {b}) w{k} = Where(m{k}, {c}, {a}) v{k} = Abs(w{k})")
        else:
            nodes.append(f"v{k} = Mul({a}, half)")
        values.append(f"v{k}")
        if rng.random() < 0.15:
            ends.append(f"v{k}")
    ends = [*dict.fromkeys([*ends[:6], values[-1]])]
    if seed % 2:
        nodes += [f"z{e} = Transpose({e})" for e in ends]
        ends = [f"z{e}" for e in ends]
    text = f"({', '.join(declared)}) => ({', '.join(f'{real}[] {e}' for e in ends)}) <{real} half = {{0.5}}>"
    model = model_of(" ".join(nodes), text)
    for value in model.graph.outputs:
        value.shape = None
    return model, feeds


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("start", "kind"), [(0, "float"), (50, "double"), (100, "float"), (150, "float")])
def test_random_graphs(start, kind):
    """Bit for bit, on one and two threads."""
    with_groups = 0
    for seed in range(start, start + 50):
        model, feeds = random_graph(seed, kind)
        with_groups += bool(groups(model))
        with np.errstate(all="ignore"):
            expected = Session(model, OPERATORS).run(feeds)
            for threads in (1, 2):
                found = Session(model, Options(threads=threads, target="native")).run(feeds)
                for name, array in expected.items():
                    np.testing.assert_array_equal(found[name], array, err_msg=f"{seed} {name}")
                    there = ~np.isnan(array)
                    signs = np.signbit(found[name][there]), np.signbit(array[there])
                    np.testing.assert_array_equal(*signs, err_msg=f"{seed} {name}")
    assert with_groups > 37


def test_shapes_of_the_run():
    """One session, any sizes: 0, 1, odd, larger than a tile and than a part of a thread."""
    text = "s = Mul(x, c) t = Add(s, r) u = Mul(t, t) v = Sub(u, k) z = Relu(v)"
    ends = "(float[A,B,C] x, float[B,1] c, float[C] r, float[A,1,1] k) => (float[A,B,C] z, float[A,B,C] u)"
    model = model_of(text, ends)
    assert len(groups(model)) == 1
    plain, native = Session(model, OPERATORS), Session(model, Options(threads=2, target="native"))
    rng = np.random.default_rng(0)
    sizes = [(0, 2, 3), (2, 0, 3), (1, 1, 1), (1, 7, 1), (3, 1, 50), (2, 3, 1), (4, 5, 49), (3, 700, 3), (2, 3, 5000)]
    for a, b, c in [*sizes, (1, 1, 30001), (999, 8, 1), (64, 64, 64)]:
        shapes = {"x": (a, b, c), "c": (b, 1), "r": (c,), "k": (a, 1, 1)}
        feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        expected, found = plain.run(feeds), native.run(feeds)
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=str((a, b, c)))


@pytest.mark.parametrize("width", [2, 3, 8, 13, 63])
def test_short_rows(width):
    """Operands that are spread: the same row, one number for each row, and rows that lie elsewhere."""
    model = model_of(
        "p = Mul(x, a) q = Add(p, b) r = Sub(q, c) s = Mul(r, d) y = Where(e, s, x)",
        "(float[N,T,M,W] x, float[W] a, float[M,1] b, float[N,1,M,W] c, float[N,T,1,W] d, bool[T,1,W] e)"
        " => (float[N,T,M,W] y)",
    )
    n, t, m = 3, 5, 90
    rng = np.random.default_rng(width)
    shapes = {"x": (n, t, m, width), "a": (width,), "b": (m, 1), "c": (n, 1, m, width), "d": (n, t, 1, width)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    same(model, {**feeds, "e": rng.random((t, 1, width)) < 0.5}, count=1)


def test_groups_too_wide_for_a_program_are_cut():
    """A recurrence that is written out: each step reads two operands, and gives a state and a sum."""
    steps = range(24)
    text = " ".join(
        f"k{i} = Mul(h{i}, a{i}) h{i + 1} = Add(k{i}, b{i}) o{i} = Mul(h{i + 1}, c{i}) s{i} = ReduceSum(o{i}, axes)"
        for i in steps
    )
    operands = [f"float[N,4,8] {name}{i}" for i in steps for name in "ab"] + [f"float[N,1,8] c{i}" for i in steps]
    results = [f"float[N,4,8] h{i + 1}" for i in steps] + [f"float[N,4,1] s{i}" for i in steps]
    ends = f"(float[N,4,8] h0, {', '.join(operands)}) => ({', '.join(results)}) <int64[1] axes={{-1}}>"
    model = model_of(text, ends)
    left = [n for n in fused(model.clone()).graph if n.op_type in ("Mul", "Add", "ReduceSum")]
    assert not left
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal([7, *v.shape[1:]]).astype(np.float32) for v in model.graph.inputs}
    same(model, feeds, rtol=1e-5, atol=1e-5)


def test_an_expand_is_read_through_only_where_others_have_its_shape():
    """Sizes of different names may be 1, and axes may come from the Expand alone."""
    model = model_of(
        "w = Expand(x, shape) p = Mul(w, y) q = Add(p, p) v = Expand(z, shape) r = Mul(v, one) s = Neg(r)",
        "(float[A,1] x, float[A,M] y, float[K] z, int64[2] shape) => (float[A,K] q, float[A,K] s) <float[1,1] one={2}>",
    )
    x, z = np.float32([[2], [3]]), np.arange(4, dtype=np.float32)
    feeds = {"x": x, "z": z, "shape": np.array([2, 4])}
    for y in (np.ones((2, 1), np.float32), np.ones((2, 4), np.float32)):
        found = Session(model, Options(threads=1, target="native")).run(feeds | {"y": y})
        np.testing.assert_array_equal(found["q"], np.broadcast_to(2 * x, (2, 4)))
        np.testing.assert_array_equal(found["s"], np.broadcast_to(-2 * z, (2, 4)))


def test_sizes_that_a_name_promises_and_a_run_breaks():
    """Two dimensions of one name may differ, if they broadcast: results have the shapes of the operators then."""
    text = "s = Mul(x, x) t = Add(s, y) u = Neg(y) v = Mul(u, u) z = Add(t, v)"
    model = model_of(text, "(float[N] x, float[N] y) => (float[N] z, float[N] s, float[N] v)")
    assert len(groups(model)) == 1
    for n, m in ((1, 4000), (4000, 1), (7, 1)):
        feeds = {"x": np.arange(n, dtype=np.float32), "y": np.linspace(-1, 1, m).astype(np.float32)}
        same(model, feeds)
    with pytest.raises(Exception, match="broadcast"):
        Session(model, Options(target="native")).run({"x": np.ones(3, np.float32), "y": np.ones(2, np.float32)})


# --- what is grouped -------------------------------------------------------------------------------------------------


def test_other_operators_between():
    """A path through a product and back is not in one group; a shortcut around it is."""
    text = "a = Mul(x, x) b = Add(a, y) p = MatMul(b, w) c = Sub(p, b) d = Mul(c, y) z = Relu(d)"
    ends = "(float[64,64] x, float[64,64] y, float[64,64] w) => (float[64,64] z)"
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in "xyw"}
    same(model_of(text, ends), feeds, count=2)


def test_equal_steps_are_one():
    """A GELU and its derivative need one erf, where two operators say so, also where the GELU is written out."""
    for gelu in ("y = Gelu(h)", "q = Div(h, two) r = Erf(q) s = Add(one, r) t = Mul(h, s) y = Mul(t, half)"):
        model = model_of(
            f"h = Neg(x) {gelu} u = Mul(h, root) e = Erf(u) f = Add(e, one) g = Mul(half, f) v = Mul(h, root) "
            "w = Mul(v, v) b = Sub(peak, w) c = Exp(b) d = Mul(h, c) z = Add(g, d)",
            "(float[N,C] x) => (float[N,C] y, float[N,C] z) <float root={0.70710678}, float one={1}, float half={0.5}, "
            "float two={1.4142135}, float peak={-0.9189385}>",
        )
        (call,) = groups(model)
        codes = [CODES[k] for k in call.attributes["steps"].as_ints()[::10]]
        values = [KINDS[k] for k in call.attributes["values"].as_ints()[::4]]
        assert sorted(codes) == ["ADD", "BELL", "MUL", "MUL", "NEG", "NORMAL"]
        assert values.count("FIXED") == 1
        same(model, {"x": np.linspace(-6, 6, 3000, dtype=np.float32).reshape(3, -1)}, rtol=2e-6, atol=1e-6)
        special = Session(model, Options(threads=1, target="native")).run({"x": SPECIAL[None]})
        expected = Session(model, OPERATORS).run({"x": SPECIAL[None]})
        np.testing.assert_allclose(special["z"], expected["z"], rtol=2e-6, atol=1e-6)


def test_signs_and_ones_need_no_steps():
    """A negative product is a product with the negative number, and what is multiplied by 1 stays."""
    text = (
        "a = Mul(x, x) b = Mul(a, half) c = Neg(b) d = Mul(half, x) e = Neg(d) f = Mul(one, e) g = Div(f, one) "
        "y = Add(c, g)"
    )
    ends = "(float[N] x) => (float[N] y) <float half={0.3}, float one={1}>"
    (call,) = groups(model_of(text, ends))
    assert [CODES[k] for k in call.attributes["steps"].as_ints()[::10]] == ["MUL", "MUL", "MUL", "ADD"]
    same(model_of(text, ends), {"x": np.resize(SPECIAL, 2000)})


@pytest.mark.parametrize(("size", "count"), [(8, 3), (4096, 20)])
def test_small_groups_that_are_not_connected_are_one(size, count):
    """As many as a program has results, in fewer calls than groups; large ones stay alone."""
    names = range(20)
    text = " ".join(f"a{k} = Mul(x{k}, y{k}) b{k} = Sub(a{k}, x{k}) z{k} = Abs(b{k})" for k in names)
    operands = ", ".join(f"float[N,{size}] x{k}, float[N,{size}] y{k}" for k in names)
    results = ", ".join(f"float[N,{size}] z{k}" for k in names)
    rng = np.random.default_rng(0)
    feeds = {f"{name}{k}": rng.standard_normal((5, size), np.float32) for k in names for name in "xy"}
    same(model_of(text, f"({operands}) => ({results})"), feeds, count=count)


def test_long_chains_are_cut():
    text = " ".join(f"v{k + 1} = Mul(v{k}, c)" for k in range(500))
    model = model_of(text, "(float[4096] v0, float[1] c) => (float[4096] v500)")
    feeds = {"v0": np.linspace(-2, 2, 4096).astype(np.float32), "c": np.float32([0.999])}
    same(model, feeds, count=13)


def test_little_is_left_alone():
    """One operator gains nothing, nor do two on a few numbers."""
    for text, size in (("z = Mul(x, y)", 5000), ("a = Mul(x, y) z = Add(a, y)", 100)):
        assert not groups(model_of(text, f"(float[{size}] x, float[{size}] y) => (float[{size}] z)"))
    text = "a = Mul(x, y) b = Mul(a, y) z = Add(b, y)"
    assert len(groups(model_of(text, "(float[100] x, float[100] y) => (float[100] z)"))) == 1


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        (((900, 4, 16), (900, 4, 1)), 1),
        (((8, 64, 5, 1), (8, 1, 1, 7)), 1),
        (((64, 3, 31), (31,)), 1),
        (((64, 99), (64, 1)), 0),
        (((9, 1, 8, 32), (9, 1, 1, 1)), 0),
        (((64, 99), (64, 99)), 0),
        (((4096, 7), (1,)), 0),
    ],
)
def test_one_operator_with_operands_in_short_runs(shapes, count):
    """Alone, it is left to the runtime where it has long rows."""
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in zip("xy", shapes)}
    ends = ", ".join(f"float[{','.join(map(str, a.shape))}] {name}" for name, a in feeds.items())
    of_result = ",".join(map(str, np.broadcast_shapes(*shapes)))
    same(model_of("z = Mul(x, y)", f"({ends}) => (float[{of_result}] z)"), feeds, count=count)


@pytest.mark.parametrize("text", ["Sqrt(x)", "Log(x)", "Elu(x)", "Softplus(x)", "Sigmoid(x)", "Sign(x)", "PRelu(x, s)"])
def test_one_operator_that_is_quicker(text):
    feeds = {"x": pairs(1000)["x"]}
    ends = "(float[N] x) => (float[N] z) <float[1] s = {-0.75}>"
    same(model_of(f"z = {text}", ends), feeds, *ROUNDED.get(text, (0, 0)), count=1)


def test_what_the_runtime_does_better():
    """Activations of a product, its scale and its bias."""
    ends = "(float[64,64] x, float[64,64] w, float[64] b) => (float[64,64] z) <float half = {0.5}>"
    assert not groups(model_of("p = Gemm(x, w, b) q = Relu(p) z = Neg(q)", ends))
    assert not groups(model_of("p = MatMul(x, w) q = Mul(p, half) z = Neg(q)", ends))
    assert not groups(model_of("p = MatMul(x, w) q = Add(p, b) z = Neg(q)", ends))


@pytest.mark.parametrize("weights", ["constant", "given"])
def test_sums_in_the_layout_of_convolutions(weights):
    """ONNX Runtime keeps what follows a convolution with constant weights in a layout of its own."""
    given = ", float[8, 8, 1, 1] w" if weights == "given" else ""
    held = "" if given else f", float[8, 8, 1, 1] w = {{{', '.join(map(str, np.linspace(-1, 1, 64)))}}}"
    rows = f"float[8] one = {{{', '.join('1' * 8)}}}, float[8] zero = {{{', '.join('0' * 8)}}}"
    ends = f"(float[2, 8, 32, 32] x, float[2, 8, 32, 32] z{given}) => (float[2, 8, 32, 32] y) <{rows}{held}>"
    text = "c = Conv (x, w) n = BatchNormalization (c, one, zero, zero, one) s = Add (n, z) y = Relu (s)"
    assert len(groups(model_of(text, ends))) == (weights == "given")


def test_the_switch():
    model = model_of("a = Mul(x, y) b = Mul(a, y) z = Add(b, y)", "(float[N] x, float[N] y) => (float[N] z)")
    feeds = {name: np.ones(3, np.float32) for name in "xy"}
    before = ir.to_proto(model).SerializeToString()
    for without in ((), ("elementwise",)):
        Session(model, Options(target="native", without=without)).run(feeds)
    assert ir.to_proto(model).SerializeToString() == before


def test_bodies():
    """Inside a Scan, with a value of the outer graph."""
    body = """body = g (float[H] s, float[H] x) => (float[H] t, float[H] o) {
        a = Mul(s, x) b = Add(a, k) t = Tanh(b) c = Sub(t, x) o = Mul(c, k) }"""
    text = f"k = Neg(q) t, o = Scan <num_scan_inputs = 1, {body}> (s, x)"
    model = model_of(text, "(float[40] s, float[9, 40] x, float[40] q) => (float[40] t, float[9, 40] o)")
    rng = np.random.default_rng(0)
    feeds = {"s": rng.standard_normal(40), "x": rng.standard_normal((9, 40)), "q": rng.standard_normal(40)}
    same(model, {k: v.astype(np.float32) for k, v in feeds.items()}, rtol=1e-5, atol=1e-6, count=1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_of_a_model(optimizer):
    """The sigmoid of a SiLU is computed again in the way back, not kept; losses and weights are as without groups."""
    from onnxgrad.runtime import StepRunner

    rng = np.random.default_rng(0)
    text = """h = Gemm(x, w1, b1) s = Sigmoid(h) a = Mul(h, s) m = MatMul(a, w2) r = Div(m, root) e = Erf(r)
        f = Add(e, one) i = Mul(m, f) j = Mul(i, half) y = MatMul(j, w3)"""
    model = model_of(
        text, "(float[N, 8] x) => (float[N, 3] y) <float one = {1}, float half = {0.5}, float root = {1.4142}>"
    )
    for name, shape in {"w1": (8, 40), "b1": (40,), "w2": (40, 64), "w3": (64, 3)}.items():
        tensor = ir.tensor(rng.standard_normal(shape).astype(np.float32) / 4, name=name)
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape))
        for node in model.graph:
            for i, v in enumerate(node.inputs):
                if v is not None and v.name == name:
                    node.replace_input_with(i, value)
        model.graph.register_initializer(value)
    step = compile_step(attach(ir.to_proto(model), loss="cross_entropy", optimizer=optimizer, learning_rate=0.01))
    calls = groups(step.model)
    assert len(calls) >= 3
    kept = [v for node in calls for v in node.outputs if v.name and v.name == "s"]
    assert not kept
    label = next(name for name in step.batch if name != "x")
    states, losses = [], []
    for options in (OPERATORS, Options(threads=2, target="native")):
        machine = StepRunner(step, options=options)
        data = np.random.default_rng(1)
        for _ in range(5):
            batch = {"x": data.standard_normal((96, 8)).astype(np.float32), label: data.integers(0, 3, 96)}
            loss = machine.step(batch)[step.loss]
        losses.append(float(loss))
        states.append(machine.state())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("maker", ["h = Erf (x)", "s = Sigmoid (x)  h = Mul (x, s)"])
@pytest.mark.parametrize("size", [64, 5000])
def test_what_is_computed_again_is_computed_by_one(maker, size):
    """The largest element is among the elements: both are ONNX Runtime's, or both the kernel's."""
    ends = "(float[N] x) => (float[N] z) <float one = {1}>"
    text = f"{maker} m = ReduceMax (h)  e = Equal (h, m)  c = Cast <to = 1> (e)  p = Mul (c, x)  z = Sub (p, one)"
    model = model_of(text, ends.replace("N", str(size)))
    assert len(groups(model)) == (1 if size == 64 else 2)  # of small tensors, nothing is computed again
    x = np.random.default_rng(0).permutation(np.linspace(-2, 1, size, dtype=np.float32))
    z = Session(model, Options(threads=2, target="native")).run({"x": x})["z"]
    assert np.flatnonzero(z + 1).tolist() == [int(x.argmax())]


def test_an_output_that_declares_more_axes_than_it_has():
    """The declaration contradicts the nodes, so no pass is to blame: PassWarning is an error here."""
    text = "h = MatMul(x, w) a = Tanh(h) b = Mul(a, h) y = MatMul(b, w)"
    model = model_of(text, "(float[3] x, float[3,3] w) => (float[N,3] y)")
    feeds = {"x": np.ones(3, np.float32), "w": np.ones((3, 3), np.float32)}
    found = Session(model, Options(target="native")).run(feeds)["y"]
    np.testing.assert_allclose(found, np.full(3, 9 * np.tanh(np.float32(3))), rtol=1e-6)
