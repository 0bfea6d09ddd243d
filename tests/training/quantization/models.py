"""A small convolutional classifier and rows for it, for the tests of quantization."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime


def proto(model) -> onnx.ModelProto:
    return ir.to_proto(model) if isinstance(model, ir.Model) else model


def scores(model, feeds, optimized=True) -> np.ndarray:
    """The results of plain ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model if isinstance(model, str) else proto(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options).run(None, feeds)[0]


def network(opset: int = 21, norm: bool = True) -> onnx.ModelProto:
    """float32[N, 2, 6, 6] x → Conv, BatchNormalization, Relu, Conv, mean, Gemm, MatMul → float32[N, 3] y, a Softmax."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {opset}]>
        network (float[N, 2, 6, 6] x) => (float[N, 3] y) {{
            c = Conv <pads = [1, 1, 1, 1]> (x, conv_weight, conv_bias)
            n = {"BatchNormalization (c, gamma, beta, mean, variance)" if norm else "Identity (c)"}
            r = Relu (n)
            d = Conv (r, conv2_weight)
            p = GlobalAveragePool (d)
            f = Flatten (p)
            g = Gemm <transB = 1> (f, fc_weight, fc_bias)
            z = MatMul (g, head)
            y = Softmax (z)
        }}""")
    shapes = {
        "conv_weight": (4, 2, 3, 3), "conv_bias": (4,), "conv2_weight": (6, 4, 3, 3), "fc_weight": (8, 6),
        "fc_bias": (8,), "head": (8, 3),
    }  # fmt: skip
    weights = {name: rng.standard_normal(shape) * 0.5 for name, shape in shapes.items()}
    if norm:
        weights |= {"gamma": 1 + rng.random(4), "beta": rng.standard_normal(4), "mean": rng.standard_normal(4)}
        weights["variance"] = 0.5 + rng.random(4)
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.checker.check_model(model, full_check=True)
    return model


def rows(count: int = 96, seed: int = 0) -> dict[str, np.ndarray]:
    """Noise around one of three pictures."""
    rng = np.random.default_rng(seed)
    pictures = np.random.default_rng(9).standard_normal((3, 2, 6, 6))
    labels = rng.integers(0, 3, count)
    x = pictures[labels] + 0.5 * rng.standard_normal((count, 2, 6, 6))
    return {"x": x.astype(np.float32), "labels": labels.astype(np.int64)}


def pair(kind: str = "int8", scale: float = 0.1, weight_scale=(0.05, 0.02), opset: int = 21) -> onnx.ModelProto:
    """x[N, 3] rounded times w[3, 2] rounded, both as QuantizeLinear and DequantizeLinear: y[N, 2]."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {opset}]>
        pair (float[N, 3] x) => (float[N, 2] y)
        <float x_scale = {{{scale}}}, float[2] w_scale = {{{weight_scale[0]}, {weight_scale[1]}}}> {{
            z = Constant <value = uint8 {{128}}> ()
            xq = QuantizeLinear (x, x_scale, z)
            xd = DequantizeLinear (xq, x_scale, z)
            wq = QuantizeLinear <axis = 1> (w, w_scale, wz)
            wd = DequantizeLinear <axis = 1> (wq, w_scale, wz)
            y = MatMul (xd, wd)
        }}""")
    rng = np.random.default_rng(3)
    w = rng.standard_normal((3, 2)).astype(np.float32)
    types = {"int8": onnx.TensorProto.INT8, "int4": onnx.TensorProto.INT4}
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    model.graph.initializer.append(onnx.helper.make_tensor("wz", types[kind], [2], [0, 0]))
    return model
