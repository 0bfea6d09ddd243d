"""State that is updated where it lies: the same bits as in two buffers, and only where no reader can come too late."""

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels import in_place
from onnxgrad.runtime.kernels.substitute import DOMAIN
from onnxgrad.training import Trainer, attach, compile_step
from tests.runtime.kernels.twins import needs_kernels

WIDE = 96  # a square of which is worth an operand more
BODY = "body = b (float[N, 96] h, float[1] s) => (float[N, 96] n, float[1] t) { m = MatMul (h, w1)\n"
#: Models of x [N, 96] and what is in place of them; the rest has two buffers.
MODELS = {
    "products": ("a = MatMul (x, w1)\nb = Tanh (a)\ny = MatMul (b, w2)", {"w1", "w2"}),
    "one weight, twice": ("a = MatMul (x, w1)\nb = Tanh (a)\ny = MatMul (b, w1)", {"w1"}),
    "transposed": (
        "t = Transpose (w1)\na = MatMul (x, t)\nb = Tanh (a)\nc = MatMul (b, w2)\ny = MatMul (c, t)", {"w1", "w2"},
    ),
    "reshaped": (
        "a = MatMul (x, w1)\nv = Reshape (w2, flat)\nz = Reshape (v, square)\nb = Gemm (a, z)\ny = Tanh (b)",
        {"w1", "w2"},
    ),
    "a sum": ("a = Add (w1, w2)\nb = MatMul (x, a)\ny = Tanh (b)", set()),
    "scaled": ("h = Mul (w1, half)\na = MatMul (x, h)\ny = MatMul (a, w2)", {"w2"}),
    "in a body": (
        f"h, ts = Scan <num_scan_inputs = 1, {BODY} n = Tanh (m)\nt = Identity (s) }}> (x, three)\ny = MatMul (h, w2)",
        {"w1", "w2"},
    ),
    "elementwise in a body": (
        f"h, ts = Scan <num_scan_inputs = 1, {BODY} n = Tanh (m)\nq = ReduceSum <keepdims = 0> (w1)\nt = Mul (s, q) }}>"
        " (x, three)\ny = MatMul (h, w2)",
        {"w2"},
    ),
}  # fmt: skip


def model(text):
    rng = np.random.default_rng(0)
    found = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[N, {WIDE}] x) => (float[N, {WIDE}] y) {{ {text} }}'
    )
    arrays = {f"w{i}": rng.standard_normal((WIDE, WIDE)) / 10 for i in (1, 2)} | {"three": np.ones((3, 1)), "half": 0.5}
    arrays = {n: np.asarray(a, np.float32) for n, a in arrays.items()}
    arrays |= {"flat": np.array([-1]), "square": np.array([WIDE, WIDE])}
    for name, array in arrays.items():
        if name in text:
            found.graph.initializer.append(numpy_helper.from_array(array, name))
    return found


def step_of(text, optimizer="adam", **more):
    found = model(text)
    weights = [t.name for t in found.graph.initializer if t.name.startswith("w")]
    return compile_step(attach(found, loss="mse", optimizer=optimizer, trainable=weights, labels="labels", **more))


def batches(count):
    rng = np.random.default_rng(1)
    return [{n: rng.standard_normal((5, WIDE)).astype(np.float32) for n in ("x", "labels")} for _ in range(count)]


def in_one_place(machine):
    """The names of the state that has one buffer."""
    first, second = machine._buffers
    return {n for n in first if first[n] is second[n]}


def in_two(step, options):
    """A machine whose state has two buffers."""
    return StepRunner(step, options=dataclasses.replace(options, without=("in_place",)))


@pytest.mark.sweep(3)
@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", MODELS)
def test_the_same_bits_as_in_two_buffers(case, threads):
    text, expected = MODELS[case]
    step = step_of(text)
    options = Options(threads=threads, target="native")
    one, two = StepRunner(step, options=options), in_two(step, options)
    weights = {n for n, a in one._buffers[0].items() if n.startswith("w") and "_" not in n and a.ndim}
    assert in_one_place(one) & weights == expected
    moments = {n for n, a in one._buffers[0].items() if a.ndim} - weights
    assert moments
    assert in_one_place(one) - weights == moments
    assert not in_one_place(two)
    for batch in batches(4):
        losses = [float(m.step(batch)[step.loss]) for m in (one, two)]
        assert losses[0] == losses[1]
    first, second = one.state(), two.state()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@needs_kernels
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "rmsprop", "adagrad", "lion", "nadam", "adamw"])
def test_all_optimizers(optimizer):
    step = step_of(MODELS["products"][0], optimizer)
    options = Options(threads=2, target="native")
    one, two = StepRunner(step, options=options), in_two(step, options)
    assert {"w1", "w2"} <= in_one_place(one)
    for batch in batches(3):
        one.step(batch), two.step(batch)
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, two.state()[name])


@needs_kernels
def test_averages_of_weights_have_the_new_ones():
    """They read what the update gives, not what it reads."""
    step = step_of(MODELS["products"][0], ema=0.9)
    options = Options(threads=1, target="native")
    one, two = StepRunner(step, options=options), in_two(step, options)
    for batch in batches(3):
        one.step(batch), two.step(batch)
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, two.state()[name], err_msg=name)


