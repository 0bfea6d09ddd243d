"""Types and shapes that are inferred once for all nodes of a kind are those of every one of them."""

from __future__ import annotations

import functools
import operator
import re
import subprocess
import sys
from random import Random

import onnx
import onnx_ir as ir
import onnx_shape_inference as osi
import pytest
from onnx import parser
from onnx_shape_inference._ops._utils import floor_div_dim, max_dim, min_dim

from onnxgrad import custom_vjp, vjp
from onnxgrad.errors import NotDifferentiable, RuleError
from onnxgrad.ir import Builder
from onnxgrad.ir.fold import infer_and_fold
from onnxgrad.ir.infer import inference
from onnxgrad.ir.infer import registry as corrections_by_library
from onnxgrad.ir.infer.formulas import part_up_to, product, sum_of
from onnxgrad.ir.infer.inference import infer_model, kind_of
from onnxgrad.ir.infer.registry import registry
from tests.large_models import gpt
from tests.models import chain, mlp

#: Nodes that differ in one thing: an attribute, an element of an operand, a symbol, a type, what is declared.
ALIKE = """<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 4, 6] x, float[M, 4, 6] m, double[N, 4, 6] d, float[3] f) => (float[] y) <int64[2] p = {4, -1},
        int64[2] q = {-1, 4}, float[3] one = {1, 1, 1}, float[3] two = {1, 1, 2}> {
        a = Transpose <perm = [0, 2, 1]> (x) b = Transpose <perm = [1, 0, 2]> (x) c = Transpose <perm = [0, 2, 1]> (m)
        e = Reshape (x, p) h = Reshape (x, q) i = Exp (x) j = Exp (m) k = Exp (d) l = Softmax <axis = 0> (x)
        n = Resize <mode = "nearest"> (x, f, one) o = Resize <mode = "nearest"> (x, f, two)
        r = Add (x, m) s = Add (x, m) t = Concat <axis = 0> (x, m) u = Concat <axis = 1> (x, x)
        v = ReduceSum <keepdims = 0> (t) w = ReduceSum <keepdims = 0> (u) y = Add (v, w) }"""

#: Operators of `infer.common`, with operands and attributes that decide their shapes.
COMMON = """<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 6, 8, 9] x, float[6, 3, 2] w, float[M, 9, 1] m, float[9] v, int64[2, 1] i) => (float[] y) <
        float[4, 3, 3, 2] k = {0}, float[1] c = {2}, float[4] s = {1, 1, 2, 1.5}, int64[1] a = {-1},
        int64[2] two = {0, -2}, int64[4] p = {1, 0, 2, 3}, int64[2] t = {2, -1}, int64[2] b = {-1, 2},
        int64[2] e = {-9223372036854775808, 7}, int64[2] o = {2, 3}, int64[2] z = {0, 9223372036854775807},
        int64[3] f = {0, 0, 0}, int64[5] g1 = {2, 1, 6, 1, 9}> {
        n1 = Conv <group = 2, strides = [2, 1], pads = [1, 0, 1, 2], dilations = [1, 2]> (x, k)
        n2 = Conv <auto_pad = "SAME_UPPER", group = 2> (x, k) n3 = MaxPool <kernel_shape = [3, 2], strides = [2, 2]> (x)
        n4 = AveragePool <kernel_shape = [3, 2], ceil_mode = 1, strides = [2, 2]> (x) n5 = GlobalMaxPool (x)
        n6 = Flatten <axis = -2> (x) n7 = Slice (x, b, e, o, b) n8 = Slice (x, z, z, two) n9 = Pad (x, p, c, o)
        m1 = MatMul (x, m) m2 = MatMul (x, v) m3 = MatMul (v, m) m4 = MatMul (v, v) m5 = Transpose (x)
        m6 = ReduceMax (x, two) m7 = ReduceSum <keepdims = 0> (x) m8 = ReduceMean <noop_with_empty_axes = 1> (x)
        m9 = Unsqueeze (x, two) r1 = Squeeze (m, a) r2 = Reshape (w, t) r3 = Reshape (x, f) r4 = Expand (x, g1)
        r5 = Gather <axis = -1> (x, i) r6 = Concat <axis = 1> (x, x, x) r7 = Concat <axis = 0> (x, x)
        r8 = Resize <mode = "nearest"> (x, , s) r9 = Gemm <transA = 1, transB = 1> (n6, n6) q1 = Max (x, v, c)
        q2 = Sub (x, m) q3 = LayerNormalization (x, v) q4 = Clip (x, q1) y = ReduceSum <keepdims = 0> (q3) }"""


