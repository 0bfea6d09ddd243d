"""Files that ONNX Runtime's own optimizers write have the gradients of the model that they were made of."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnxgrad import grad
from onnxgrad.training import Trainer
from tests.rules.dtypes import session

WORDS, WIDTH, HEADS, INNER, LENGTH = 11, 8, 2, 16, 5


def bert() -> onnx.ModelProto:
    """One layer of an encoder as exporters write it: in the operators of opset 17."""
    rng = np.random.default_rng(0)
    held: dict[str, np.ndarray] = {
        "by_head": np.array([0, 0, HEADS, WIDTH // HEADS]),
        "flat": np.array([0, 0, WIDTH]),
        "root": np.float32(np.sqrt(WIDTH // HEADS)),
        "half": np.float32(0.5),
        "one": np.float32(1),
        "two": np.float32(np.sqrt(2)),
        "low": np.float32(-10000),
        "axis1": np.array([1]),
        "axis2": np.array([2]),
    }
    nodes: list[onnx.NodeProto] = []

    def weight(name: str, *shape: int) -> str:
        held[name] = (0.3 * rng.standard_normal(shape)).astype(np.float32)
        return name

    def emit(op: str, *inputs: str, **attrs) -> str:
        nodes.append(helper.make_node(op, inputs, [f"v{len(nodes)}"], f"n{len(nodes)}", **attrs))
        return nodes[-1].output[0]

    def normed(x: str, name: str) -> str:
        scale, bias = weight(f"{name}_scale", WIDTH), weight(f"{name}_bias", WIDTH)
        return emit("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)

    def linear(x: str, name: str, columns: int, rows: int = WIDTH) -> str:
        return emit("Add", emit("MatMul", x, weight(f"{name}_weight", rows, columns)), weight(f"{name}_bias", columns))

    def head(x: str, name: str, perm: list[int]) -> str:
        return emit("Transpose", emit("Reshape", linear(x, name, WIDTH), "by_head"), perm=perm)

    x = emit("Add", emit("Gather", weight("words", WORDS, WIDTH), "ids"), weight("places", 1, LENGTH, WIDTH))
    x = normed(x, "embedded")
    mask = emit("Cast", emit("Unsqueeze", emit("Unsqueeze", "mask", "axis1"), "axis2"), to=1)
    mask = emit("Mul", emit("Sub", "one", mask), "low")
    q, k, v = (head(x, n, p) for n, p in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])))
    p = emit("Softmax", emit("Add", emit("Div", emit("MatMul", q, k), "root"), mask), axis=-1)
    y = emit("Reshape", emit("Transpose", emit("MatMul", p, v), perm=[0, 2, 1, 3]), "flat")
    x = normed(emit("Add", linear(y, "out", WIDTH), x), "attended")
    h = linear(x, "up", INNER)
    h = emit("Mul", emit("Mul", h, emit("Add", emit("Erf", emit("Div", h, "two")), "one")), "half")
    x = normed(emit("Add", linear(h, "down", WIDTH, INNER), x), "thought")
    nodes[-1].output[0] = "hidden"
    infos = [helper.make_tensor_value_info(n, 7, ["batch", LENGTH]) for n in ("ids", "mask")]
    out = helper.make_tensor_value_info("hidden", 1, ["batch", LENGTH, WIDTH])
    constants = [numpy_helper.from_array(np.asarray(v), n) for n, v in held.items()]
    graph = helper.make_graph(nodes, "bert", infos, [out], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def by_session(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


def by_tool(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer", reason="needs ONNX Runtime's transformers")
    onnx.save(model, folder / "model.onnx")
    path = str(folder / "model.onnx")
    return optimizer.optimize_model(path, "bert", num_heads=HEADS, hidden_size=WIDTH, opt_level=0).model


FUSED = {
    by_session: {"SkipLayerNormalization", "BiasGelu", "FusedMatMul"},
    by_tool: {"SkipLayerNormalization", "BiasGelu", "Attention"},
}
FEEDS = {
    "ids": np.random.default_rng(1).integers(0, WORDS, (2, LENGTH)),
    "mask": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
}


@pytest.mark.parametrize("optimize", FUSED)
def test_gradients_are_those_of_the_model_before(optimize, tmp_path: Path) -> None:
    model = bert()
    fused = optimize(model, tmp_path)
    assert FUSED[optimize] <= {n.op_type for n in fused.graph.node if n.domain == "com.microsoft"}
    weights = [t.name for t in model.graph.initializer if t.data_type == 1 and t.dims]
    left = {t.name: list(t.dims) for t in fused.graph.initializer if t.data_type == 1 and t.dims}
    wanted = _gradients(model, weights)
    found = _gradients(fused, list(left))
    joined = {}
    for name in set(left) - set(weights):  # the tool lays the weights of queries, keys and values side by side
        part = "weight" if len(left[name]) == 2 else "bias"
        joined[name] = np.concatenate([wanted.pop(f"{n}_{part}") for n in "qkv"], axis=-1)
    assert set(wanted) | set(joined) == set(found)
    for name, got in found.items():
        want = {**wanted, **joined}[name]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * max(1, np.abs(want).max()), err_msg=name)


def _gradients(model: onnx.ModelProto, names: list[str]) -> dict[str, np.ndarray]:
    """Of what is hidden times fixed numbers, so that every weight has one."""
    probed_model = onnx.ModelProto()
    probed_model.CopyFrom(model)
    probed_model.graph.node.append(helper.make_node("Mul", ["hidden", "probe"], ["probed"]))
    probe = np.random.default_rng(2).standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
    probed_model.graph.initializer.append(numpy_helper.from_array(probe, "probe"))
    probed_model.graph.output.append(helper.make_tensor_value_info("probed", 1, None))
    return dict(zip(names, session(grad(probed_model, wrt=names, of="probed")).run(None, FEEDS)))


def test_a_fused_model_trains(tmp_path: Path) -> None:
    fused = by_session(bert(), tmp_path)
    data = {**FEEDS, "target": np.zeros((2, LENGTH, WIDTH), np.float32)}
    trainer = Trainer(fused, loss="mse", optimizer="adam", learning_rate=0.05)
    losses = [epoch["loss"] for epoch in trainer.fit(data, epochs=10, batch_size=2).epochs]
    assert losses[-1] < 0.5 * losses[0]
