"""Optimizer operators mean what the specification says, and training with them is training with PyTorch."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad.errors import BadInput
from onnxgrad.training.build.attach import attach
from onnxgrad.training.spec.lower_model import lower_gradients
from onnxgrad.training.step.compile import compile_step
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.onnx_cases import NODE_CASES
from tests.training.nets import mlp, run, train

STANDARD = [
    "test_adam",
    "test_adam_multiple",
    "test_adagrad",
    "test_adagrad_multiple",
    "test_momentum",
    "test_momentum_multiple",
    "test_nesterov_momentum",
]


@pytest.mark.parametrize("name", STANDARD)
def test_backend_node_test(name):
    case = next(c for c in NODE_CASES if c.name == name)
    model = copy.deepcopy(case.model)
    model.opset_import.append(helper.make_opsetid("", 21))
    lowered = lower_gradients(model)
    assert all(n.domain == "" for n in lowered.graph.node)
    onnx.checker.check_model(lowered, full_check=True)
    for inputs, outputs in case.data_sets:
        feeds = {i.name: np.asarray(a) for i, a in zip(case.model.graph.input, inputs)}
        found = run(lowered, feeds)
        for out, want in zip(case.model.graph.output, outputs):
            np.testing.assert_allclose(found[out.name], want, rtol=2e-6, atol=1e-7, err_msg=out.name)


def optimizer_model(op: str, states: int, dtype=TensorProto.FLOAT, shapes=((2, 3), (4,)), **attrs) -> onnx.ModelProto:
    """One optimizer node on two tensors; inputs R, T, X0, X1, G0, … and outputs Y0, …"""
    groups = ["X", "G", *("V", "H")[:states]]
    names = [f"{g}{i}" for g in groups for i in range(len(shapes))]
    outs = [f"Y{g}{i}" for g in groups if g != "G" for i in range(len(shapes))]
    dims = [shapes[int(n[-1])] for n in names]
    graph = helper.make_graph(
        [helper.make_node(op, ["R", "T", *names], outs, domain=DOMAIN, name="update", **attrs)],
        "update",
        [
            helper.make_tensor_value_info("R", dtype, []),
            helper.make_tensor_value_info("T", TensorProto.INT64, []),
            *(helper.make_tensor_value_info(n, dtype, d) for n, d in zip(names, dims)),
        ],
        [helper.make_tensor_value_info(o, dtype, shapes[int(o[-1])]) for o in outs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def written_out(op: str, r, t, x, g, v, h, **a):
    """The formulas of the specification, in float64."""
    g = a.get("norm_coefficient", 0) * x + g
    if op == "Adam":
        v = a["alpha"] * v + (1 - a["alpha"]) * g
        h = a["beta"] * h + (1 - a["beta"]) * g * g
        r = r * np.sqrt(1 - a["beta"] ** t) / (1 - a["alpha"] ** t) if t else r
        return (1 - a.get("norm_coefficient_post", 0)) * (x - r * v / (np.sqrt(h) + a["epsilon"])), v, h
    if op == "Adagrad":
        h = v + g * g
        return x - r / (1 + t * a["decay_factor"]) * g / (np.sqrt(h) + a["epsilon"]), h
    v = a["alpha"] * v + (a["beta"] if t else 1) * g
    return x - r * (v if a["mode"] == "standard" else g + a["alpha"] * v), v


def drawn(op: str, states: int, attrs, t: int, dtype) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one optimizer, and something positive for every input of it at step `t`."""
    model = optimizer_model(op, states, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), **attrs)
    rng = np.random.default_rng(0)
    feeds = {"R": np.array(0.1, dtype), "T": np.array(t, np.int64)}
    for value in model.graph.input[2:]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = np.abs(rng.standard_normal(shape)).astype(dtype)
    return model, feeds


def agree(found, feeds, op: str, r: float, t: int, attrs, **tolerance) -> None:
    """Both tensors and their states are what the formulas say, in the type of X."""
    for i in range(2):
        want = written_out(op, r, t, *(np.float64(feeds.get(f"{k}{i}", 0)) for k in "XGVH"), **attrs)
        for kind, value in zip("XVH", want):
            assert found[f"Y{kind}{i}"].dtype == feeds[f"X{i}"].dtype
            np.testing.assert_allclose(found[f"Y{kind}{i}"], value, err_msg=f"{kind}{i}", **tolerance)