@pytest.mark.parametrize(
    "proto",
    [mlp(), chain(20), gpt(2), parser.parse_model(ALIKE), parser.parse_model(COMMON)],
    ids=["mlp", "chain", "gpt", "alike", "common"],
)
def test_each_node_has_what_inference_says_of_it_alone(proto, monkeypatch):
    ours, wanted = ir.from_proto(proto), ir.from_proto(proto)
    infer_model(ours)
    monkeypatch.setattr(inference.Inference, "look_up", lambda self, *node: (None, None))
    infer_model(wanted)
    _assert_same_types(ours.graph, wanted.graph)


@pytest.mark.parametrize("proto", [mlp(), chain(20), gpt(2)], ids=["mlp", "chain", "gpt"])
def test_each_node_has_what_the_library_says_of_it(proto):
    ours, wanted = ir.from_proto(proto), ir.from_proto(proto)
    infer_model(ours)
    osi.infer_symbolic_shapes(wanted, warn_on_missing=False, adopt_declared_symbols=False)
    _assert_same_types(ours.graph, wanted.graph)


def _assert_same_types(graph, wanted):
    for node, like in zip(graph, wanted, strict=True):
        for value, other in zip(node.outputs, like.outputs, strict=True):
            assert (value.name, value.dtype) == (other.name, other.dtype)
            assert _told(value) == _told(other), value.name


def _told(value):
    """The sizes of a value, and which of its axes have no name of the model's."""
    return None if value.shape is None else [d if isinstance(d, int) or str(d)[0] != "_" else "?" for d in value.shape]


#: Sizes that are multiplied, divided and broadcast, some of them beyond numbers times symbols.
SIZES = """<ir_version: 10, opset_import: ["": 21]>
    g (float[N, T, 12] x, float[T, 12, 5] w, float[M, 1, 3] v, int64[N, T] ids, bool[N, T] mask) => (float[] y) <
        int64[4] heads = {0, 0, 3, -1}, int64[2] rows = {-1, 12}, int64[2] sevenths = {-1, 7}, int64[1] all = {-1},
        int64[1] k = {6}, int64[6] pads = {0, 0, 1, 0, 0, 2}, int64[6] first = {1, 0, 0, 0, 0, 0},
        float[3] by = {1, 1, 2.5}, float[3] twice = {2, 1, 1}, float zero = {0},
        int64[3] begin = {0, 0, 0}, int64[2] front = {0, 0}, int64[3] times = {1, 2, 4},
        int64 nil = {0}, int64 one = {1}> {
        a = MatMul (x, w) b = Reshape (x, heads) c = Reshape (x, rows) d = Reshape (x, sevenths) e = Reshape (ids, all)
        f = Flatten (x) h = Flatten <axis = -1> (x) i = Size (x) j = Pad (x, pads) l = Pad (x, first)
        m = Resize <mode = "nearest"> (x, by, by) n = Resize <mode = "nearest"> (x, by, twice) o = Add (x, v)
        p = Equal (ids, e) q = Where (mask, zero, zero) r = Not (mask) s = And (mask, r)
        t = Shape <start = 0, end = 2> (x) u = Mul (t, k) z = Concat <axis = 0> (u, k) aa = Expand (zero, z)
        bb = Add (t, k) cc = Concat <axis = 0> (bb, k) dd = Expand (zero, cc) ee = Max (x, x, zero) ff = Mul (t, t)
        gg = Expand (zero, ff) hh = Shape (x) ii = Slice (x, begin, hh) jj = Shape (w) kk = Slice (x, begin, jj)
        ll = Range (nil, i, one) mm = Sub (t, k) nn = Neg (mm) oo = Add (mm, t) pp = Slice (x, front, mm)
        qq = Sub (oo, bb) rr = Expand (zero, qq) ss = Neg (bb) tt = Add (qq, ss) uu = Concat <axis = 1> (x, x, pp)
        vv = Concat <axis = 0> (t, all) ww = Reshape <allowzero = 1> (x, vv)
        xx = Tile (x, hh) yy = Tile (ids, u) zz = Tile (pp, times) ab = Tile (j, times)
        y = ReduceSum <keepdims = 0> (x) }"""


