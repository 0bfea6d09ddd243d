"""Weights get initializers of their own: constants, and tensors that an exporter has stored once."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgrad.training import Loss, with_head
from onnxgrad.training.build.attach import attach
from onnxgrad.training.step.compile import compile_step
from tests.training.nets import model_of, run, train

node = helper.make_node


def two_layers(weight, through_identity=True):
    """y = (x + a) · 2 + b, where b is a copy of a."""
    nodes = [
        *([node("Identity", ["a"], ["b"])] if through_identity else []),
        node("Add", ["x", "a"], ["h"]),
        node("Add", ["h", "h"], ["h2"]),
        node("Add", ["h2", "b" if through_identity else "a"], ["y"]),
    ]
    return model_of(nodes, {"a": np.float32(weight)}, {"x": ["N", 2]}, {"y": ["N", 2]})


@pytest.mark.parametrize(
    ("weight", "through_identity", "trained"),
    [([0, 0], True, {"a", "b"}), ([0, 1], True, {"a"}), ([0, 0], False, {"a"})],
)
def test_equal_by_chance_or_tied(weight, through_identity, trained):
    """Fresh tensors that an Identity hands out are untied; others, and those read twice, stay tied."""
    model = two_layers(weight, through_identity)
    attached = attach(model, loss=Loss("mse", reduction="sum"), optimizer="sgd")
    x = np.float32([[1, 2]])
    np.testing.assert_array_equal(run(attached, {"x": x})["y"], run(model, {"x": x})["y"])
    step = compile_step(attached)
    assert set(step.state) == trained
    labels = run(model, {"x": x})["y"] - 1
    state, _ = train(step, [{"x": x, "labels": labels}], rate=0.1)
    a = np.float32(weight)
    expected = {"a": a - 0.1 * 4, "b": a - 0.1 * 2} if "b" in trained else {"a": a - 0.1 * 6}
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-5)


@pytest.mark.parametrize("through_identity", [True, False])
def test_running_statistics_are_no_parameters(through_identity):
    """Zeros and ones stored once: bias and running mean, scale and running variance go separate ways."""
    mean, var = ("m", "v") if through_identity else ("zero", "one")
    nodes = [
        *([node("Identity", ["zero"], ["m"]), node("Identity", ["one"], ["v"])] if through_identity else []),
        node("BatchNormalization", ["x", "one", "zero", mean, var], ["y"], momentum=0.0),
    ]
    weights = {"zero": np.zeros(2, np.float32), "one": np.ones(2, np.float32)}
    model = model_of(nodes, weights, {"x": ["N", 2]}, {"y": ["N", 2]})
    attached = attach(model, loss="mse", optimizer="sgd")
    onnx.checker.check_model(attached, full_check=True)
    step = compile_step(attached)
    kinds = {n: t.kind for n, t in step.state.items()}
    statistics = [n for n, k in kinds.items() if k == "statistic"]
    assert {n for n, k in kinds.items() if k == "parameter"} == {"zero", "one"}
    assert len(statistics) == 2
    if through_identity:
        assert set(statistics) == {"m", "v"}
    x = np.float32([[1, 5], [3, 9]])
    state, _ = train(step, [{"x": x, "labels": x}], rate=0.1)
    np.testing.assert_allclose([state[n] for n in statistics], [x.mean(0), x.var(0)], rtol=1e-5)
    # the gradient of the bias is mean(2(y - t))/2 = -mean(x)
    np.testing.assert_allclose(state["zero"], 0.1 * x.mean(0), rtol=1e-5)
    z = np.float32([[0, 0]])
    y = run(step.inference_model(state), {"x": z})["y"]
    expected = (z - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * state["one"] + state["zero"]
    np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_constants_are_lifted_where_they_are_weights():
    def constant(name, value):
        return node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))

    nodes = [
        constant("w", np.float32([1, 2])),
        constant("one", np.float32([3])),
        constant("shape", np.int64([-1, 2])),
        constant("s", np.float32([1])),
        constant("b", np.float32([0])),
        constant("m", np.float32([0])),
        constant("v", np.float32([1])),
        node("Mul", ["x", "w"], ["h"]),
        node("Mul", ["h", "one"], ["h1"]),
        node("Reshape", ["h1", "shape"], ["h2"]),
        node("Unsqueeze", ["h2", "axis"], ["h3"]),
        node("BatchNormalization", ["h3", "s", "b", "m", "v"], ["y"]),
    ]
    model = model_of(nodes, {"axis": np.int64([1])}, {"x": ["N", 2]}, {"y": ["N", 1, 2]})
    attached = attach(model, loss="mse", optimizer="sgd")
    assert {t.name for t in attached.graph.initializer} == {"axis", "w", "s", "b", "m", "v"}
    assert set(compile_step(attached).state) == {"s", "b", "m", "v"}  # w scales the input before the first weight


def test_constants_beside_weights_stay_constant():
    """An exporter that has initializers for weights means constants by Constants: a mean to subtract, say."""
    nodes = [
        node("Constant", [], ["mean"], value=numpy_helper.from_array(np.float32([1, 2]))),
        node("Sub", ["x", "mean"], ["h"]),
        node("MatMul", ["h", "w"], ["y"]),
    ]
    model = model_of(nodes, {"w": np.eye(2, dtype=np.float32)}, {"x": ["N", 2]}, {"y": ["N", 2]})
    assert set(compile_step(attach(model, loss="mse", optimizer="sgd")).state) == {"w"}
    named = attach(model, loss="mse", optimizer="sgd", trainable=["w", "mean"])
    assert set(compile_step(named).state) == {"w", "mean"}


_HALVES = """
    <ir_version: 10, opset_import: ["": 21]>
    halves (float[N, 2] x) => (float[N, 1] y) <float[2, 2] first = {1, 2, 3, 4}> {
        mean = Constant <value = float[2] {1, 2}> ()
        second = Constant <value = float[2, 1] {0.5, -0.25}> ()
        shift = Constant <value = float[1] {0.5}> ()
        centred = Sub (x, mean)
        h = MatMul (centred, first)
        z = MatMul (h, second)
        y = Add (z, shift)
    }"""


@pytest.mark.parametrize(("producer", "trained"), [("", {"first", "second", "shift"}), ("pytorch", {"first"})])
def test_layers_read_weights_of_constants_beside_initializers(producer, trained):
    """A model whose weights are stored in both ways trains them all; PyTorch's Constants are constants of its code."""
    model = onnx.parser.parse_model(_HALVES)
    model.producer_name = producer
    assert set(compile_step(attach(model, loss="mse", optimizer="sgd")).state) == trained


