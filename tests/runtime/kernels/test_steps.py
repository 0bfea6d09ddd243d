"""Whole steps on both targets: losses, state that changes hands, files, and what cannot be built."""

import json
import os
import threading

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import Function
from onnxgrad.ir.composites import named_parts
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels.substitute import DOMAIN
from onnxgrad.training import Trainer, attach, compile_step, export_step
from onnxgrad.training.optim.named_formulas import FORMULAS
from onnxgrad.training.optim.optimizers import OPTIMIZERS
from onnxgrad.training.step.accumulate import split_step
from tests import commands
from tests.runtime.kernels.twins import calls, needs_kernels
from tests.runtime.passes import with_kernels
from tests.training.models import blobs, classifier, trainable

PORTABLE, NATIVE = (Options(threads=1, target=target) for target in ("portable", "native"))


def kernels_of(step):
    return [node.op_type for node in with_kernels(step.model).graph if node.domain == DOMAIN]


def same_state(a, b, rtol=0.0):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=rtol, err_msg=name)


def same_on_both(step, rtol):
    """Three steps leave the same state on both targets."""
    states = []
    for options in (PORTABLE, NATIVE):
        machine = StepRunner(step, options=options)
        for batch in batches(3):
            machine.step(batch)
        states.append(machine.state())
    same_state(states[1], states[0], rtol=rtol)


def batches(count=6):
    data = blobs()
    return [{name: array[15 * i : 15 * i + 15] for name, array in data.items()} for i in range(count)]


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_losses_of_a_perceptron(threads):
    step = compile_step(trainable("adamw", 0.05, weight_decay=0.01, clip_norm=1.0))
    assert kernels_of(step).count("Adam") == 3
    losses = []
    for target in ("portable", "native"):
        machine = StepRunner(step, options=Options(threads=threads, target=target))
        losses.append([float(machine.step(batch)[step.loss]) for batch in batches() * 5])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6, atol=2e-7)  # logarithms of numbers near 1
    assert losses[0][-1] < losses[0][0] / 2


@needs_kernels
def test_a_run_goes_on_on_the_other_target(tmp_path):
    """Checkpoints and state are the same for both."""
    model = trainable("adam", 0.02)
    whole = Trainer(model, options=PORTABLE)
    whole.fit(blobs(), epochs=4, batch_size=16)
    for first, second in ((PORTABLE, NATIVE), (NATIVE, PORTABLE)):
        folder = tmp_path / first.target
        Trainer(model, options=first).fit(blobs(), epochs=2, batch_size=16, checkpoint=folder)
        trainer = Trainer(model, options=second)
        trainer.fit(blobs(), epochs=4, batch_size=16, checkpoint=folder, resume=True)
        same_state(trainer.state(), whole.state(), rtol=1e-6)


@needs_kernels
def test_the_graph_is_the_same_for_both():
    """Nothing of the target is in the step, in its exports or in the training model."""
    training = trainable("adam", 0.02)
    step = compile_step(training)
    before = ir.to_proto(step.model).SerializeToString()
    StepRunner(step, options=NATIVE)
    assert ir.to_proto(step.model).SerializeToString() == before
    assert {n.domain for n in step.model.graph} == {""}
    assert not any(n.metadata_props for n in step.model.graph)
    session = onnxruntime.InferenceSession(before, providers=["CPUExecutionProvider"])
    assert len(session.get_outputs()) == len(step.model.graph.outputs)


@needs_kernels
def test_an_exported_step_is_portable(tmp_path):
    export_step(trainable("lion", 0.01), tmp_path / "step")
    for file in (tmp_path / "step").rglob("*.onnx"):
        proto = onnx.load(file)
        assert {n.domain for n in proto.graph.node} <= {"", "ai.onnx"}
        assert not any(n.metadata_props for n in proto.graph.node)


@needs_kernels
@pytest.mark.parametrize("optimizer", ["adam", "lion"])
def test_training_models_in_files(tmp_path, optimizer):
    """Names that `attach` noted are still known when its model comes from a file."""
    path = tmp_path / "m.onnx"
    onnx.save(trainable(optimizer, 0.01), path)
    kernel = optimizer.capitalize()
    assert kernels_of(compile_step(path)).count(kernel) == 3