def test_sizes_are_those_that_sympy_computes(monkeypatch):
    ours, wanted = (ir.from_proto(parser.parse_model(SIZES)) for _ in range(2))
    infer_model(ours)
    monkeypatch.setattr(corrections_by_library, "CORRECTIONS", corrections_by_library.CORRECTIONS[1:])
    monkeypatch.setattr(inference, "registry", corrections_by_library._fill_registry())
    infer_model(wanted)
    for node, like in zip(ours.graph, wanted.graph, strict=True):
        for value, other in zip(node.outputs, like.outputs, strict=True):
            assert (value.name, value.dtype) == (other.name, other.dtype)
            assert str(_told(value)) == re.sub(r"SymbolicDim\('(\d+)'\)", r"\1", str(_told(other))), value.name
    (rows,) = [v for node in ours.graph for v in node.outputs if v.name == "ww"]
    assert rows.shape == ir.Shape(["N", "T", 12])


def test_sizes_of_expand_and_resize_as_pytorch_exports_them():
    model = ir.from_proto(
        parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 1, 3] x) => (float[] y) <int64[1] two = {2}, int64[1] last = {-1}, int64[1] three = {3},
            float[2] same = {1, 1}, float[1] twice = {2}> {
            n = Shape <start = 0, end = 1> (x) asked = Concat <axis = 0> (n, two, last)
            ones = ConstantOfShape <value = int64[1] {1}> (three) no = Mul (ones, last) open = Equal (asked, no)
            shape = Where (open, ones, asked) e = Expand (x, shape)
            scales = Concat <axis = 0> (same, twice) r = Resize <mode = "nearest"> (e, same, scales)
            y = ReduceSum <keepdims = 0> (r) }""")
    )
    infer_and_fold(model)
    shapes = {node.op_type: str(node.outputs[0].shape) for node in model.graph}
    assert (shapes["Expand"], shapes["Resize"]) == ("[N,2,3]", "[N,2,6]")
    assert "scales" in model.graph.initializers


def test_elements_chosen_by_a_comparison_are_constants():
    model = ir.from_proto(
        parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 1, 3] x) => (float[] y) <int64[3] asked = {2, 4, 3}, int64[1] no = {-1}> {
            n = Shape (x) open = Equal (n, no) shape = Where (open, n, asked) twice = Mul (shape, shape)
            e = Expand (x, twice) y = ReduceSum <keepdims = 0> (e) }""")
    )
    infer_and_fold(model)
    assert model.graph.initializers["twice"].const_value.numpy().tolist() == [4, 16, 9]


def test_products_are_written_as_sympy_writes_them():
    random = Random(0)
    names = ["N", "T", "batch", "b", "_d0", "_d10", "_d2", "I", "E", "pi", "x1", "x10", "x2"]
    for _ in range(300):
        dims = [
            random.choice([random.choice(names), random.randint(1, 40), "2*N*b", "floor(2*T/3)"])
            for _ in range(random.randint(1, 4))
        ]
        sizes = [d if isinstance(d, int) else ir.SymbolicDim(d) for d in dims]
        by = [*sizes[: random.randint(0, len(sizes))], random.choice([1, 1, 2, 4000])]
        whole = functools.reduce(operator.mul, sizes, 1)
        wanted = floor_div_dim(whole, functools.reduce(operator.mul, by, 1))
        found = product(sizes, by)
        assert found is None or str(found) == str(wanted)
        assert found is not None or "**" in str(wanted) or str(wanted).isdigit() or "floor(2*T/3)" in dims


def test_sums_are_written_as_sympy_writes_them():
    random = Random(0)
    terms = [*["N", "b", "_d0", "_d10", "_d2", "x1"], "2*N", "N*b", "3*_d0*b", "floor(2*T/3)", "2*N*floor(T/2)"]
    for _ in range(100):
        added, taken = ([random.choice([random.choice(terms), random.randint(0, 9)]) for _ in range(n)] for n in (3, 2))
        sizes, less = ([d if isinstance(d, int) else ir.SymbolicDim(d) for d in dims] for dims in (added, taken))
        wanted = sum(sizes, ir.SymbolicDim("0")) - sum(less, ir.SymbolicDim("0"))
        assert str(sum_of(sizes, less)) == str(wanted)
        assert str(sum_of([sum_of(sizes, less), *less])) == str(wanted + sum(less, ir.SymbolicDim("0")))
        part = part_up_to(sum_of(sizes), sum_of(sizes, less))
        assert str(part) == str(max_dim(0, min_dim(sum(sizes, ir.SymbolicDim("0")), wanted)))
    assert sum_of([3, 4]) == 7
    assert sum_of([ir.SymbolicDim("N**2"), 4]) is None
    assert part_up_to(ir.SymbolicDim("N"), ir.SymbolicDim("b")) is None