def test_new_head_leaves_weights_in_constants_trainable():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        constants (float[N, 2] x) => (float[N, 1] y) {
            first = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            layer_scale = Constant <value = float[2] {1, 2}> ()
            second = Constant <value = float[2, 1] {0.5, -0.25}> ()
            h = MatMul (x, first)
            s = Mul (h, layer_scale)
            y = MatMul (s, second)
        }""")
    state = compile_step(attach(with_head(model, 3), loss="cross_entropy", optimizer="sgd")).state
    assert set(state) == {"first", "layer_scale", "logits_weight", "logits_bias"}


@pytest.mark.torch
def test_fresh_model_exported_by_torch(tmp_path):
    """The exporter stores equal zeros and ones once; training is PyTorch's nevertheless."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
    )
    path = str(tmp_path / "net.onnx")
    with np.errstate(all="ignore"):
        import warnings

        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(),
            torch.zeros(2, 1, 6, 6),
            path,
            dynamo=False,
            input_names=["x"],
            output_names=["y"],
            opset_version=18,
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )
    assert any(n.op_type == "Identity" for n in onnx.load(path).graph.node), "the exporter no longer merges"
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((8, 16, 1, 6, 6)).astype(np.float32), rng.integers(0, 3, (8, 16))
    step = compile_step(attach(path, loss="cross_entropy", optimizer="momentum", learning_rate=0.05))
    state, history = train(step, [{"x": a, "labels": b} for a, b in zip(x, t)], threads=2)
    optimizer = torch.optim.SGD(net.train().parameters(), lr=0.05, momentum=0.9)
    for a, b, result in zip(x, t, history):
        loss = nn.functional.cross_entropy(net(torch.tensor(a)), torch.tensor(b))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(result["loss"], loss.item(), rtol=1e-4)
    expected = net.state_dict()
    assert set(expected) - {"1.num_batches_tracked"} == {
        n for n, s in step.state.items() if s.kind in ("parameter", "statistic")
    }
    count = 16 * 16  # PyTorch moves the running variance with n/(n - 1) of the batch's
    for name, tensor in expected.items():
        if name.endswith("running_var"):
            decay = 0.9 ** len(x)
            mine, theirs = state[name] - decay, (tensor.numpy() - decay) * (count - 1) / count
            np.testing.assert_allclose(mine, theirs, rtol=1e-3)
        elif name in state:
            np.testing.assert_allclose(state[name], tensor.detach(), rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("read", "trained"),
    [
        (("n_1_bias", "n_2_bias"), {"n.1.bias", "n.2.bias"}),
        (("n_1_bias", "n_1_bias"), {"n.1.bias"}),
        (("n_1_bias, %p_n_1_scale", "n_1_bias, %p_n_2_scale"), {"n.1.bias"}),  # one of two is shared
        (("n_1_bias", ""), {"n.1.bias"}),  # a call that reads none
    ],
)
@pytest.mark.parametrize("weight", [[0, 0], [0, 1]])
@pytest.mark.parametrize("named", [True, False])
def test_equal_parameters_are_apart(read, trained, weight, named):
    """PyTorch's newer exporter stores equal tensors once, and each node names the parameters that its call read."""
    name = "n.1.bias" if named else "val_0"  # folded tensors have no name of their own
    nodes = [node("Add", ["x", name], ["h"]), node("Add", ["h", "h"], ["h2"]), node("Add", ["h2", name], ["y"])]
    for add, parameter in zip((nodes[0], nodes[2]), read):
        operands = f"%x, %p_{parameter}" if parameter else "%x"
        call = f"%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = ({operands}))"
        add.metadata_props.add(key="pkg.torch.onnx.fx_node", value=call)
    model = model_of(nodes, {name: np.float32(weight)}, {"x": ["N", 2]}, {"y": ["N", 2]})
    targets = "".join(f"p_{p}: PARAMETER target='{p.replace('_', '.')}'\n" for p in ("n_1_bias", "n_2_bias"))
    model.graph.metadata_props.add(
        key="pkg.torch.export.ExportedProgram.graph_signature", value=f"\n# inputs\n{targets}x: USER_INPUT\n"
    )
    state = compile_step(attach(model, loss="mse", optimizer="sgd")).state
    assert len(state) == len(trained)
    assert not named or set(state) == trained


