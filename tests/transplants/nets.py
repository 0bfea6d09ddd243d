"""One small decoder in several exports: other names, orders of axes, fused or shared weights, with a cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.training.nets import Arrays

VOCABULARY, WIDTH, LAYERS = 37, 16, 2


def weights(seed: int = 0, fresh: bool = False) -> Arrays:
    """Parameters by the names of modules, matrices as [outputs, inputs]; norms and biases are all alike if `fresh`."""
    rng = np.random.default_rng(seed)
    found = {"embed.weight": rng.standard_normal((VOCABULARY, WIDTH))}
    for i in range(LAYERS):
        for name, (out, into) in {
            **dict.fromkeys(("q", "k", "v", "o"), (WIDTH, WIDTH)),
            "up": (2 * WIDTH, WIDTH),
            "down": (WIDTH, 2 * WIDTH),
        }.items():
            found[f"layers.{i}.{name}.weight"] = rng.standard_normal((out, into)) / np.sqrt(into)
            found[f"layers.{i}.{name}.bias"] = 0 * rng.standard_normal(out) if fresh else 0.3 * rng.standard_normal(out)
        found[f"layers.{i}.norm.weight"] = np.ones(WIDTH) + (0 if fresh else 0.3) * rng.standard_normal(WIDTH)
    return {n: a.astype(np.float32) for n, a in found.items()}


def trained(parameters: Mapping[str, np.ndarray], only: str = "", seed: int = 1, size: float = 0.2) -> Arrays:
    """The parameters after training, of those whose names contain `only`."""
    rng = np.random.default_rng(seed)
    moved = {n: size * rng.standard_normal(a.shape).astype(np.float32) for n, a in parameters.items()}
    return {n: a + moved[n] if only in n else a for n, a in parameters.items()}


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.held: dict[str, np.ndarray] = {}

    def node(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def hold(self, name: str, array: np.ndarray) -> str:
        self.held[name] = np.ascontiguousarray(array)
        return name


def decoder(
    parameters: Mapping[str, np.ndarray],
    *,
    named: bool = True,
    fused: bool = False,
    gemm: bool = False,
    cache: bool = False,
    tied: bool = True,
    step: bool = False,
    dtype: type = np.float32,
    opset: int = 21,
) -> onnx.ModelProto:
    """ids [B, S] → logits [B, S, V].

    Args:
        parameters: of `weights`.
        named: initializers have the names of modules, else made-up ones.
        fused: queries, keys and values are one product.
        gemm: matrices are stored as [outputs, inputs] and transposed by nodes.
        cache: the keys and values of earlier tokens are inputs and outputs.
        tied: the output layer reads the embedding.
        step: there is one token at a time.
        dtype: of the weights.
        opset: of the model.
    """
    w = _Writer()

    def hold(name: str, array: np.ndarray) -> str:
        own = name if named else f"onnx::Held_{101 + len(w.held)}"
        return w.hold(own, array.astype(dtype))

    def linear(x: str, name: str, kernel: np.ndarray, bias: np.ndarray) -> str:
        if gemm:
            y = w.node("MatMul", x, w.node("Transpose", hold(f"{name}.weight", kernel), perm=[1, 0]))
        else:
            y = w.node("MatMul", x, hold(f"{name}.weight" if named and fused else f"onnx::MatMul_{name}", kernel.T))
        return w.node("Add", y, hold(f"{name}.bias", bias))

    def layer(x: str, name: str) -> str:
        return linear(x, name, parameters[f"{name}.weight"], parameters[f"{name}.bias"])

    embedding = hold("embed.weight", parameters["embed.weight"])
    x = w.node("Gather", embedding, "input_ids")
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", 1 if step else "sequence"])]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    outputs = [helper.make_tensor_value_info("logits", kind, ["batch", 1 if step else "sequence", VOCABULARY])]
    scale = w.hold("scale", np.array(WIDTH**-0.5, dtype))
    epsilon = w.hold("epsilon", np.array(1e-3, dtype))
    axes = w.hold("axes", np.array([-1]))
    least = w.hold("least", np.array(-1e4, dtype))
    for i in range(LAYERS):
        at = f"layers.{i}"
        size = w.node("ReduceMean", w.node("Mul", x, x), axes, keepdims=1)
        h = w.node("Div", x, w.node("Sqrt", w.node("Add", size, epsilon)))
        h = w.node("Mul", h, hold(f"{at}.norm.weight", parameters[f"{at}.norm.weight"]))
        if fused:
            names = [f"{at}.{n}" for n in "qkv"]
            kernel, bias = (np.concatenate([parameters[f"{n}.{end}"] for n in names]) for end in ("weight", "bias"))
            joined = linear(h, f"{at}.qkv", kernel, bias)
            q, k, v = (f"{at}.{n}" for n in "qkv")
            w.nodes.append(helper.make_node("Split", [joined], [q, k, v], axis=-1, num_outputs=3))
        else:
            q, k, v = (layer(h, f"{at}.{n}") for n in "qkv")
        if cache:
            for n, value in (("key", k), ("value", v)):
                past, present = f"past_key_values.{i}.{n}", f"present.{i}.{n}"
                inputs.append(helper.make_tensor_value_info(past, kind, ["batch", "past_sequence", WIDTH]))
                outputs.append(helper.make_tensor_value_info(present, kind, ["batch", "total", WIDTH]))
                w.nodes.append(helper.make_node("Concat", [past, value], [present], axis=1))
            k, v = f"present.{i}.key", f"present.{i}.value"
        scores = w.node("Mul", w.node("MatMul", q, w.node("Transpose", k, perm=[0, 2, 1])), scale)
        shape = w.node("Shape", scores)
        sizes = [w.node("Squeeze", w.node("Shape", scores, start=i, end=i + 1)) for i in (1, 2)]
        one = numpy_helper.from_array(np.array([1], np.int64))
        ones = w.node("ConstantOfShape", shape, value=one)
        seen = w.node("Trilu", ones, w.node("Sub", sizes[1], sizes[0]), upper=0)
        scores = w.node("Where", w.node("Cast", seen, to=TensorProto.BOOL), scores, least)
        x = w.node("Add", x, layer(w.node("MatMul", w.node("Softmax", scores, axis=-1), v), f"{at}.o"))
        x = w.node("Add", x, layer(w.node("Tanh", layer(x, f"{at}.up")), f"{at}.down"))
    if tied:
        head = w.node("Transpose", embedding, perm=[1, 0])
    else:
        head = hold("onnx::MatMul_head", parameters.get("head.weight", parameters["embed.weight"]).T)
    w.nodes.append(helper.make_node("MatMul", [x, head], ["logits"], name="head"))
    held = [numpy_helper.from_array(a, n) for n, a in w.held.items()]
    graph = helper.make_graph(w.nodes, "decoder", inputs, outputs, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model