def test_what_is_new_is_like_nothing_else():
    model = ir.from_proto(parser.parse_model(ALIKE))
    infer_model(model)
    made = {node.outputs[0].name: node.outputs[0].shape for node in model.graph}
    assert made["r"][0] != made["s"][0]  # either of N and M may be 1, so nobody knows what comes of them
    kinds = [kind_of(node) for node in model.graph]
    assert kinds[0] == kinds[0] != kinds[1]


def test_a_message_names_no_value_that_a_user_cannot_declare():
    dims = ir.Value(name="dims", type=ir.TensorType(ir.DataType.INT64))
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT))
    builder = Builder(ir.Graph([dims, y], [], nodes=[], opset_imports={"": 18}))
    with pytest.raises(NotDifferentiable, match=r"the rank of 'y' is not known.* declare its shape"):
        _ = builder.var(y).rank
    with pytest.raises(NotDifferentiable, match=r"a value of its derivative.*declare the shapes of its operands"):
        _ = builder.Reshape(builder.var(y), builder.var(dims)).rank


LIBRARY = """
import onnx_ir as ir, onnx_shape_inference as osi
from onnx import parser

def state():
    osi.registry.collect()
    table = {key: [(since, id(f)) for since, f in versions] for key, versions in osi.registry._registrations.items()}
    classes = osi.ShapeInferenceContext, osi.OpShapeInferenceRegistry
    methods = [{k: id(v) for k, v in vars(c).items()} for c in classes]
    return table, methods, logging.getLogger("onnx_shape_inference").level

def inferred():
    model = ir.from_proto(parser.parse_model(TEXT))
    osi.infer_symbolic_shapes(model, warn_on_missing=False)
    return [(v.name, str(v.type), str(v.shape)) for node in model.graph for v in node.outputs]

before, shapes = state(), inferred()
import onnxgrad
import onnxgrad.transforms.gradient_node, onnxgrad.training
onnxgrad.vjp(parser.parse_model(TEXT), wrt=["x"], of=["y"])
assert state() == before
assert inferred() == shapes
assert ("r", "FLOAT", "[N,4,6]") in shapes, shapes
"""


def test_the_library_stays_as_it_is_for_others():
    """Its registry, its classes and what it infers: the guess [N] + [M] → [N] included."""
    program = f"import logging\nTEXT = {ALIKE!r}\n{LIBRARY}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def _builder():
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 3]))
    builder = Builder(ir.Graph([x], [], nodes=[], opset_imports={"": 18, "com.microsoft": 1, "mine": 1}))
    return builder, builder.var(x)


def test_a_misspelt_operator_is_an_error_at_once():
    builder, x = _builder()
    with pytest.raises(RuleError, match=r"opset 18 has no operator 'Sigmod'; did you mean 'Sigmoid'"):
        builder.Sigmod(x)
    with pytest.raises(RuleError, match=r"'com.microsoft' has no operator 'BiasGello'; did you mean 'BiasGelu'"):
        builder.emit("BiasGello", x, x, domain="com.microsoft")
    with pytest.raises(RuleError, match=r"opset 18 has no operator 'RotaryEmbedding'"):  # of opset 23
        builder.RotaryEmbedding(x, x, x)
    assert builder.emit("Anything", x, domain="mine").dtype is None


def test_an_operator_of_operands_that_do_not_fit_is_an_error_at_once():
    builder, x = _builder()
    with pytest.raises(RuleError, match=r"MatMul node .* is not valid: Incompatible"):
        builder.MatMul(x, x)
    with pytest.raises(RuleError, match=r"Concat node .* is not valid: .*axis"):
        builder.Concat(x, x)