@pytest.mark.parametrize(("second", "own"), [("v", True), ("w", False)])
def test_a_bias_of_layers_with_different_weights(second, own):
    """tf2onnx stores equal tensors once: the bias of fresh LSTMs, which is 1 at the gate that forgets."""
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["h"], hidden_size=2),
        node("Squeeze", ["h", "one"], ["i"]),
        node("LSTM", ["i", second, "r", "b"], ["j"], hidden_size=2),
        node("Squeeze", ["j", "one"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((1, 8, 2)).astype(np.float32) for name in {"w", "r", second}}
    weights |= {"b": np.float32([[0] * 4 + [1] * 2 + [0] * 10]), "one": np.array([1])}
    model = model_of(nodes, weights, {"x": [3, "N", 2]}, {"y": [3, "N", 2]})
    attached = attach(model, loss="mse", optimizer="sgd")
    assert len([n for n in compile_step(attached).state if n.startswith("b")]) == 1 + own
    x = rng.standard_normal((3, 5, 2)).astype(np.float32)
    np.testing.assert_array_equal(run(attached, {"x": x})["y"], run(model, {"x": x})["y"])


def copied_layers(last, weight="onnx::MatMul_20", bias=(1, 2), producer="pytorch"):
    """Two layers as PyTorch's older exporter writes copies of one; `last` is the scope of the second one's product."""
    nodes = [
        node("Identity", ["onnx::MatMul_10"], [weight]),
        node("Identity", ["layers.0.bias"], ["layers.1.bias"]),
        node("MatMul", ["x", "onnx::MatMul_10"], ["h"], name="/layers.0/MatMul"),
        node("Add", ["h", "layers.0.bias"], ["i"], name="/layers.0/Add"),
        node("MatMul", ["i", weight], ["j"], name=f"{last}/MatMul"),
        node("Add", ["j", "layers.1.bias"], ["y"], name="/layers.1/Add"),
    ]
    weights = {"onnx::MatMul_10": np.float32([[1, 2], [3, 4]]), "layers.0.bias": np.float32(bias)}
    model = model_of(nodes, weights, {"x": ["N", 2]}, {"y": ["N", 2]})
    model.producer_name = producer
    return model


@pytest.mark.parametrize(
    ("model", "own"),
    [
        (copied_layers("/layers.1"), {"layers.1.bias", "onnx::MatMul_20"}),
        (copied_layers("/layers.0_1"), {"layers.1.bias"}),  # the same layer, once more
        (copied_layers("/layers.1", bias=(0, 0)), {"layers.1.bias"}),  # zeros do not show that layers were copied
        (copied_layers("/heads.1"), {"layers.1.bias"}),
        (copied_layers("/layers.1", producer="other"), set()),
    ],
    ids=["copied", "used twice", "chance", "another list", "another exporter"],
)
def test_copied_layers_of_the_older_exporter(model, own):
    """Names that differ in a number are two parameters; a folded matrix goes with the layers that read it."""
    state = compile_step(attach(model, loss="mse", optimizer="sgd")).state
    assert set(state) == {"onnx::MatMul_10", "layers.0.bias"} | own


@pytest.mark.torch
@pytest.mark.parametrize("newer", [True, False])
def test_copied_layers_train_apart(newer, tmp_path):
    """Layers that PyTorch copies, one that it uses twice, and a matrix of two modules: three steps equal PyTorch's."""
    torch = pytest.importorskip("torch")
    if newer:
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.copies = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])
            self.again = nn.Linear(4, 4)
            self.pair = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
            self.pair[1].weight = self.pair[0].weight

        def forward(self, x):
            for layer in (*self.copies, self.again, self.again, *self.pair):
                x = torch.tanh(layer(x))
            return x

    net, path = Net().eval(), str(tmp_path / "net.onnx")
    xs, ts = torch.randn(2, 3, 2, 5, 4)
    torch.onnx.export(net, (xs[0],), path, dynamo=newer, verbose=False, input_names=["x"], opset_version=18)
    step = compile_step(attach(path, loss="mse", optimizer="sgd", learning_rate=0.3))
    _, history = train(step, [{"x": x.numpy(), "labels": t.numpy()} for x, t in zip(xs, ts)])
    assert sum(s.kind == "parameter" for s in step.state.values()) == len(list(net.parameters())) == 11
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for x, t, result in zip(xs, ts, history):
        loss = nn.functional.mse_loss(net(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(result["loss"], loss.item(), rtol=1e-5)


def test_branches_share_the_copies_of_fresh_weights():
    """The copies of one tensor in both branches of an If are those of the same layers, in order."""
    branches = []
    for end in ("_then", "_else"):
        nodes = [node("Identity", ["a"], [f"b{end}"]), node("Identity", ["a"], [f"c{end}"])]
        nodes += [node("Mul", ["x", f"b{end}"], [f"h{end}"]), node("Add", [f"h{end}", f"c{end}"], [f"y{end}"])]
        branches.append(helper.make_graph(nodes, end[1:], [], [helper.make_tensor_value_info(f"y{end}", 1, ["N", 2])]))
    nodes = [node("If", ["which"], ["y"], then_branch=branches[0], else_branch=branches[1])]
    inputs = [helper.make_tensor_value_info("x", 1, ["N", 2]), helper.make_tensor_value_info("which", 9, [])]
    outputs = [helper.make_tensor_value_info("y", 1, ["N", 2])]
    weight = numpy_helper.from_array(np.ones(2, np.float32), "a")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    attached = attach(model, loss="mse", optimizer="sgd")
    assert set(compile_step(attached).state) == {"b_then", "c_then"}
    for branch in (attribute.g for attribute in attached.graph.node[0].attribute):
        assert [name for n in branch.node for name in n.input if "_" in name and name[0] != "h"] == ["b_then", "c_then"]