def forged(model, change):
    """`model` with its notes changed: text to text, or what a note says to what it shall say."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    count = 0
    for node in copy.training_info[0].algorithm.node:
        for entry in node.metadata_props:
            said = json.loads(entry.value)
            entry.value = change(entry.value) if change in AS_TEXT else json.dumps(change(said) or said)
            count += 1
    assert count
    return copy


def deep(text):
    """More brackets than Python descends into."""
    return text[:-1] + ', "more": ' + "[" * 100_000 + "]" * 100_000 + "}"


AS_TEXT = (str.upper, deep)
FORGED = {
    "no json": str.upper,
    "deep json": deep,
    "something else": lambda note: [1, 2],
    "no name": lambda note: note.pop("name") and None,
    "the kernel of another": lambda note: note.update(name="ConvWeightGrad"),
    "a kernel of more states": lambda note: note.update(name="RMSPropCenteredMoving"),
    "few inputs": lambda note: note.update(inputs=note["inputs"][:1]),
    "no inputs": lambda note: note.update(inputs=[]),
    "inputs that are no names": lambda note: note.update(inputs=[5, {}, []]),
    "exchanged inputs": lambda note: note.update(inputs=note["inputs"][::-1]),
    "few outputs": lambda note: note.update(outputs=note["outputs"][:1]),
    "no attributes": lambda note: note.update(attributes={}),
    "attributes that are a list": lambda note: note.update(attributes=[1, 2]),
    "another decay": lambda note: note["attributes"].update(norm=50),
    "a share that is no rest": lambda note: note["attributes"].update(alpha_rest=0.5),
    "all shares": lambda note: note["attributes"].update(alpha=0.5, alpha_rest=0.5, beta=0.5, beta_rest=0.5),
    "another factor": lambda note: note["attributes"].update(post=2.0),
    "one more attribute": lambda note: note["attributes"].update(more=2.0),
    "an integer beyond floats": lambda note: note["attributes"].update(norm=10**400),
    "a float beyond floats": lambda note: note["attributes"].update(epsilon=1e300),
    "no number": lambda note: note["attributes"].update(epsilon=float("nan")),
    "digests of its own": lambda note: note.update(digests=5) or note["attributes"].update(norm=50),
    "inputs as an object": lambda note: note.update(inputs={"x": "y"}),
    "more inputs": lambda note: note.update(inputs=[*note["inputs"], None]),
    "more outputs": lambda note: note.update(outputs=[*note["outputs"], None]),
    "attributes that are no numbers": lambda note: note.update(attributes=dict.fromkeys(note["attributes"], "x")),
}


@pytest.mark.sweep(3)
@needs_kernels
@pytest.mark.parametrize("how", FORGED)
def test_notes_of_a_file_that_mean_harm(how):
    """No kernel then, and nothing else either."""
    model = trainable("adam", 0.02)
    step = compile_step(forged(model, FORGED[how]))
    assert "Adam" not in kernels_of(step)
    assert ir.to_proto(step.model) == ir.to_proto(compile_step(model).model)


@needs_kernels
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_names_that_files_keep_are_known(optimizer):
    for node in trainable(optimizer, 0.02).training_info[0].algorithm.node:
        for entry in node.metadata_props:
            assert json.loads(entry.value)["name"] in FORMULAS


@needs_kernels
def test_parts_of_a_batch():
    """The update of a step in two halves has kernels as well."""
    data = batches()
    found = []
    for options in (PORTABLE, NATIVE):
        model = attach(classifier(), loss="cross_entropy", optimizer="adam", accumulate=True)
        trainer = Trainer(model, options=options, accumulate=3)
        for batch in data:
            trainer.machine.step(batch)
        found.append(trainer.state())
        session = trainer.machine.update.session
        assert session is not None
    same_state(found[1], found[0], rtol=1e-6)
    assert kernels_of(split_step(model).update) == ["Adam"] * 3


@needs_kernels
def test_without_a_kernel_operators_run():
    """Types and optimizers that have none, in whole or in part."""
    for optimizer in ("lamb", "adafactor", "muon"):
        step = compile_step(trainable(optimizer, 0.01))
        same_on_both(step, rtol=1e-5)
    assert "Adam" in kernels_of(step)  # of the biases, which muon leaves to adamw


@needs_kernels
def test_a_graph_that_changed_since_is_left_alone():
    """A note is checked against the graph: here a weight is doubled on its way into the update."""
    step = compile_step(trainable("adam", 0.02))
    graph = step.model.graph
    part = next(p for p in named_parts(graph) if p.name == "Adam")
    weight = part.inputs[0]
    users = [(n, i) for n, i in weight.uses() if n is part.outputs[0].producer()]
    assert users
    node = ir.Node("", "Add", [weight, weight], name="twice")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "twice", weight.type, weight.shape
    graph.insert_before(users[0][0], node)
    for user, index in users:
        user.replace_input_with(index, node.outputs[0])
    assert kernels_of(step).count("Adam") == 2
    same_on_both(step, rtol=1e-6)


@needs_kernels
def test_sessions_in_several_threads():
    """Registration is safe, and all sessions share the kernels."""
    step = compile_step(trainable("momentum", 0.02))
    found, data = [], batches(3)

    def work():
        machine = StepRunner(step, options=NATIVE)
        for batch in data:
            machine.step(batch)
        found.append(machine.state())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for state in found[1:]:
        same_state(state, found[0])


@needs_kernels
def test_models_as_functions():
    """Derived models have kernels as well, as long as they do not pass through a file."""
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        onnx.helper.make_node("Relu", ["c"], ["r"]),
        onnx.helper.make_node("ReduceSum", ["r"], ["y"], keepdims=0),
    ]
    ends = [onnx.helper.make_tensor_value_info(n, 1, s) for n, s in (("x", ["N", 3, 8, 8]), ("y", []))]
    w = onnx.numpy_helper.from_array(np.linspace(-1, 1, 4 * 27).reshape(4, 3, 3, 3).astype(np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "conv", ends[:1], ends[1:], [w])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    portable, native = (Function(model, options=options).grad(wrt=["x", "w"]) for options in (PORTABLE, NATIVE))
    assert "ConvWeightGrad" in calls(native.model)
    found, expected = native(x), portable(x)
    assert len(found) == 2
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)


def command(*arguments, **more):
    return commands.command(*arguments, env={**os.environ, **more})


@needs_kernels
def test_the_command(tmp_path):
    onnx.save(trainable("adam", 0.05), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs())
    ends = ["train", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--epochs", "2", "--target", "native"]
    done = command(*ends, "-o", str(tmp_path / "t.onnx"))
    assert done.returncode == 0, done.stderr
    refused = command(*ends, "-o", str(tmp_path / "u.onnx"), ONNXGRAD_LIBRARY=str(tmp_path / "no-library"))
    assert refused.returncode == 2
    assert "no-library" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "u.onnx").exists()