CASES = [
    (
        "Adam",
        2,
        {"alpha": 0.8, "beta": 0.99, "epsilon": 1e-3, "norm_coefficient": 0.1, "norm_coefficient_post": 0.05},
    ),
    ("Adam", 2, {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-8}),
    ("Adagrad", 1, {"epsilon": 1e-3, "decay_factor": 0.3, "norm_coefficient": 0.1}),
    ("Momentum", 1, {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "standard"}),
    ("Momentum", 1, {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "nesterov"}),
    ("Momentum", 1, {"alpha": 0.0, "beta": 1.0, "norm_coefficient": 0.0, "mode": "standard"}),
]


def every_case(test):
    """At the first step and later ones, in both types."""
    steps = pytest.mark.parametrize("t", [0, 1, 7])
    types = pytest.mark.parametrize("dtype", [np.float32, np.float64])
    return types(steps(pytest.mark.parametrize(("op", "states", "attrs"), CASES)(test)))


@every_case
def test_formula(op, states, attrs, t, dtype):
    model, feeds = drawn(op, states, attrs, t, dtype)
    found = run(lower_gradients(model), feeds)
    tolerance = 1e-6 if dtype is np.float32 else 1e-8
    agree(found, feeds, op, 0.1, t, attrs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("op", "states", "attrs", "shared", "each"),
    [
        ("Adam", 2, {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-8}, 12, 12),
        ("Adagrad", 1, {}, 0, 7),
        ("Momentum", 1, {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, "mode": "standard"}, 0, 4),
        ("Momentum", 1, {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, "mode": "nesterov"}, 0, 6),
    ],
)
def test_nodes_per_tensor(op, states, attrs, shared, each):
    """Vanishing terms are not written, and what tensors share is written once."""
    for count in (1, 2, 5):
        model = lower_gradients(optimizer_model(op, states, shapes=((2, 3),) * count, **attrs))
        assert len(model.graph.node) == shared + each * count


def test_bad_optimizer_nodes():
    attrs = {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0}
    with pytest.raises(BadInput, match="mode must be 'standard' or 'nesterov', not 'fast'"):
        lower_gradients(optimizer_model("Momentum", 1, mode="fast", **attrs))
    with pytest.raises(BadInput, match=r"Momentum node 'update'.*: the attribute 'alpha' is missing"):
        lower_gradients(optimizer_model("Momentum", 1, beta=1.0, norm_coefficient=0.0, mode="standard"))
    with pytest.raises(BadInput, match="takes R, T and 4 per tensor"):
        lower_gradients(optimizer_model("Adam", 1, alpha=0.9))
    with pytest.raises(BadInput, match="there is no operator 'Lion'"):
        lower_gradients(optimizer_model("Lion", 1))


# --- the same training as PyTorch's ---------------------------------------------------------------


def _data(steps: int, seed: int = 1):
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(steps):
        x = rng.standard_normal((16, 4)).astype(np.float32)
        batches.append({"x": x, "labels": np.sin(x[:, :3] * 2).astype(np.float32)})
    return batches


