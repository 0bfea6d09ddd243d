"""Fusions of ONNX Runtime that a session leaves out are those that would find nothing."""

import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad.runtime.idle_fusions import idle_fusions

LEVELS = onnxruntime.GraphOptimizationLevel
#: Bodies over x [4, 6, 8], with the operator that they become.
FUSED = {
    "Gelu": "d = Div (x, root) e = Erf (d) a = Add (e, one) m = Mul (x, a) y = Mul (m, half)",
    "BiasGelu": """s = Add (x, b) d = Div (s, root) e = Erf (d) a = Add (e, one) m = Mul (s, a) y = Mul (m, half)""",
    "QuickGelu": "m = Mul (x, half) s = Sigmoid (m) y = Mul (x, s)",
    "LayerNormalization": """u = ReduceMean <keepdims = 1> (x, last) d = Sub (x, u) p = Pow (d, two)
        v = ReduceMean <keepdims = 1> (p, last) e = Add (v, tiny) s = Sqrt (e) n = Div (d, s) m = Mul (n, w)
        y = Add (m, b)""",
    "SimplifiedLayerNormalization": """p = Pow (x, two) v = ReduceMean <keepdims = 1> (p, last) e = Add (v, tiny)
        s = Sqrt (e) n = Div (x, s) y = Mul (n, w)""",
    "SkipLayerNormalization": "s = Add (x, x2) y = LayerNormalization <axis = -1> (s, w, b)",
    "Gemm": "f = Flatten <axis = 2> (x) m = MatMul (f, square) y = Add (m, b)",
    "FusedMatMul": "t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (t, x)",
    "FusedGemm": "f = Flatten <axis = 2> (x) g = Gemm (f, square, b) y = Relu (g)",
    "FusedGemm of a product": "f = Flatten <axis = 2> (x) m = MatMul (f, square) g = Add (m, b) y = Sigmoid (g)",
    "FusedConv": "c = Conv (x, kernel) y = Relu (c)",
    "Split": """a = Slice (x, from, half_way, first) c = Slice (x, half_way, end, first) y = Sub (a, c)""",
    "Slice": "r = Range (zero, count, step) y = Gather <axis = 1> (x, r)",
    "FusedMatMul of a scaled operand": "m = Mul (x, half) y = MatMul (m, square)",
    "DynamicQuantizeMatMul": """q, s, z = DynamicQuantizeLinear (x) m = MatMulInteger (q, eight, z)
        f = Cast <to = 1> (m) k = Mul (s, half) y = Mul (f, k)""",
}
CONSTANTS = """<float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, float root = {1.41421356},
    float one = {1}, float half = {0.5}, float two = {2}, float tiny = {0.00001}, int64[1] last = {-1},
    int64 zero = {0}, int64 step = {1}, int64[1] from = {0}, int64[1] half_way = {2},
    int64[1] end = {4}, int64[1] first = {0}>"""


def model(body):
    text = f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[4, 6, 8] x, float[4, 6, 8] x2, float[8, 8] square, float[6, 6, 3] kernel, int8[8, 8] eight,
           int64 count) => (y)
        {CONSTANTS} {{ {body} }}"""
    return onnx.parser.parse_model(text)


def optimized(given, path, left_out, level):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = level
    options.log_severity_level = 4
    onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"], disabled_optimizers=left_out)
    return onnx.load(path).graph


@pytest.mark.parametrize("made", FUSED)
def test_what_has_work_stays(made, tmp_path):
    given = model(FUSED[made])
    whole = optimized(given.SerializeToString(), tmp_path / "a.onnx", [], LEVELS.ORT_ENABLE_EXTENDED)
    assert made.split()[0] in {n.op_type for n in whole.node}
    left_out = idle_fusions(ir.from_proto(given))
    less = optimized(given.SerializeToString(), tmp_path / "b.onnx", left_out, LEVELS.ORT_ENABLE_EXTENDED)
    assert less.SerializeToString() == whole.SerializeToString()
    assert len(left_out) > 10


def test_fusions_of_rounded_weights_stay():
    read = "q = Cast <to = 3> (eight) s = DequantizeLinear (q, half) y = MatMul (x, s)"
    assert "QDQSelectorActionTransformer" not in idle_fusions(ir.from_proto(model(read)))
    assert "QDQSelectorActionTransformer" in idle_fusions(ir.from_proto(model("y = MatMul (x, square)")))
