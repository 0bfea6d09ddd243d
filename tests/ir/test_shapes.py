"""sum_to and expand_to against numpy, whatever is known about shapes; no inferred shape may be false."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator

import onnxgrad
from onnxgrad.ir import Builder, expand_to, reshape_to, sum_to
from onnxgrad.ir.infer.inference import infer_model
from tests.onnx_cases import NODE_CASES
from tests.rules.evaluators import Flatten

onnxruntime.set_default_logger_severity(3)
OPERATORS = ["Add", "Mul", "Where", "Max", "Sum", "Expand", "MatMul"]
SETTINGS = settings(max_examples=60, deadline=None)


@st.composite
def broadcasts(draw):
    """A shape, and one that broadcasts to it."""
    full = draw(st.lists(st.integers(0, 3), max_size=4))
    lead = draw(st.integers(0, len(full)))
    return tuple(full), tuple(d if draw(st.booleans()) else 1 for d in full[lead:])


def declared(draw, shape, prefix, names):
    """Possible declarations of a tensor of `shape`: sizes, symbols (shared by equal sizes), or none."""
    how = draw(st.sampled_from(["static", "symbolic", "shared", "mixed", "unknown rank"]))
    if how == "unknown rank":
        return None
    if how == "static":
        return list(shape)
    if how == "shared":
        return [d if d == 1 else names.setdefault(d, f"S{d}") for d in shape]
    return [d if how == "mixed" and draw(st.booleans()) else f"{prefix}{i}" for i, d in enumerate(shape)]


def evaluate(write, feeds, dims, dtype):
    """The result of the nodes that `write` emits, on the reference evaluator and on ONNX Runtime."""
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    values = [
        ir.Value(name=n, type=ir.TensorType(kind), shape=None if d is None else ir.Shape(d))
        for n, d in zip(feeds, dims)
    ]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 21}, name="g")
    builder = Builder(graph)
    result = builder.Identity(write(*[builder.var(v) for v in values]))
    graph.outputs.append(result.value)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    used = {i.name: feeds[i.name] for i in session.get_inputs()}
    known = None if result.shape is None else [d if isinstance(d, int) else None for d in result.shape]
    return ReferenceEvaluator(model, new_ops=[Flatten]).run(None, feeds)[0], session.run(None, used)[0], known


def summed(x, shape):
    lead = x.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(lead + i for i, d in enumerate(shape) if d == 1)
    return x.sum(axis=axes, keepdims=True).reshape(shape)


def believed(known, want):
    return known is None or (len(known) == want.ndim and all(k in (None, d) for k, d in zip(known, want.shape)))


@SETTINGS
@given(data=st.data(), shapes=broadcasts(), dtype=st.sampled_from([np.float32, np.float64]))
def test_sum_to_undoes_broadcasting(data, shapes, dtype):
    full, small = shapes
    rng = np.random.default_rng(0)
    x, like = rng.integers(-4, 5, full).astype(dtype), np.zeros(small, dtype)
    names = {}
    dims = [declared(data.draw, full, "F", names), declared(data.draw, small, "L", names)]
    want = summed(x, small)
    *results, known = evaluate(sum_to, {"x": x, "like": like}, dims, dtype)
    for got in results:
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)  # small integers: exact in any order
    assert believed(known, want)


@SETTINGS
@given(data=st.data(), shapes=broadcasts())
def test_expand_to_broadcasts(data, shapes):
    full, small = shapes
    x, like = np.random.default_rng(0).standard_normal(small), np.zeros(full)
    names = {}
    dims = [declared(data.draw, small, "L", names), declared(data.draw, full, "F", names)]
    *results, known = evaluate(expand_to, {"x": x, "like": like}, dims, np.float64)
    for got in results:
        np.testing.assert_array_equal(got, np.broadcast_to(x, full))
    assert believed(known, np.zeros(full))


@SETTINGS
@given(data=st.data(), shape=st.lists(st.integers(0, 3), max_size=4))
def test_reshape_to_keeps_elements_in_order(data, shape):
    like = np.zeros(shape)
    x = np.arange(float(like.size))
    names = {}
    dims = [declared(data.draw, x.shape, "F", names), declared(data.draw, tuple(shape), "L", names)]
    *results, known = evaluate(reshape_to, {"x": x, "like": like}, dims, np.float64)
    for got in results:
        np.testing.assert_array_equal(got, x.reshape(shape))
    assert believed(known, like)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_column(bad):
    x = np.ones((5, 4), np.float32)
    x[2, 1] = bad
    *results, _ = evaluate(sum_to, {"x": x, "like": np.zeros(4, np.float32)}, [[5, 4], [4]], np.float32)
    for got in results:
        np.testing.assert_array_equal(np.isfinite(got), [True, False, True, True])


@st.composite
def operands(draw):
    """Two shapes that broadcast against each other."""
    rank = draw(st.integers(0, 3))
    full = [draw(st.integers(0, 3)) for _ in range(rank)]
    shapes = []
    for _ in range(2):
        lead = draw(st.integers(0, rank))
        shapes.append(tuple(d if draw(st.booleans()) else 1 for d in full[lead:]))
    return shapes


@SETTINGS
@given(data=st.data(), shapes=operands(), op=st.sampled_from(OPERATORS))
def test_inferred_shapes_of_broadcasts_are_true(data, shapes, op):
    """For all symbols of operands, inferred numbers are sizes, and equal symbols are equal sizes."""
    if op == "MatMul":
        shapes = [(*shapes[0], 2, 3), (*shapes[1], 3, 2)]
    names = {}
    dims = [declared(data.draw, s, p, names) for s, p in zip(shapes, "AB")]
    arrays = [np.zeros(s) for s in shapes]
    if op == "Expand":
        arrays[1], dims[1] = np.array(shapes[1], np.int64), [len(shapes[1])]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), d)
        for n, a, d in zip("ab", arrays, dims)
    ]
    given_names = ["c", "a", "b"] if op == "Where" else ["a", "b"]
    held = [onnx.numpy_helper.from_array(np.array(True), "c")]
    graph = helper.make_graph(
        [helper.make_node(op, given_names, ["y"])], "g", inputs, [onnx.ValueInfoProto(name="y")], held
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    want = ReferenceEvaluator(model).run(None, dict(zip("ab", arrays)))[0]
    held_model = ir.from_proto(model)
    infer_model(held_model)
    inferred = held_model.graph.outputs[0].shape
    if inferred is None:
        return
    sizes = {s: n for d, a in zip(dims, arrays) for s, n in zip(d or [], a.shape) if isinstance(s, str)}
    assert len(inferred) == want.ndim
    for dim, size in zip(inferred, want.shape):
        assert dim == size if isinstance(dim, int) else sizes.get(dim.value, size) == size


@pytest.mark.parametrize(
    ("op", "shapes", "constants", "attrs"),
    [
        ("Squeeze", [(1, 3, 1)], [], {}),
        ("Slice", [(5, 4)], [np.array([9]), np.array([12])], {}),
        ("Slice", [(2, 4)], [np.array([1]), np.array([3])], {}),
        ("Slice", [(5, 4)], [np.array([-9]), np.array([-1])], {}),
        ("Slice", [(5, 4)], [np.array([4]), np.array([1]), np.array([0]), np.array([-2])], {}),
        ("Einsum", [(1, 3), (2, 3)], [], {"equation": "ij,ij->i"}),
        ("Einsum", [(1, 2, 3), (2, 1, 3)], [], {"equation": "...i,...i->..."}),
        ("MatMul", [(1, 2, 3), (2, 3, 2)], [], {}),
    ],
)
def test_sizes_that_only_the_run_tells_are_unknown(op, shapes, constants, attrs):
    """Every dimension is a symbol of its own; none of them may be taken for another size."""
    floats = [f"x{i}" for i in range(len(shapes))]
    inputs = [
        helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, [f"{n}_{k}" for k in range(len(s))])
        for n, s in zip(floats, shapes)
    ]
    held = [onnx.numpy_helper.from_array(c.astype(np.int64), f"c{i}") for i, c in enumerate(constants)]
    node = helper.make_node(op, [*floats, *[c.name for c in held]], ["y"], **attrs)
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    want = ReferenceEvaluator(model).run(None, {n: np.zeros(s) for n, s in zip(floats, shapes)})[0]
    sizes = {f"{n}_{k}": d for n, s in zip(floats, shapes) for k, d in enumerate(s)}
    opened = ir.from_proto(model)
    infer_model(opened)
    inferred = opened.graph.outputs[0].shape
    if inferred is not None:
        assert len(inferred) == want.ndim
        for dim, size in zip(inferred, want.shape):
            assert dim == size if isinstance(dim, int) else sizes.get(dim.value, size) == size


def node_tests():
    """The node tests of the onnx package for standard operators on tensors."""
    for case in NODE_CASES:
        opset = {o.domain: o.version for o in case.model.opset_import}.get("", 99)
        data = case.data_sets
        if opset <= 26 and len(case.model.graph.node) == 1 and data and not case.model.graph.node[0].domain:
            inputs, outputs = data[0]
            if all(isinstance(a, np.ndarray) for a in (*inputs, *outputs)):
                yield case.name, case.model, inputs, outputs


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("symbolic", [True, False])
def test_inferred_shapes_of_all_operators_are_true(symbolic):
    """Every dimension a symbol or a number; operands that hold shapes, axes or indices are not known, but their number.

    Every rank is known that only sizes do not decide.
    """
    wrong, count = [], 0
    for name, proto, inputs, outputs in node_tests():
        opened = ir.from_proto(proto)
        sizes = {}
        for value, array in zip(opened.graph.inputs, inputs):
            if symbolic and (array.dtype.kind == "f" or array.ndim > 1):
                dims = [f"{value.name}_{k}" for k in range(array.ndim)]
                sizes |= dict(zip(dims, array.shape))
                value.shape = ir.Shape(dims)
        for value in opened.graph.outputs:
            value.shape = None
        infer_model(opened)
        count += 1
        for value, array in zip(opened.graph.outputs, outputs):
            dims = value.shape
            if dims is None and "gathernd" in name and symbolic:
                continue  # the size of the last axis of the index decides
            if dims is None or not (
                len(dims) == array.ndim
                and all(d == n if isinstance(d, int) else sizes.get(d.value, n) == n for d, n in zip(dims, array.shape))
            ):
                wrong.append(f"{name}: {dims}, but {array.shape}")
    assert count > 900
    assert not wrong, "\n".join(wrong)


OF_UNKNOWN_RANK = {
    "tile": ("int64[3] n", "y = Tile (x, n)", 3),
    "pad": ("int64[6] n", "y = Pad (x, n)", 3),
    "resize": ("float[4] n", "y = Resize (x, , n)", 4),
    "resize to sizes": ("int64[4] n", "y = Resize (x, , , n)", 4),
    "crop": ("int64[2] n", "y = CenterCropPad (x, n)", 2),
    "transpose": ("int64 n", "y = Transpose <perm = [2, 0, 1]> (x)", 3),
    "concatenate": ("float[A, 3] n", "y = Concat <axis = 0> (n, x)", 2),
    "sample": ("float[N, A, B, 2] n", "y = GridSample (x, n)", 4),
    "grid": ("float[N, 3, 4] theta, int64[K] n", "y = AffineGrid (theta, n)", 5),
    "fold": ("float[N, C, L] z, int64[2] n, int64[2] k", "y = Col2Im (z, n, k)", 4),
}


@pytest.mark.parametrize("name", OF_UNKNOWN_RANK)
def test_ranks_that_other_operands_tell(name):
    more, text, rank = OF_UNKNOWN_RANK[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 20]> g (float[1] x, {more}) => (float y) {{ {text} }}'
    )
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.ClearField("shape")
    opened = ir.from_proto(model)
    infer_model(opened)
    assert len(opened.graph.outputs[0].shape) == rank
    assert "x" not in text.split("(")[1] or len(opened.graph.inputs[0].shape) == rank


COMPUTED = {
    "expand as exporters write it": (
        """(float[N, 1, 3] x, float[N, T] z) => (float[A, B, C] y) {
            k = Constant <value_ints = [-1]> () s = Shape (z) t = Concat <axis = 0> (s, k)
            c = Constant <value_ints = [3]> () u = ConstantOfShape <value = int64[1] {1}> (c)
            m = Equal (t, k) w = Where (m, u, t) e = Expand (x, w) y = Mul (e, e) }""",
        "(float[N, 1, 3] x, float[N, T] z) => (float[A, B, C] y)"
        " { u = Constant <value_ints = [1, 5, 1]> () e = Expand (x, u) y = Mul (e, e) }",
        {"x": (2, 1, 3), "z": (2, 5)},
    ),
    "tile": (
        """(float[N, 3] x, float[N, T] z) => (float[A, B] y) {
            s = Shape (z) t = Tile (x, s) y = Mul (t, t) }""",
        """(float[N, 3] x, float[N, T] z) => (float[A, B] y) {
            s = Constant <value_ints = [2, 5]> () t = Tile (x, s) y = Mul (t, t) }""",
        {"x": (2, 3), "z": (2, 5)},
    ),
    "grid": (
        """(float[N, 1, 4, 5] x, float[N, 2, 3] z) => (float[N, 1, 4, 5] y) {
            s = Shape (x) i = Constant <value_ints = [0, 1, 2, 3]> () t = Gather (s, i)
            g = AffineGrid (z, t) y = GridSample (x, g) }""",
        """(float[2, 1, 4, 5] x, float[2, 2, 3] z) => (float[2, 1, 4, 5] y) {
            t = Constant <value_ints = [2, 1, 4, 5]> () g = AffineGrid (z, t) y = GridSample (x, g) }""",
        {"x": (2, 1, 4, 5), "z": (2, 2, 3)},
    ),
    "a slice of what an If leaves open": (
        """(float[N, M, T] x, float[N] z) => (float[A, B] y) {
            one = Constant <value_int = 1> () v = Constant <value_ints = [1]> () o = Constant <value_ints = [0]> ()
            s = Shape (x) d = Gather (s, one) c = Equal (d, one)
            q = If (c) <then_branch = a () => (float[N, T] h) { h = Squeeze (x, v) },
                        else_branch = b () => (float[N, M, T] k) { k = Identity (x) }>
            e = Constant <value_ints = [3]> () w = Slice (q, o, e, v) y = Mul (w, w) }""",
        """(float[N, M, T] x, float[N] z) => (float[A, B] y) { v = Constant <value_ints = [1]> ()
            o = Constant <value_ints = [0]> () e = Constant <value_ints = [3]> ()
            q = Squeeze (x, v) w = Slice (q, o, e, v) y = Mul (w, w) }""",
        {"x": (2, 1, 5), "z": (2,)},
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_derivatives_where_shapes_are_computed(name):
    *texts, shapes = COMPUTED[name]
    rng = np.random.default_rng(0)
    feeds = {n: rng.uniform(-1, 1, s).astype(np.float32) for n, s in shapes.items()}
    found = []
    for text in texts:
        model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 20]> g ' + text)
        for transform in (onnxgrad.value_and_grad, onnxgrad.jvp):
            session = onnxruntime.InferenceSession(transform(model, wrt=["x", "z"]).SerializeToString())
            named = {i.name: feeds[i.name.removesuffix("_tangent")] for i in session.get_inputs()}
            found.append(session.run(None, named))
    for got, want in zip(found[:2], found[2:]):
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


def test_dimensions_that_nobody_knows_are_different_in_nodes_of_one_kind():
    """Each kind of node is inferred once, but [N, 4] + [M, 4] may be N rows here and M there."""
    names = [("a", "N"), ("b", "M"), ("c", "N"), ("d", "M")]
    values = [ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([d, 4])) for n, d in names]
    builder = Builder(ir.Graph(values, [], nodes=[], opset_imports={"": 21}))
    a, b, c, d = map(builder.var, values)
    first, second, known = builder.Add(a, b), builder.Add(c, d), builder.Exp(a)
    assert first.dims[0] != second.dims[0]
    assert first.dims[0] not in ("N", "M")
    assert builder.Exp(c).shape == known.shape == a.shape


def test_a_declared_dimension_without_number_and_name_says_nothing():
    """PyTorch's exporter declares so what it reshapes to the Shape of something."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N, 32, 8, 8] x) => (float[N, 32, 8, 8] y)
        <int64[3] groups = {0, 8, -1}, float[8] one = {1, 1, 1, 1, 1, 1, 1, 1}>
        {
            v = Reshape (x, groups)
            n = InstanceNormalization (v, one, one)
            s = Shape (x)
            z = Reshape (n, s)
            y = Mul (z, z)
        }""")
    model.graph.value_info.append(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [None] * 4))
    inferred = ir.from_proto(model)
    infer_model(inferred)
    (z,) = [v for node in inferred.graph for v in node.outputs if v.name == "z"]
    assert [d if isinstance(d, int) else d.value for d in z.shape] == ["N", 32, 8, 8]