def _torch_training(make, batches):
    torch = pytest.importorskip("torch")
    weights = {t.name: onnx.numpy_helper.to_array(t).copy() for t in mlp().graph.initializer}
    p = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in weights.items()}
    optimizer = make(torch.optim, list(p.values()))
    losses = []
    for batch in batches:
        y = torch.tanh(torch.tensor(batch["x"]) @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        loss = torch.nn.functional.mse_loss(y, torch.tensor(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {n: v.detach().numpy() for n, v in p.items()}, losses


TORCH = {
    "sgd": ({"learning_rate": 0.1, "weight_decay": 0.01}, lambda o, p: o.SGD(p, lr=0.1, weight_decay=0.01)),
    "momentum": (
        {"learning_rate": 0.05, "momentum": 0.8, "weight_decay": 0.01},
        lambda o, p: o.SGD(p, lr=0.05, momentum=0.8, weight_decay=0.01),
    ),
    "nesterov": (
        {"learning_rate": 0.05, "momentum": 0.8},
        lambda o, p: o.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    ),
    "adam": (
        {"learning_rate": 0.01, "eps": 1e-12, "weight_decay": 0.01, "convention": "onnx"},
        lambda o, p: o.Adam(p, lr=0.01, eps=1e-12, weight_decay=0.01),
    ),
    "adamw": (
        {"learning_rate": 0.01, "eps": 1e-12, "weight_decay": 0.1, "convention": "onnx"},
        lambda o, p: o.AdamW(p, lr=0.01, eps=1e-12, weight_decay=0.1),
    ),
    "adagrad": (
        {"learning_rate": 0.1, "weight_decay": 0.01},
        lambda o, p: o.Adagrad(p, lr=0.1, weight_decay=0.01),
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", TORCH)
def test_hundred_steps_are_those_of_torch(name):
    """With the same settings. For the operator Adam, ε is what differs (see the next test), so it is tiny here."""
    settings, make = TORCH[name]
    batches = _data(100)
    weights, losses = _torch_training(make, batches)
    state, history = train(compile_step(attach(mlp(), loss="mse", optimizer=name, **settings)), batches, threads=2)
    assert losses[-1] < 0.75 * losses[0]
    np.testing.assert_allclose([h["loss"] for h in history], losses, rtol=2e-4)
    for n, w in weights.items():
        np.testing.assert_allclose(state[n], w, rtol=1e-3, atol=2e-5, err_msg=n)


@pytest.mark.torch
def test_epsilon_of_the_operator_adam_is_before_the_bias_correction():
    """ONNX divides by √H + ε and corrects afterwards; PyTorch corrects H first: its ε is ours·√(1-βᵀ)⁻¹."""
    pytest.importorskip("torch")
    batches, eps = _data(3), 0.01
    state, _ = train(compile_step(attach(mlp(), loss="mse", optimizer="adam", eps=eps, convention="onnx")), batches)

    class Adjusted:
        def __init__(self, torch_optim, params):
            self.optimizer, self.count = torch_optim.Adam(params, lr=0.001, eps=eps), 0
            self.zero_grad = self.optimizer.zero_grad

        def step(self):
            self.count += 1
            self.optimizer.param_groups[0]["eps"] = eps / np.sqrt(1 - 0.999**self.count)
            self.optimizer.step()

    adjusted, _ = _torch_training(Adjusted, batches)
    plain, _ = _torch_training(lambda o, p: o.Adam(p, lr=0.001, eps=eps), batches)
    for n in adjusted:
        np.testing.assert_allclose(state[n], adjusted[n], rtol=1e-4, atol=1e-6)
        assert np.abs(state[n] - plain[n]).max() > 1e-4


@pytest.mark.torch
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_by_name_is_that_of_torch(name):
    """With an ε that matters, the same as PyTorch over 100 steps; and it is said which convention it is."""
    eps, make = 0.01, {"adam": "Adam", "adamw": "AdamW"}[name]
    batches = _data(100)
    weights, losses = _torch_training(lambda o, p: getattr(o, make)(p, lr=0.01, eps=eps, weight_decay=0.01), batches)
    settings = {"learning_rate": 0.01, "eps": eps, "weight_decay": 0.01}
    model = attach(mlp(), loss="mse", optimizer=name, **settings)
    state, history = train(compile_step(model), batches, threads=2)
    np.testing.assert_allclose([h["loss"] for h in history], losses, rtol=2e-4)
    for n, w in weights.items():
        np.testing.assert_allclose(state[n], w, rtol=1e-3, atol=2e-5, err_msg=n)
    assert "Adam" not in {n.op_type for n in model.training_info[0].algorithm.node}
    assert "PyTorch" in model.training_info[0].algorithm.metadata_props[0].value
    plain = attach(mlp(), loss="mse", optimizer=name, convention="onnx", **settings)
    assert "Adam" in {n.op_type for n in plain.training_info[0].algorithm.node}
    assert "(ONNX)" in plain.training_info[0].algorithm.metadata_props[0].value


def test_convention_is_one_of_adam():
    with pytest.raises(BadInput, match="'sgd' has no setting 'convention'"):
        attach(mlp(), loss="mse", optimizer="sgd", convention="torch")
    with pytest.raises(BadInput, match="convention must be 'onnx' or 'torch', not 'keras'"):
        attach(mlp(), loss="mse", optimizer="adam", convention="keras")
