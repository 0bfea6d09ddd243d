"""Small models and a plain training loop on ONNX Runtime, for the tests of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.training.step.step import Step

Arrays = dict[str, np.ndarray]


def model_of(
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Mapping[str, Sequence[int | str] | None],
    opset: int = 21,
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A checked model; inputs and outputs are float tensors of the given shapes."""
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info(n, dtype, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, dtype, s) for n, s in outputs.items()],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def mlp(last: Sequence[onnx.NodeProto] = (), seed: int = 0, dtype: type = np.float32) -> onnx.ModelProto:
    """x[N, 4] → tanh(x·w1 + b1)·w2 + b2 = y[N, 3], then `last`, which reads y and gives z."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.standard_normal((4, 8)) * 0.5,
        "b1": rng.standard_normal(8) * 0.1,
        "w2": rng.standard_normal((8, 3)) * 0.5,
        "b2": rng.standard_normal(3) * 0.1,
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h1"], name="mul1"),
        helper.make_node("Add", ["h1", "b1"], ["h2"], name="add1"),
        helper.make_node("Tanh", ["h2"], ["h3"], name="tanh"),
        helper.make_node("MatMul", ["h3", "w2"], ["h4"], name="mul2"),
        helper.make_node("Add", ["h4", "b2"], ["y"], name="add2"),
        *last,
    ]
    held = {n: a.astype(dtype) for n, a in weights.items()}
    out = "z" if last else "y"
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model_of(nodes, held, {"x": ["N", 4]}, {out: ["N", 3]}, dtype=element)


def session(model: onnx.ModelProto | ir.Model, threads: int = 1) -> onnxruntime.InferenceSession:
    """A session for `model`."""
    onnxruntime.set_default_logger_severity(3)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto | ir.Model, feeds: Arrays) -> Arrays:
    """The outputs of `model` by name."""
    made = session(model)
    return dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds)))


def initial(step: Step) -> Arrays:
    """The state that a step starts from."""
    return {name: tensor.initial.numpy().copy() for name, tensor in step.state.items()}


def train(
    step: Step, batches: Iterable[Arrays], threads: int = 1, rate: float | None = None
) -> tuple[Arrays, list[Arrays]]:
    """Take one step per batch, feeding the state by hand; the last state, and the results of every step."""
    made = session(step.model, threads)
    names = [o.name for o in made.get_outputs()]
    state = initial(step)
    rates = {n: t.numpy() if rate is None else np.array(rate, t.numpy().dtype) for n, t in step.rates.items()}
    rates |= {n: t.numpy() for n, t in step.reads.items()}
    history = []
    for batch in batches:
        feeds = {n: batch[n] for n in step.batch} | {t.input: state[n] for n, t in step.state.items()} | rates
        found = dict(zip(names, made.run(None, feeds)))
        state = {n: found[t.output] for n, t in step.state.items()}
        history.append({n: found[n] for n in step.results})
    return state, history
