"""RNN, GRU and LSTM against PyTorch: stacked, in both directions, of variable lengths."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxgrad
from tests.control_flow.compare import close, run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

T, N, H = 5, 3, 4
#: where ONNX keeps each of PyTorch's gates
GATES = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2]}


def reordered(weight, op):
    """A weight with PyTorch's gates in ONNX's order."""
    parts = np.split(weight, len(GATES[op]))
    return np.concatenate([parts[i] for i in GATES[op]])


def exported(module, op, layers, both):
    """The ONNX model of a stack of recurrent layers."""
    ways = 2 if both else 1
    nodes, weights = [], []
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "N", H]),
        helper.make_tensor_value_info("lens", TensorProto.INT32, ["N"]),
    ]
    nodes.append(helper.make_node("Constant", [], ["shape"], value_ints=[0, 0, -1]))
    x = "x"
    for layer in range(layers):
        stacks = {"W": [], "R": [], "B": []}
        for way in ["", "_reverse"][:ways]:
            named = {k: getattr(module, f"{k}_l{layer}{way}") for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
            arrays = {k: reordered(v.detach().numpy(), op) for k, v in named.items()}
            stacks["W"].append(arrays["weight_ih"])
            stacks["R"].append(arrays["weight_hh"])
            stacks["B"].append(np.concatenate([arrays["bias_ih"], arrays["bias_hh"]]))
        for kind, parts in stacks.items():
            weights.append(numpy_helper.from_array(np.stack(parts), f"{kind}{layer}"))
        nodes.append(
            helper.make_node(
                op,
                [x, f"W{layer}", f"R{layer}", f"B{layer}", "lens"],
                [f"y{layer}", f"h{layer}"],
                hidden_size=H,
                direction="bidirectional" if both else "forward",
                **({"linear_before_reset": 1} if op == "GRU" else {}),
            )
        )
        nodes.append(helper.make_node("Transpose", [f"y{layer}"], [f"t{layer}"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"t{layer}", "shape"], [f"x{layer}"]))
        x = f"x{layer}"
    outputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["T", "N", ways * H])]
    graph = helper.make_graph(nodes, op, inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
@pytest.mark.parametrize("lengths", [[T, T, T], [T, 3, 1]], ids=["whole", "packed"])
def test_gradients_agree_with_pytorch(op, layers, both, lengths):
    torch.manual_seed(0)
    module = getattr(torch.nn, op)(H, H, num_layers=layers, bidirectional=both)
    x = torch.randn(T, N, H, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(module(packed)[0], total_length=T)
    g = torch.randn_like(y)
    y.backward(g)
    model = exported(module, op, layers, both)
    onnx.checker.check_model(model, full_check=True)
    out = model.graph.output[0].name
    names = ["x", *(f"{k}{layer}" for layer in range(layers) for k in "WRB")]
    feeds = {"x": x.detach().numpy(), "lens": np.array(lengths, np.int32), f"{out}_cotangent": g.numpy()}
    got = run(onnxgrad.vjp(model, wrt=names), feeds)
    close(got[out], y.detach().numpy(), 1e-5, "output")
    close(got["x_grad"], x.grad.numpy(), 1e-5, "x")
    for layer in range(layers):
        for d, way in enumerate(["", "_reverse"][: 1 + both]):
            grads = {
                k: reordered(getattr(module, f"{k}_l{layer}{way}").grad.numpy(), op)
                for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            }
            close(got[f"W{layer}_grad"][d], grads["weight_ih"], 1e-5, f"W {layer}{way}")
            close(got[f"R{layer}_grad"][d], grads["weight_hh"], 1e-5, f"R {layer}{way}")
            both_biases = np.concatenate([grads["bias_ih"], grads["bias_hh"]])
            close(got[f"B{layer}_grad"][d], both_biases, 1e-5, f"B {layer}{way}")