@needs_kernels
def test_training_in_parts_of_a_batch():
    """The machine of the gradients reads the weights where that of the update keeps them."""
    found = []
    for target in ("portable", "native"):
        training = attach(model(MODELS["products"][0]), loss="mse", optimizer="sgd", labels="labels", accumulate=True)
        trainer = Trainer(training, accumulate=2, options=Options(threads=1, target=target))
        for batch in batches(4):
            trainer.machine.step(batch)
        found.append(trainer.state())
    for name, array in found[0].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-5, atol=1e-6)


# --- graphs that no step is like -------------------------------------------------------------------


def graph_of(nodes, outputs):
    """Inputs x, w, m, g of one shape; `nodes` as (operator, inputs, outputs); Sgd and Momentum are updates."""
    values = {n: ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([WIDE, WIDE])) for n in "xwmg"}
    graph = ir.Graph([values[n] for n in "xwmg"], [], nodes=[], name="g", opset_imports={"": 21, DOMAIN: 1})
    for operator, inputs, given in nodes:
        domain = DOMAIN if operator in ("Sgd", "Momentum") else ""
        node = ir.Node(domain, operator, [values[n] for n in inputs], num_outputs=len(given))
        for name, value in zip(given, node.outputs):
            value.name, value.type, value.shape = name, values["x"].type, values["x"].shape
            values[name] = value
        graph.append(node)
    graph.outputs.extend(values[n] for n in outputs)
    return graph


SGD = ("Sgd", ["w", "g"], ["v"])
HAND_MADE = {
    "no other reader": ([SGD], ["v"], {"w"}),
    "a reader before it": ([("MatMul", "xw", ["y"]), ("Sgd", ["w", "y"], ["v"])], ["v"], {"w"}),
    "a reader beside it": ([SGD, ("MatMul", "xw", ["y"])], ["v", "y"], {"w"}),
    "a reader of old and new": ([SGD, ("MatMul", "vw", ["y"])], ["v", "y"], set()),
    "through a view": ([SGD, ("Transpose", "w", ["t"]), ("MatMul", "vt", ["y"])], ["v", "y"], set()),
    "a view that is given": ([SGD, ("Transpose", "w", ["t"])], ["v", "t"], set()),
    "the old ones are given": ([SGD], ["v", "w"], set()),
    "elementwise": ([SGD, ("Exp", "w", ["y"])], ["v", "y"], set()),
    "its own gradient": ([("Sgd", ["w", "w"], ["v"])], ["v"], set()),
    "another's operand": ([SGD, ("Sgd", ["m", "w"], ["n"])], ["v", "n"], {"m"}),
    "each the other's": ([("Sgd", ["w", "m"], ["v"]), ("Sgd", ["m", "w"], ["n"])], ["v", "n"], set()),
    "a state as well": ([("Momentum", ["w", "g", "m"], ["v", "n"])], ["v", "n"], {"w", "m"}),
    "a state that is read": (
        [("Momentum", ["w", "g", "m"], ["v", "n"]), ("MatMul", "xm", ["y"])], ["v", "n", "y"], {"w"},
    ),
    "the values exchanged": ([("Momentum", ["m", "g", "w"], ["v", "n"])], ["v", "n"], set()),
}  # fmt: skip


@pytest.mark.parametrize("case", HAND_MADE)
def test_who_may_come_too_late(case):
    nodes, outputs, expected = HAND_MADE[case]
    graph = graph_of(nodes, outputs)
    assert in_place(graph, {"w": "v", "m": "n"}) == expected
    places = {node: i for i, node in enumerate(graph)}
    for node in graph:
        assert all(places[p] < places[node] for v in node.inputs if (p := v.producer()) is not None)
    update = next(n for n in graph if n.domain == DOMAIN)
    assert ("y" in [v.name for v in update.inputs]) == (case in ("a reader before it", "a reader beside it"))


# --- a step that fails -----------------------------------------------------------------------------


@needs_kernels
def test_a_batch_that_is_refused_leaves_the_state():
    machine = StepRunner(step_of(MODELS["products"][0]), options=Options(threads=1, target="native"))
    good, other = batches(2)
    machine.step(good)
    before = machine.state()
    with pytest.raises(BadInput, match="ONNX Runtime failed: "):
        machine.step({"x": good["x"], "labels": other["labels"][:3]})
    for name, array in machine.state().items():
        np.testing.assert_array_equal(array, before[name])
    machine.step(good)


def fails_midway(machine):
    """Have a step fail after its updates: the state is then neither the old nor the new one, and nobody gets it."""
    start, (batch,) = machine.state(), batches(1)
    session = machine.session

    class Failing:
        def run_with_iobinding(self, binding):
            session.run_with_iobinding(binding)
            raise RuntimeError("no memory")

    machine.session = Failing()
    with pytest.raises(BadInput, match="failed, when a part of the state had been updated: no memory"):
        machine.step(batch)
    machine.session = session
    for use in (machine.state, lambda: machine.step(batch)):
        with pytest.raises(BadInput, match="load a state before going on"):
            use()
    machine.load_state(start)
    machine.step(batch)


@needs_kernels
def test_a_step_that_fails_midway_says_so():
    fails_midway(StepRunner(step_of(MODELS["products"][0]), options=Options(threads=1, target="native")))