@pytest.mark.parametrize("kind", ["none", "mean"])
@pytest.mark.parametrize("declared", ["", "[M, 2]"])
def test_a_declared_shape_of_another_rank_is_wrong(kind, declared):
    """PyTorch's newer exporter declares losses of rows to be one number."""
    text = f"(float[N, 3] x, int64[N] y, float s) => (float[] l) <float{declared} c> {{"
    text += f' c = SoftmaxCrossEntropyLoss <reduction = "{kind}"> (x, y) l = Mul (c, s) }}'
    model = ir.from_proto(parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g {text}'))
    infer_model(model)
    assert [str(v.shape) for n in model.graph for v in n.outputs] == ["[N]" if kind == "none" else "[]"] * 2


#: PyTorch's older exporter asks for the rank, of values of every batch size; `y` is declared as the dead branch has it.
BY_RANK = """<ir_version: 10, opset_import: ["": 18]>
    g (float[N, 3] x) => (float[M, M, M] y) {
        s = Shape (x) n = Size (s) two = Constant <value = int64 {2}> () d = Sub (n, two)
        zero = Constant <value = int64[1] {0}> () less = Less (d, zero)
        y = If (less) <
            then_branch = t () => (a) { a = Unsqueeze (x, zero) },
            else_branch = e () => (b) { b = Identity (x) }> }"""


def test_a_branch_that_the_rank_decides_is_known():
    model = ir.from_proto(parser.parse_model(BY_RANK))
    infer_and_fold(model)
    assert str(model.graph.outputs[0].shape) == "[N,3]"


@pytest.mark.parametrize(("axis", "rank"), [("", 1), ("<axis = 1>", 2), ("<axis = -2>", 2)])
def test_unique_slices_keep_the_rank(axis, rank):
    text = f"g (float[N, 3] x) => (float[] y) {{ u = Unique {axis} (x) y = ReduceSum <keepdims = 0> (u) }}"
    model = ir.from_proto(parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}'))
    infer_model(model)
    assert len(model.graph[0].outputs[0].shape) == rank


def test_a_node_of_a_loop_body_that_does_not_fit_is_an_error_at_once():
    builder, x = _builder()
    formals = [ir.Value(name=name) for name in ("step", "go", "state")]
    body = ir.Graph(formals, [], nodes=[], opset_imports={"": 18}, name="body")
    node = ir.Node("", "Concat", [formals[2]], [ir.AttrInt64("axis", 7)], outputs=[ir.Value(name="next")])
    body.append(node)
    body.outputs.extend([formals[1], node.outputs[0]])
    count, go = builder.const(3), builder.const(True)
    with pytest.raises(RuleError, match=r"Loop node .* is not valid: .*axis=7"):
        builder.Loop(count, go, x, body=ir.AttrGraph("body", body))


#: Inside the outer Loop, the operand of Split comes from a Loop that leaves its sizes open.
OPEN_SIZES = """<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 4] x, int64 n, int64 m, bool t) => (float[] y, float[] s) {
        y, s = Loop (n, t, x) <body = b (int64 i, bool c, float[] v) => (bool d, float[] w, float[] first) {
            d = Identity (c)
            u = Loop (m, c, v) <body = inner (int64 j, bool e, float[] p) => (bool f, float[] q) {
                f = Identity (e) q = Concat <axis = 0> (p, p) }>
            first, second = Split <axis = 1, num_outputs = 2> (u)
            w = Concat <axis = 0> (first, second) }> }"""


def test_sizes_that_a_loop_leaves_open_have_names_in_the_body_that_reads_them():
    model = ir.from_proto(parser.parse_model(OPEN_SIZES))
    infer_model(model)
    values = {v.name: v for graph in model.graphs() for node in graph for v in node.outputs}
    assert [len(values[name].shape) for name in ("first", "second", "w", "y", "s")] == [2, 2, 2, 2, 3]
    u, w = values["u"].shape, values["w"].shape
    assert w[0] == 2 * u[0]
    assert w[1] != u[1]


def test_a_misspelt_operator_in_a_rule_of_a_user_is_named():
    rule = custom_vjp("Tanh", lambda op, g, x: g * op.Sigmod(x))
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Tanh(x) }'
    )
    with pytest.raises(RuleError, match=r"Tanh node .*'Sigmod'; did you mean 'Sigmoid'"):
        vjp(model, wrt=["x"], rules=[rule])


def test_every_version_of_a_standard_operator_is_known():
    """The library's registry begins some operators at a later version than the specification does."""
    unknown = [
        (schema.name, schema.since_version)
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and 7 <= schema.since_version <= 26
        if registry.get("", schema.name, schema.since_version) is None
    ]
    assert unknown == []
