"""A model in which every kind of weight can be adapted, and data for it."""

import numpy as np
import onnx

ROWS = 24

_TEXT = """
<ir_version: 10, opset_import: ["": 21, "own": 1]>
every_kind (int64[N, 4] ids, float[N, 3, 6, 6] image, float[N] flag) => (float[N, 5] scores) {
    words = Gather (table, ids)
    q = MatMul (words, wq)
    k = MatMul (words, wk)
    turned = Transpose <perm = [0, 2, 1]> (k)
    alike = MatMul (q, turned)
    shares = Softmax (alike)
    v = MatMul (words, wv)
    mixed = MatMul (shares, v)
    attended = MatMul (mixed, wo)
    axes = Constant <value = int64[1] {1}> ()
    mean = ReduceMean <keepdims = 0> (attended, axes)
    dense = Gemm <transB = 1, alpha = 0.5> (mean, fc, fc_bias)
    dense_turned = Transpose (dense)
    left = MatMul (before, dense_turned)
    c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (image, spatial)
    d = Conv <group = 2> (c, grouped)
    pooled = GlobalAveragePool (d)
    flat = Flatten (pooled)
    left_turned = Transpose (left)
    both = Add (left_turned, flat)
    again = own.Layer (both, inner)
    largest = ReduceMax <keepdims = 0> (flag)
    on = Cast <to = 9> (largest)
    chosen = If (on) <
        then_branch = yes () => (float[N, 6] one) { one = MatMul (again, branch) },
        else_branch = no () => (float[N, 6] other) { other = Identity (again) }
    >
    trips = Constant <value = int64 {2}> ()
    true = Constant <value = bool {1}> ()
    looped = Loop (trips, true, chosen) <body = b (int64 i, bool go, float[N, 6] h) => (bool on_, float[N, 6] next) {
        on_ = Identity (go)
        m = MatMul (h, body)
        next = Tanh (m)
    }>
    scores = MatMul (looped, head)
}
<domain: "own", opset_import: ["": 21]>
Layer (x, w) => (y) {
    p = MatMul (x, w)
    y = Tanh (p)
}
"""

SHAPES = {
    "table": (11, 8),
    **dict.fromkeys(("wq", "wk", "wv", "wo"), (8, 8)),
    "fc": (6, 8),
    "fc_bias": (6,),
    "before": (6, 6),
    "spatial": (4, 3, 3, 3),
    "grouped": (6, 2, 1, 1),
    **dict.fromkeys(("inner", "branch", "body"), (6, 6)),
    "head": (6, 5),
}
ADAPTED = [name for name in SHAPES if name != "fc_bias"]


def every_kind(seed: int = 0) -> onnx.ModelProto:
    """int64[N, 4] ids, float32[N, 3, 6, 6] image, float32[N] flag → float32[N, 5] scores."""
    return with_weights(_TEXT, SHAPES, seed)


def with_weights(text: str, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> onnx.ModelProto:
    """The model of `text` with random initializers of `shapes`."""
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model(text)
    for name, shape in shapes.items():
        array = (0.4 * rng.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.checker.check_model(model)
    return model


def rows(seed: int = 1) -> dict[str, np.ndarray]:
    """Inputs of `every_kind`, and labels."""
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, 11, (ROWS, 4)),
        "image": rng.standard_normal((ROWS, 3, 6, 6)).astype(np.float32),
        "flag": np.ones(ROWS, np.float32),
        "labels": rng.integers(0, 5, ROWS),
    }
