"""Channels and heads removed from graphs: equality with the masked model, and what is left alone."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad
from onnxgrad.training.loop.prune import opened_for_pruning
from onnxgrad.training.pruning.channels import find_channels
from onnxgrad.training.pruning.follow import follow
from onnxgrad.training.pruning.shrink import shrink, weight_masks
from tests.training import nets

#: Graphs by what channels are followed through: inputs and outputs, nodes, the shapes of weights, and how many layers
#: can be narrowed.
GRAPHS = {
    "residual": (
        "(float[N, 3, 8, 8] x) => (float[N, 5] y)",
        """a = Conv <pads = [1, 1, 1, 1]> (x, w1)  n = BatchNormalization (a, g, b, m, v)  r = Relu (n)
           c = Conv <pads = [1, 1, 1, 1]> (r, w2, b2)  s = Add (n, c)  p = GlobalAveragePool (s)  f = Flatten (p)
           y = Gemm <transB = 1> (f, w3, b3)""",
        {"w1": (8, 3, 3, 3), "g": 8, "b": 8, "m": 8, "v": 8, "w2": (8, 8, 3, 3), "b2": 8, "w3": (5, 8), "b3": 5},
        1,
    ),
    "concatenation": (
        "(float[N, 3, 6, 6] x) => (float[N, 4, 6, 6] y)",
        """a = Conv (x, w1)  b = Conv (a, w2)  c = Concat <axis = 1> (a, b, x)
           y = Conv (c, w3)""",
        {"w1": (8, 3, 1, 1), "w2": (6, 8, 1, 1), "w3": (4, 17, 1, 1)},
        2,
    ),
    "depthwise": (
        "(float[N, 3, 6, 6] x) => (float[N, 4, 4, 4] y)",
        "a = Conv (x, w1)  b = Conv <group = 8> (a, w2, b2)  c = HardSwish (b)  y = Conv (c, w3)",
        {"w1": (8, 3, 1, 1), "w2": (8, 1, 3, 3), "b2": 8, "w3": (4, 8, 1, 1)},
        1,
    ),
    "groups": (
        "(float[N, 3, 6, 6] x) => (float[N, 4, 4, 4] y)",
        "a = Conv (x, w1)  b = Conv <group = 4> (a, w2, b2)  y = Conv (b, w3)",
        {"w1": (8, 3, 1, 1), "w2": (12, 2, 3, 3), "b2": 12, "w3": (4, 12, 1, 1)},
        1,
    ),
    "shuffle": (
        "(float[N, 3, 6, 6] x) => (float[N, 4, 6, 6] y)",
        """a = Conv (x, w1)  r = Reshape (a, divided)  t = Transpose <perm = [0, 2, 1, 3, 4]> (r)
           s = Reshape (t, joined)  b = Conv <group = 8> (s, w2)  y = Conv (b, w3)""",
        {"w1": (8, 3, 1, 1), "w2": (8, 1, 1, 1), "w3": (4, 8, 1, 1), "divided": [-1, 2, 4, 6, 6],
         "joined": [-1, 8, 6, 6]},
        1,
    ),
    "einsum": (
        "(float[N, T, 4] x) => (float[N, T, 3] y)",
        """a = Einsum <equation = "...d,hde->...he"> (x, w1)  v = Einsum <equation = "ntd,hde->nthe"> (x, w2)
           s = Einsum <equation = "nthe,nshe->nhts"> (a, a)  p = Softmax (s)
           m = Einsum <equation = "nhts,nshe->nthe"> (p, v)  y = Einsum <equation = "nthe,hek"> (m, w3)""",
        {"w1": (3, 4, 5), "w2": (3, 4, 6), "w3": (3, 6, 3)},
        2,
    ),
    "order": (
        "(float[N, 4] x) => (float[N, 3] y)",
        "a = MatMul (x, w1)  p = Gather <axis = 1> (a, order)  b = Add (p, b1)  y = MatMul (b, w2)",
        {"w1": (4, 6), "b1": 6, "w2": (6, 3), "order": [4, 2, 0, 5, 1, 3]},
        1,
    ),
    "flattened": (
        "(float[N, 2, 6, 6] x) => (float[N, 3] y)",
        "a = Conv (x, w1)  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)  f = Reshape (p, s)"
        "  y = MatMul (f, w2)",
        {"w1": (5, 2, 3, 3), "w2": (20, 3), "s": [-1, 20]},
        1,
    ),
    "decoder": (
        "(float[N, 2, 6, 6] x) => (float[N, 1, 12, 12] y)",
        """a = Conv (x, w1)  i = InstanceNormalization (a, g, b)  u = ConvTranspose <strides = [2, 2]> (i, w2, b2)
           e = Elu (u)  y = Conv (e, w3)""",
        {"w1": (6, 2, 1, 1), "g": 6, "b": 6, "w2": (6, 4, 2, 2), "b2": 4, "w3": (1, 4, 1, 1)},
        2,
    ),
    "gates": (
        "(float[T, N, 4] x) => (float[N, 3] y)",
        """s, h, c = LSTM <hidden_size = 6> (x, w, r, b)  q = Squeeze (h, axis)  y = MatMul (q, w2)""",
        {"w": (1, 24, 4), "r": (1, 24, 6), "b": (1, 48), "w2": (6, 3), "axis": [0]},
        1,
    ),
    "both directions": (
        "(float[5, N, 4] x) => (float[5, N, 3] y)",
        """s, h = GRU <hidden_size = 6, direction = "bidirectional"> (x, w, r, b)
           t = Transpose <perm = [0, 2, 1, 3]> (s)  f = Reshape (t, shape)  y = MatMul (f, w2)""",
        {"w": (2, 18, 4), "r": (2, 18, 6), "b": (2, 36), "w2": (12, 3), "shape": [0, 0, 12]},
        1,
    ),
    "transposed weight": (
        "(float[N, 4] x) => (float[N, 3] y)",
        "t = Transpose (w1)  a = MatMul (x, t)  r = Relu (a)  u = Transpose (w2)  y = MatMul (r, u)",
        {"w1": (6, 4), "w2": (3, 6)},
        1,
    ),
    "parts": (
        "(float[N, 4] x) => (float[N, 3] y)",
        """a = MatMul (x, w1)  l, r = Split <axis = 1, num_outputs = 2> (a)  s = Sigmoid (l)  g = Mul (s, r)
           y = MatMul (g, w2)""",
        {"w1": (4, 12), "w2": (6, 3)},
        1,
    ),
    "slices": (
        "(float[N, 4] x) => (float[N, 3] y)",
        """a = MatMul (x, w1)  l = Slice (a, zero, five, one)  r = Slice (a, five, twelve, one)
           p = MatMul (l, w2)  q = MatMul (r, w3)  y = Add (p, q)""",
        {"w1": (4, 12), "w2": (5, 3), "w3": (7, 3), "zero": [0], "five": [5], "twelve": [12], "one": [1]},
        1,
    ),
    "heads": (
        "(float[N, S, 8] x) => (float[N, S, 8] y)",
        """q0 = MatMul (x, wq)  k0 = MatMul (x, wk)  v0 = MatMul (x, wv)
           b = Shape <start = 0, end = 2> (x)  s = Concat <axis = 0> (b, minus, two)  o = Concat <axis = 0> (b, minus)
           q1 = Reshape (q0, s)  k1 = Reshape (k0, s)  v1 = Reshape (v0, s)
           q = Transpose <perm = [0, 2, 1, 3]> (q1)  k = Transpose <perm = [0, 2, 3, 1]> (k1)
           v = Transpose <perm = [0, 2, 1, 3]> (v1)  z = MatMul (q, k)  p = Softmax (z)  a = MatMul (p, v)
           t = Transpose <perm = [0, 2, 1, 3]> (a)  f = Reshape (t, o)  y = MatMul (f, wo)""",
        {"wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "wo": (8, 8), "minus": [-1], "two": [2]},
        1,
    ),
    "heads whose size scales products": (
        "(float[N, S, 8] x) => (float[N, S, 8] y)",
        """q0 = MatMul (x, wq)  v0 = MatMul (x, wk)
           b = Shape <start = 0, end = 2> (x)  s = Concat <axis = 0> (b, minus, two)  o = Concat <axis = 0> (b, minus)
           q1 = Reshape (q0, s)  v1 = Reshape (v0, s)
           q = Transpose <perm = [0, 2, 1, 3]> (q1)  k = Transpose <perm = [0, 2, 3, 1]> (q1)
           v = Transpose <perm = [0, 2, 1, 3]> (v1)  z = MatMul (q, k)
           n = Shape (q)  d = Slice (n, minus, end)  e = Cast <to = 1> (d)  m = Sqrt (e)  c = Div (z, m)
           p = Softmax (c)  a = MatMul (p, v)
           t = Transpose <perm = [0, 2, 1, 3]> (a)  f = Reshape (t, o)  y = MatMul (f, wo)""",
        {"wq": (8, 8), "wk": (8, 8), "wo": (8, 8), "minus": [-1], "two": [2], "end": [1 << 62]},
        1,
    ),
    "heads of one matrix": (
        "(float[N, 7, 8] x) => (float[N, 7, 8] y)",
        """a = MatMul (x, w)  r = Reshape (a, s)  t = Transpose <perm = [2, 0, 3, 1, 4]> (r)
           q = Gather <axis = 0> (t, i0)  k0 = Gather <axis = 0> (t, i1)  v = Gather <axis = 0> (t, i2)
           k = Transpose <perm = [0, 1, 3, 2]> (k0)  z = MatMul (q, k)  p = Softmax (z)  h = MatMul (p, v)
           u = Transpose <perm = [0, 2, 1, 3]> (h)  f = Reshape (u, o)  y = MatMul (f, wo)""",
        {"w": (8, 24), "wo": (8, 8), "s": [0, 7, 3, 4, 2], "o": [0, 7, 8], "i0": 0, "i1": 1, "i2": 2},
        1,
    ),
    "heads in groups": (
        "(float[N, 7, 8] x) => (float[N, 7, 8] y)",
        """q0 = MatMul (x, wq)  q1 = Reshape (q0, of_q)  q = Transpose <perm = [0, 2, 1, 3]> (q1)
           k0 = MatMul (x, wk)  k1 = Reshape (k0, of_k)  k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
           l, r = Split <axis = 3, num_outputs = 2> (k2)  n = Neg (r)  k3 = Concat <axis = 3> (n, l)
           k4 = Mul (k3, angles)  k5 = Add (k2, k4)
           v0 = MatMul (x, wv)  v1 = Reshape (v0, of_k)  v2 = Transpose <perm = [0, 2, 1, 3]> (v1)
           rows = Shape <end = 1> (k5)  groups = Shape <start = 1, end = 2> (k5)  rest = Shape <start = 2> (k5)
           e = Concat <axis = 0> (rows, groups, two, rest)  es = Shape (e)
           ones = ConstantOfShape <value = int64[1] {1}> (es)  less = Mul (ones, minus)
           open = Equal (e, less)  to = Where (open, ones, e)
           k6 = Unsqueeze (k5, two)  k7 = Expand (k6, to)  v3 = Unsqueeze (v2, two)  v4 = Expand (v3, to)
           all = Mul (groups, two)  s = Concat <axis = 0> (rows, all, rest)  k8 = Reshape (k7, s)  v = Reshape (v4, s)
           k9 = Reshape (k8, merged)  k10 = Transpose <perm = [0, 2, 1]> (k9)  k = Reshape (k10, apart)
           z = MatMul (q, k)  p = Softmax (z)  h = MatMul (p, v)
           t = Transpose <perm = [0, 2, 1, 3]> (h)  f = Reshape (t, o)  y = MatMul (f, wo)""",
        {"wq": (8, 8), "wk": (8, 4), "wv": (8, 4), "wo": (8, 8), "of_q": [0, 7, 4, 2], "of_k": [0, 7, 2, 2],
         "angles": (7, 2), "two": [2], "minus": [-1], "o": [0, 7, 8], "merged": [-1, 7, 2], "apart": [-1, 4, 2, 7]},
        1,
    ),
    "means over maps": (
        "(float[N, 3, 6, 6] x) => (float[N, 4] y)",
        "a = Conv (x, w1)  m = ReduceMean <keepdims = 0> (a, two)  y = MatMul (m, w2)",
        {"w1": (6, 3, 1, 1), "two": [2, 3], "w2": (6, 4)},
        1,
    ),
    "a state that is repeated": (
        "(float[5, N, 4] x) => (float[5, N, 3] y)",
        """rows = Shape <start = 1, end = 2> (x)  s = Concat <axis = 0> (one, rows, six)  h0 = Expand (start, s)
           q, h = GRU <hidden_size = 6> (x, w, r, b, , h0)  a = Squeeze (q, one)  y = MatMul (a, w2)""",
        {"w": (1, 18, 4), "r": (1, 18, 6), "b": (1, 36), "w2": (6, 3), "one": [1], "six": [6], "start": ()},
        1,
    ),
    "means of squares": (
        "(float[N, 4] x) => (float[N, 3] y)",
        """a = MatMul (x, w1)  e = Add (a, b1)  s = Mul (e, e)  m = ReduceMean <keepdims = 1> (s, minus)
           q = Sqrt (m)  n = Div (e, q)  g = Mul (n, g1)  b = MatMul (g, w2)  c = Add (e, b)
           p = Pow (c, square)  i = ReduceMean (p, minus)  j = Sqrt (i)  k = Div (c, j)  y = MatMul (k, w3)""",
        {"w1": (4, 6), "b1": 6, "g1": 6, "w2": (6, 6), "w3": (6, 3), "minus": [-1], "square": [2]},
        1,
    ),
    "normalizations by the mean of squares": (
        "(int64[N, 5] x) => (float[N, 5, 3] y)",
        """e = Gather (table, x)  n = RMSNormalization <epsilon = 0.5> (e, g1)  a = MatMul (n, w1)  s = Add (e, a)
           m = RMSNormalization <epsilon = 0.5> (s, g1)  y = MatMul (m, w2)""",
        {"table": (2, 6), "g1": 6, "w1": (6, 6), "w2": (6, 3)},
        1,
    ),
}  # fmt: skip


def build(header: str, nodes: str, shapes: dict) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    opset = 23 if "RMSNormalization" in nodes else 21
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {header} {{ {nodes} }}')
    for name, shape in shapes.items():
        if isinstance(shape, list) or name in ("i0", "i1", "i2"):
            array = np.array(shape, np.int64)
        else:
            array = rng.standard_normal(shape).astype(np.float32) / 2
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.abs(array) if name == "v" else array, name))
    onnx.checker.check_model(model, full_check=True)
    return model


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {v.name: [d if isinstance(d, int) else 4 for d in v.shape] for v in model.graph.inputs}
    whole = {v.name for v in model.graph.inputs if v.dtype == ir.DataType.INT64}
    return {
        name: rng.integers(0, 2, shape) if name in whole else rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_smaller_graph_equals_the_masked_one(name, share):
    header, nodes, shapes, count = GRAPHS[name]
    model = opened_for_pruning(build(header, nodes, shapes))
    channels = find_channels(model.graph, follow)
    assert len(channels.widths) == count
    rng, feeds = np.random.default_rng(2), feeds_of(model)
    removed = [i for w in channels.widths for i in rng.permutation(w.channels)[: max(1, int(share * len(w.channels)))]]
    masked = model.clone()
    for weight, mask in weight_masks(channels, removed).items():
        value = masked.graph.initializers[weight]
        value.const_value = ir.tensor(np.where(mask, value.const_value.numpy(), np.float32(0)), name=weight)
    expected, full = nets.run(masked, feeds), nets.run(model, feeds)
    before = sum(v.const_value.size for v in model.graph.initializers.values())
    shrink(model, channels, removed)
    assert sum(v.const_value.size for v in model.graph.initializers.values()) < before
    proto = ir.to_proto(model)
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(proto, strict_mode=True), full_check=True)
    found = nets.run(proto, feeds)
    for key, y in expected.items():
        np.testing.assert_allclose(found[key], y, rtol=1e-5, atol=1e-5)
        assert np.abs(full[key] - y).max() > 1e-3


def test_no_part_of_a_split_loses_all_channels():
    model = build(
        "(float[N, 3, 6, 6] x) => (float[N, 4, 6, 6] y)",
        """a = Conv (x, w1)  l, m, r = Split <axis = 1> (a, parts)  b = Conv (l, w2)  c = Conv (m, w3)
           j = Concat <axis = 1> (b, c, r)  y = Conv (j, w4)""",
        {"w1": (9, 3, 1, 1), "w2": (3, 2, 1, 1), "w3": (3, 3, 1, 1), "w4": (4, 10, 1, 1), "parts": [2, 3, 4]},
    )
    weights = {t.name: t for t in model.graph.initializer}
    first = onnx.numpy_helper.to_array(weights["w1"]) * np.array([[0.1] * 5 + [1] * 4], np.float32).T.reshape(
        9, 1, 1, 1
    )
    weights["w1"].CopyFrom(onnx.numpy_helper.from_array(first, "w1"))
    rows = {"x": np.random.default_rng(0).standard_normal((8, 3, 6, 6)).astype(np.float32)}
    for settings in ({"channels": 0.7}, {"flops": 0.5}):
        small = onnxgrad.prune(model, rows, **settings)
        shapes = {t.name: tuple(t.dims) for t in small.graph.initializer}
        assert min(shapes["w2"][1], shapes["w3"][1]) >= 1
        assert shapes["w1"][0] < 6


LEFT_ALONE = {
    "a normalization over channels": (
        "(float[N, 4] x) => (float[N, 3] y)",
        "a = MatMul (x, w1)  n = LayerNormalization (a, g)  y = MatMul (n, w2)",
        {"w1": (4, 6), "g": 6, "w2": (6, 3)},
        ("w1", "whose mean is of all of them"),
    ),
    "a softmax over channels": (
        "(float[N, 4] x) => (float[N, 3] y)",
        "a = MatMul (x, w1)  n = Softmax (a)  y = MatMul (n, w2)",
        {"w1": (4, 6), "w2": (6, 3)},
        ("w1", "Softmax"),
    ),
    "an output": (
        "(float[N, 4] x) => (float[N, 6] a, float[N, 3] y)",
        "a = MatMul (x, w1)  y = MatMul (a, w2)",
        {"w1": (4, 6), "w2": (6, 3)},
        ("w1", "'a' is an input or output of the model"),
    ),
    "a product of two computed values": (
        "(float[N, 5, 4] x) => (float[N, 5, 5] y)",
        "a = MatMul (x, w1)  t = Transpose <perm = [0, 2, 1]> (a)  y = MatMul (a, t)",
        {"w1": (4, 6)},
        ("w1", "a product of two values that are computed"),
    ),
    "a sum of computed values": (
        "(float[N, 4] x) => (float[N] y)",
        """a = Einsum <equation = "ni,ij->nj"> (x, w1)  y = Einsum <equation = "ni,ni->n"> (a, a)""",
        {"w1": (4, 6)},
        ("w1", "a sum over values that are computed"),
    ),
    "a size that is computed with": (
        "(float[N, 4] x) => (float[N, 3] y)",
        "a = MatMul (x, w1)  s = Size (a)  f = Cast <to = 1> (s)  d = Div (a, f)  y = MatMul (d, w2)",
        {"w1": (4, 6), "w2": (6, 3)},
        ("w1", "Size"),
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_channels_that_cannot_be_followed_are_named(name):
    header, nodes, shapes, (weight, reason) = LEFT_ALONE[name]
    model = opened_for_pruning(build(header, nodes, shapes))
    channels = find_channels(model.graph, follow)
    assert not channels.widths
    assert reason in channels.left_alone[weight]


def test_the_names_of_heads():
    header, nodes, shapes, _ = GRAPHS["heads"]
    channels = find_channels(opened_for_pruning(build(header, nodes, shapes)).graph, follow)
    (width,) = channels.widths
    assert width.kind == "heads"
    assert len(width.channels) == 4
    assert set(width.weights) == {"wq", "wk", "wv", "wo"}
