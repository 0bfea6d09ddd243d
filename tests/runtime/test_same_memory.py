"""State in one buffer under standard operators: the same bits as in two, and only where no reader can come too late."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.protocol import Slot
from onnxgrad.runtime.resident import Resident
from onnxgrad.runtime.same_memory import SameMemory, same_memory
from onnxgrad.training import attach, compile_step
from tests.runtime.kernels.test_in_place import MODELS, batches, fails_midway, in_one_place, step_of

TABLE = "i = ArgMax <axis = 1, keepdims = 0> (x)\nr = Gather (w1, i)\ny = Tanh (r)"
#: Models, and the weights with one buffer: those that nothing but lookups and elementwise operators read.
WEIGHTS = {
    TABLE: {"w1"},
    MODELS["a sum"][0]: {"w1", "w2"},
    **{
        MODELS[name][0]: set()
        for name in ("products", "one weight, twice", "transposed", "reshaped", "scaled", "in a body")
    },
}


def runner(step, threads=1, **more):
    return StepRunner(step, options=Options(threads=threads, target="portable", **more))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("model", WEIGHTS)
def test_the_same_bits_as_in_two_buffers(model, threads):
    step = step_of(model)
    one, two = runner(step, threads), runner(step, threads, without=("same_memory",))
    weights = {n for n, a in one._buffers[0].items() if n.startswith("w") and "_" not in n and a.ndim}
    moments = {n for n, a in one._buffers[0].items() if a.ndim} - weights
    assert in_one_place(one) == WEIGHTS[model] | moments
    assert not in_one_place(two)
    for batch in batches(4):
        losses = [float(m.step(batch)[step.loss]) for m in (one, two)]
        assert losses[0] == losses[1]
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, two.state()[name], err_msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "rmsprop", "adagrad", "lion", "nadam", "adamw"])
def test_all_optimizers(optimizer):
    step = step_of(TABLE, optimizer)
    one, two = runner(step, 2), runner(step, 2, without=("same_memory",))
    assert "w1" in in_one_place(one)
    for batch in batches(3):
        one.step(batch), two.step(batch)
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, two.state()[name])


@pytest.mark.parametrize(
    ("body", "shared"),
    [
        ("n = Add (x, g)", True),
        ("a = Mul (x, c)\nn = Add (a, g)", True),
        ("a = Mul (x, c)\nl = MatMul (a, g)\nn = Add (a, g)", False),  # which may read x, and the factor later
        ("l = MatMul (x, g)\nn = Add (x, g)", False),
        ("l = MatMul (x, g)\nn = Add (x, l)", False),  # of which the runtime makes one Gemm
        ("l = MatMul (x, g)\nk = Tanh (l)\nn = Sub (x, k)", False),
        ("l = Gather (x, i)\nk = Tanh (l)\nn = Sub (x, k)", True),
        ("l = Gather (x, i)\nn = Sub (x, g)", False),  # which may run first
        ("t = Transpose (x)\nn = Add (x, t)", False),  # the number in the place of another
        ("t = Transpose (x)\nl = MatMul (t, g)\nn = Add (x, g)", False),
        ("l = ReduceSum (x)\nn = Add (x, l)", False),  # of no kind that is known
        ("n = MatMul (x, g)", False),  # not number by number
        ("n = Add (x, g)\nl = Shape (x)", True),
        ('o = Constant <value_ints = [1]> ()\nr = Unsqueeze (i, o)\nn = ScatterND <reduction = "add"> (x, r, g)', True),
        (
            'o = Constant <value_ints = [1]> ()\nr = Unsqueeze (i, o)\nn = ScatterND <reduction = "add"> (g, r, x)',
            False,
        ),
        ("o = Constant <value_ints = [1]> ()\nr = Unsqueeze (i, o)\nt = Transpose (x)\nn = ScatterND (t, r, g)", False),
    ],
)
def test_who_may_read(body, shared):
    left = ["l"] if "l = " in body and "(x, l)" not in body and "k = " not in body else []
    outputs = ", ".join(["float[64, 64] n", *(f"{'int64[2]' if 'Shape' in body else 'float'} {v}" for v in left)])
    inputs = "float[64, 64] x, float[64, 64] g, float c, int64[64] i"
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {body} }}'
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    found, none = SameMemory(), SameMemory()
    same_memory(model.graph, {"x": "n"}, found)
    same_memory(model.graph, {}, none)
    assert found.inputs == ({"x"} if shared else set())
    assert not none.inputs


@pytest.mark.parametrize("update", ["Add (l, x)", "Add (x, l)", "Sub (x, l)"])
def test_a_weight_that_is_multiplied_by_what_is_added_to_it(update):
    """ONNX Runtime has one Gemm compute this, in the memory of what it reads if state were in one buffer."""
    text = f"g (float[64, 64] x, float[64, 64] g) => (float[64, 64] n) {{ l = MatMul (x, g)\nn = {update} }}"
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'))
    x, g = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    machine = Resident(model, {"x": Slot("x", "n", x)}, options=Options(target="portable", threads=1))
    machine.step({"g": g})
    expected = x + x @ g if "Add" in update else x - x @ g
    np.testing.assert_allclose(machine.state()["x"], expected, rtol=1e-4, atol=1e-4)


def test_small_state_has_two_buffers():
    """A counter is updated whether or not a step succeeds."""
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[8] x, float[8] g) => (float[8] n) { n = Add (x, g) }'
    found = SameMemory()
    same_memory(ir.from_proto(onnx.parser.parse_model(text)).graph, {"x": "n"}, found)
    assert not found.inputs


def test_a_step_that_fails_before_updates_leaves_the_state():
    machine = runner(step_of("a = MatMul (x, w1)\ny = Tanh (a)"))
    assert in_one_place(machine)
    good, other = batches(2)
    machine.step(good)
    before = machine.state()
    with pytest.raises(BadInput, match="ONNX Runtime failed: "):  # as the loss is computed
        machine.step({"x": good["x"], "labels": other["labels"][:3]})
    with pytest.raises(BadInput, match="ONNX Runtime failed: "):  # before the run
        machine.step({"x": good["x"].astype(np.float64), "labels": good["labels"]})
    for name, array in machine.state().items():
        np.testing.assert_array_equal(array, before[name])
    machine.step(good)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("name", ["", "looks up"])
def test_a_bad_number_in_a_batch_leaves_the_state(optimizer, name):
    """An index of a lookup and a label fail before updates, in nodes that have no names."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (int64[N] i) => (float[N, 300] y) { e = Gather (table, i) p = Add (e, bias) y = MatMul (p, w) }""")
    rng = np.random.default_rng(0)
    for weight, shape in {"table": (2000, 64), "w": (64, 300), "bias": (3, 64)}.items():
        tensor = onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), weight)
        model.graph.initializer.append(tensor)
    model.graph.node[0].name = name
    step = compile_step(attach(model, loss="cross_entropy", optimizer=optimizer))
    names = [node.name for node in step.model.graph]
    machine = runner(step)
    assert in_one_place(machine)
    assert [node.name for node in step.model.graph] == names
    good = {"i": np.array([0, 1, 2]), "labels": np.array([0, 1, 2])}
    machine.step(good)
    before = machine.state()
    more = np.array([0, 1, 2, 3])
    for bad in ({"i": np.array([0, 1, 9999])}, {"labels": np.array([0, 1, 777])}, {"i": more, "labels": more}):
        with pytest.raises(BadInput, match=r"ONNX Runtime failed: (?!.*unnamed)"):
            machine.step(good | bad)
    two = runner(step, without=("same_memory",))
    two.step(good)
    for weight, array in machine.state().items():
        np.testing.assert_array_equal(array, before[weight])
        np.testing.assert_array_equal(array, two.state()[weight])
    machine.step(good)


def test_a_step_that_fails_midway_says_so():
    fails_midway(runner(step_of("a = MatMul (x, w1)\ny = Tanh (a)")))


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("Non-zero status code returned while running Gather node. Name:'a' Status Message: no", False),
        ("Non-zero status code returned while running FusedGemm node. Name:'fused a' Status Message: no", False),
        ("Non-zero status code returned while running Conv node. Name:'a_nchwc' Status Message: no", False),
        ("Non-zero status code returned while running Add node. Name:'b' Status Message: no", True),
        ("Non-zero status code returned while running Add node. Name:'' Status Message: no", True),
        ("Non-zero status code returned while running GatherElements node. Name:'' Status Message: no", False),
        ("Got invalid dimensions for input: x", False),
    ],
)
def test_what_a_failure_says_of_the_state(message, changed):
    assert SameMemory({"x"}, {"a"}, {"Add", "Sub"}).may_have_changed(f"Error in execution: {message}") == changed
    assert SameMemory({"x"}, {"a"}).may_have_changed("Error in execution: while running Exp node. Name:'' no")
    assert not SameMemory().may_have_changed(message)
    assert SameMemory({"x"}, {"a"}).may_have_changed("std::bad_alloc")
