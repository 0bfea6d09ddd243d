"""Optimizers in C against their operators: the same to the last bit, over sizes, settings, NaN and threads."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxgrad.runtime import Options, Session, StepRunner
from onnxgrad.runtime.kernels.substitute import DOMAIN
from onnxgrad.training import attach, compile_step
from onnxgrad.training.spec.lower_model import lower_gradients
from tests.runtime.kernels.twins import calls, needs_kernels
from tests.runtime.passes import with_kernels
from tests.training.spec.test_optimizer_operators import optimizer_model

pytestmark = needs_kernels

#: Optimizer, its arguments, the kernel.
CASES = {
    "sgd": ("sgd", {}, "Sgd"),
    "sgd with decay": ("sgd", {"weight_decay": 0.1}, "Sgd"),
    "momentum": ("momentum", {"momentum": 0.9}, "Momentum"),
    "momentum with decay": ("momentum", {"momentum": 0.5, "weight_decay": 0.1}, "Momentum"),
    "nesterov": ("nesterov", {"momentum": 0.9}, "Momentum"),
    "nesterov with decay": ("nesterov", {"momentum": 0.7, "weight_decay": 1.0}, "Momentum"),
    "adam": ("adam", {}, "Adam"),
    "adam with decay": ("adam", {"weight_decay": 0.1, "betas": (0.5, 0.7), "eps": 1e-3}, "Adam"),
    "adam, no memory": ("adam", {"betas": (0.0, 0.0)}, "Adam"),
    "the operator Adam": ("adam", {"convention": "onnx"}, "Adam"),
    "the operator Adam with decay": ("adam", {"convention": "onnx", "weight_decay": 0.1}, "Adam"),
    "adamw": ("adamw", {"weight_decay": 0.1}, "Adam"),
    "adamw by the operator": ("adamw", {"convention": "onnx", "weight_decay": 0.1}, "Adam"),
    "adamw without decay": ("adamw", {"weight_decay": 0.0}, "Adam"),
    "nadam": ("nadam", {}, "NAdam"),
    "nadam with decay": ("nadam", {"weight_decay": 0.1}, "NAdam"),
    "adagrad": ("adagrad", {}, "Adagrad"),
    "adagrad with decay": ("adagrad", {"weight_decay": 0.1, "eps": 1e-3}, "Adagrad"),
    "rmsprop": ("rmsprop", {}, "RMSProp"),
    "rmsprop with momentum": ("rmsprop", {"momentum": 0.9, "weight_decay": 0.1}, "RMSPropMoving"),
    "rmsprop centered": ("rmsprop", {"centered": True}, "RMSPropCentered"),
    "rmsprop, both": (
        "rmsprop", {"momentum": 0.9, "centered": True}, "RMSPropCenteredMoving",
    ),
    "lion": ("lion", {}, "Lion"),
    "lion with decay": ("lion", {"weight_decay": 0.1}, "Lion"),
    "adam, clipped": ("adam", {"clip_norm": 0.01}, "Adam"),
    "adam, values clipped": ("adam", {"clip_value": 0.01}, "Adam"),
    "adamw, clipped, scheduled": (
        "adamw", {"clip_norm": 0.01, "weight_decay": 0.1, "schedule": "cosine:total=5"}, "Adam",
    ),
    "adam with averages": ("adam", {"ema": 0.9}, "Adam"),
    "momentum, grouped": ("momentum", {"groups": ["w1:rate=0.1,decay=0.01"]}, "Momentum"),
}  # fmt: skip


def model(sizes, dtype=np.float32, seed=0):
    """y = Σᵢ sin(wᵢ·x), each weight of its own size: gradients of the size of the weights, all different."""
    rng = np.random.default_rng(seed)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = [numpy_helper.from_array(rng.standard_normal(s).astype(dtype), f"w{i}") for i, s in enumerate(sizes)]
    nodes, sums = [], []
    for i in range(len(sizes)):
        nodes += [
            helper.make_node("Mul", [f"w{i}", "x"], [f"m{i}"]),
            helper.make_node("Sin", [f"m{i}"], [f"s{i}"]),
            helper.make_node("ReduceSum", [f"s{i}"], [f"r{i}"], keepdims=0),
        ]
        sums.append(f"r{i}")
    nodes.append(helper.make_node("Sum", sums, ["total"]))
    nodes.append(helper.make_node("Unsqueeze", ["total", "axis"], ["y"]))
    weights.append(numpy_helper.from_array(np.array([0], np.int64), "axis"))
    ends = [helper.make_tensor_value_info(n, kind, s) for n, s in (("x", []), ("y", [1]))]
    graph = helper.make_graph(nodes, "sines", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def train(step, feeds, options):
    machine = StepRunner(step, options=options)
    losses = [float(machine.step(batch)[step.loss]) for batch in feeds]
    return losses, machine.state()


def same(step, feeds, kernels, threads=(1, 2), rtol=0.0):
    """Both targets take the same steps (to the last bit), and the native one runs `kernels`."""
    found = [n.op_type for n in with_kernels(step.model).graph if n.domain == DOMAIN]
    assert sorted(found) == sorted(kernels)
    losses, state = train(step, feeds, Options(threads=1, target="portable"))
    for count in threads:
        native = train(step, feeds, Options(threads=count, target="native"))
        np.testing.assert_allclose(native[0], losses, rtol=rtol, atol=0)
        for name, expected in state.items():
            np.testing.assert_allclose(native[1][name], expected, rtol=rtol, atol=rtol, err_msg=name)
    return state


def batches(dtype=np.float32, count=4):
    rng = np.random.default_rng(1)
    scalars = [np.array(v, dtype) for v in rng.standard_normal(count)]
    return [{"x": x, "labels": np.zeros(1, dtype)} for x in scalars]


def compiled(proto, optimizer, arguments):
    return compile_step(attach(proto, loss="mse", labels="labels", optimizer=optimizer, **arguments))


SIZES = [(1,), (0,), (3, 5), (1000,)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case):
    optimizer, arguments, kernel = CASES[case]
    same(compiled(model(SIZES), optimizer, arguments), batches(), [kernel] * len(SIZES), threads=[1])


PLAIN = {kernel: (optimizer, arguments) for optimizer, arguments, kernel in reversed(CASES.values())}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kernel", PLAIN)
def test_on_several_threads(kernel):
    """Sizes around those at which work is divided, which no vector divides."""
    same(compiled(model([(8191,), (8193,), (300_007,)]), *PLAIN[kernel]), batches(count=2), [kernel] * 3)


@pytest.mark.parametrize("kernel", PLAIN)
def test_what_is_no_ordinary_number(kernel):
    """In some of the weights and of the state, then in all gradients."""
    step = compiled(model([(40,)]), *PLAIN[kernel])
    portable, native = (StepRunner(step, options=Options(threads=1, target=t)) for t in ("portable", "native"))
    ordinary, *_ = batches(count=1)
    start = portable.state()
    for special in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 3e38):
        state = {name: array.copy() for name, array in start.items()}
        for k, array in enumerate(a for a in state.values() if a.dtype == np.float32 and a.ndim):
            array[k::5] = special
        for machine in (portable, native):
            machine.load_state(state)
        for batch in (ordinary, {**ordinary, "x": np.array(special, np.float32)}, ordinary):
            for machine in (portable, native):
                machine.step(batch)
            expected, found = portable.state(), native.state()
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{name} with {special}")
                signs = [np.where(np.isnan(expected[name]), 0, np.signbit(a[name])) for a in (found, expected)]
                np.testing.assert_array_equal(*signs)


def test_a_million():
    same(compiled(model([(1_000_003,)]), "adam", {}), batches(), ["Adam"])


OPERATORS = {
    "Adam": [{}, {"norm_coefficient": 0.1}, {"norm_coefficient_post": 0.2, "alpha": 0.5}, {"epsilon": 0.0}],
    "Momentum": [
        {"alpha": a, "beta": b, "norm_coefficient": n, "mode": mode}
        for mode in ("standard", "nesterov")
        for a, b, n in ((0.9, 1.0, 0.0), (1.0, 0.5, 0.1), (0.5, 0.25, 1.0))
    ],
    "Adagrad": [{}, {"decay_factor": 0.1, "norm_coefficient": 0.1}],
}


@pytest.mark.parametrize(
    ("op", "attributes"), [(op, a) for op, found in OPERATORS.items() for a in found], ids=lambda x: str(x)[:60]
)
def test_operators_of_the_specification(op, attributes):
    """Every update that a training model can express with them, at T = 0 as well."""
    states = 2 if op == "Adam" else 1
    shapes = ((3, 5), (0,), (33,))
    model = lower_gradients(ir.from_proto(optimizer_model(op, states, shapes=shapes, **attributes)))
    assert calls(model) == [op] * 3
    rng = np.random.default_rng(2)
    for count in (0, 1, 7):
        feeds = {"R": np.array(0.1, np.float32), "T": np.array(count)}
        for value in list(model.graph.inputs)[2:]:
            feeds[value.name] = np.abs(rng.standard_normal(value.shape.numpy())).astype(np.float32)
        expected, found = (Session(model, Options(threads=1, target=t)).run(feeds) for t in ("portable", "native"))
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_other_types_and_shapes_stay_operators():
    """Half precision is updated in float32; shapes that only a run knows are not sure to be equal.

    Groups of float64 are rounded in another order than their operators.
    """
    same(compiled(model([(3, 5)], np.float64), "adam", {}), batches(np.float64), [], threads=[1], rtol=1e-14)
    step = compiled(model([(3, 5)], np.float16), "sgd", {})
    same(step, batches(np.float16), ["Sgd"], threads=[1])
    proto = optimizer_model("Adagrad", 1)
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = f"n{value.name}"
    assert calls(lower_gradients(ir.from_proto(proto))) == []
