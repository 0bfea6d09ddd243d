"""The memory of a trainer: bytes of arrays and messages, or copies counted, on small models."""

import sys
import tracemalloc

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import LoRA, subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.model_io import aside, load_model, save_model, stream, training_info, zeros
from onnxgrad.model_io.save import to_proto
from onnxgrad.runtime import Options
from onnxgrad.runtime.resident import Resident
from onnxgrad.training import Trainer, attach, compile_step
from onnxgrad.training.build.attach import attached
from onnxgrad.training.spec.reference_training import ReferenceTraining
from onnxgrad.training.spec.validation import validate
from onnxgrad.training.step.digest import step_digest
from tests.training.models import blobs, classifier


@pytest.fixture
def small(monkeypatch):
    """Have tensors of a few bytes count as large."""
    monkeypatch.setattr(aside, "FROM", 1)
    monkeypatch.setattr(aside, "_LARGE", 1)
    monkeypatch.setattr(zeros, "_LARGE", 1)


def trained(model, folder, **more):
    trainer = Trainer(model, loss="cross_entropy", optimizer="adam", learning_rate=0.01)
    history = trainer.fit(blobs(64), epochs=2, batch_size=16, progress=False, **more)
    trainer.save_training_model(folder / "out.onnx")
    return [e["loss"] for e in history.epochs], {n: a.tobytes() for n, a in trainer.state().items()}


def test_weights_aside_and_zeros_that_are_only_declared_train_to_the_same_bits(tmp_path, request):
    save_model(classifier(), tmp_path / "model.onnx")
    plain = trained(tmp_path / "model.onnx", tmp_path)
    written = (tmp_path / "out.onnx").read_bytes()
    request.getfixturevalue("small")
    assert trained(tmp_path / "model.onnx", tmp_path) == plain
    assert (tmp_path / "out.onnx").read_bytes() == written


def test_weights_aside_are_those_of_the_file_when_it_was_read(tmp_path, small):
    path = tmp_path / "model.onnx"
    save_model(classifier(), path)
    model, like = load_model(path, aside=True), load_model(path)
    path.write_bytes(bytes(len(path.read_bytes())))  # in place
    for name, value in like.graph.initializers.items():
        held = model.graph.initializers[name].const_value
        assert isinstance(held, ir.LazyTensor)
        np.testing.assert_array_equal(held.numpy(), value.const_value.numpy())


def test_a_step_of_a_message_holds_no_part_of_it(small):
    message = attach(classifier(), loss="cross_entropy", optimizer="adam")
    bits = message.SerializeToString(deterministic=True)
    step = compile_step(message)
    assert message.SerializeToString(deterministic=True) == bits
    assert step.source is not None
    held = [v.const_value for v in step.source.model.graph.initializers.values()]
    held += [tensor.initial for tensor in step.state.values() if tensor.kind == "parameter"]
    assert held
    assert all(isinstance(tensor, ir.LazyTensor) for tensor in held)


def test_a_disk_without_room_leaves_weights_in_memory(tmp_path, small, monkeypatch):
    def full(**_):
        class File:
            def seek(self, *_):
                return 0

            def write(self, _):
                raise OSError(28, "No space left on device")

            def close(self):
                pass

        return File()

    save_model(classifier(), tmp_path / "model.onnx")
    monkeypatch.setattr(aside.tempfile, "TemporaryFile", full)
    model = load_model(tmp_path / "model.onnx", aside=True)
    for name, value in load_model(tmp_path / "model.onnx").graph.initializers.items():
        np.testing.assert_array_equal(model.graph.initializers[name].const_value.numpy(), value.const_value.numpy())


def test_zeros_of_moments_are_in_no_message_before_one_is_handed_out(small):
    source = attached(classifier(), loss="cross_entropy", optimizer="adam")
    moments = [t for t in source.infos[0].algorithm.initializer if list(t.dims)]
    assert moments
    assert not any(t.HasField("raw_data") for t in moments)
    handed_out = attach(classifier(), loss="cross_entropy", optimizer="adam")
    algorithm = handed_out.training_info[0].algorithm
    assert not any(map(zeros.is_declared, algorithm.initializer))
    assert {s.values.name for s in algorithm.sparse_initializer} >= {t.name for t in moments}
    assert validate(handed_out) == []
    like, found = compile_step(source).state, compile_step(handed_out).state
    assert list(like) == list(found)
    reference = ReferenceTraining(handed_out).state
    for name, tensor in like.items():
        assert tensor.initial.numpy().tobytes() == found[name].initial.numpy().tobytes() == reference[name].tobytes()


def test_zeros_below_zero_are_written(small):
    assert (
        zeros.declare_tensor(ir.tensor(np.full(3, -0.0, np.float32))).raw_data == np.full(3, -0.0, np.float32).tobytes()
    )


def test_fit_copies_no_state(tmp_path, monkeypatch):
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="adam")

    def refuse(self):
        raise AssertionError("the whole state was copied")

    monkeypatch.setattr(Resident, "state", refuse)
    trainer.fit(blobs(64), validation=blobs(32), batch_size=16, checkpoint=tmp_path / "run", progress=False)
    trainer.save(tmp_path / "model.onnx")


def test_the_saved_model_stays_when_training_goes_on():
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="adam")
    model = trainer.inference_ir()
    before = {n: v.const_value.numpy().tobytes() for n, v in model.graph.initializers.items()}
    trainer.fit(blobs(64), batch_size=16, progress=False)
    assert {n: v.const_value.numpy().tobytes() for n, v in model.graph.initializers.items()} == before


def test_looking_for_what_is_not_finite_takes_a_tensor_at_a_time():
    trainer = Trainer(classifier(hidden=20_000), loss="cross_entropy", optimizer="adam", learning_rate=0.01)
    trainer.fit(blobs(64), batch_size=64, progress=False)
    whole = sum(a.nbytes for a in trainer.machine.now.values())
    tracemalloc.start()
    trainer.fit(blobs(64), batch_size=64, progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < whole


def as_a_message(model, file, moments):
    zeros.write_declared(training_info(model), moments)
    file.write(to_proto(model).SerializeToString())


def test_a_model_written_tensor_by_tensor_reads_back_the_same(tmp_path, monkeypatch):
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="adam")
    trainer.fit(blobs(64), batch_size=16, progress=False)
    for save, name in ((trainer.save, "model.onnx"), (trainer.save_training_model, "training.onnx")):
        with monkeypatch.context() as plain:
            plain.setattr(stream, "write", as_a_message)
            save(tmp_path / f"plain-{name}")
        save(tmp_path / name)
        assert onnx.load(tmp_path / name) == onnx.load(tmp_path / f"plain-{name}")
        onnx.checker.check_model(tmp_path / name)
    assert (tmp_path / "model.onnx").read_bytes() != (tmp_path / "plain-model.onnx").read_bytes()
    onnxruntime.InferenceSession(tmp_path / "model.onnx")


def test_a_file_that_nobody_could_read_is_not_written(tmp_path, monkeypatch):
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="adam")
    monkeypatch.setattr(stream, "PROTOBUF_LIMIT", 1000)
    with pytest.raises(BadInput, match="more than one file can hold"):
        trainer.save_training_model(tmp_path / "training.onnx")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def apart(tmp_path):
    """A model with its weights in external data."""
    model = ir.from_proto(classifier())
    ir.save(model, tmp_path / "model.onnx", external_data="model.data")
    return tmp_path / "model.onnx"


def test_external_weights_wait_in_a_copy(apart, small, monkeypatch):
    """Frozen weights are never in memory all at once, and the files of the model may be written anew."""
    adapter = LoRA(rank=2, targets="all")
    like = Trainer(ir.from_proto(onnx.load(apart)), loss="cross_entropy", adapter=adapter)
    trainer = Trainer(apart, loss="cross_entropy", adapter=adapter)
    frozen = [v.const_value for v in trainer.step.model.graph.initializers.values() if v.const_value.size > 16]
    assert frozen
    assert all(isinstance(t, ir.LazyTensor) for t in frozen)
    data = apart.with_name("model.data")
    data.write_bytes(bytes(len(data.read_bytes())))  # in place
    for each in (like, trainer):
        each.fit(blobs(64), epochs=2, batch_size=16, progress=False)
    assert {n: a.tobytes() for n, a in trainer.state().items()} == {n: a.tobytes() for n, a in like.state().items()}
    for each, name in ((like, "like.onnx"), (trainer, "own.onnx")):
        each.save(apart.with_name(name))
    arrays = {n: v.const_value.numpy() for n, v in load_model(apart.with_name("own.onnx")).graph.initializers.items()}
    for name, value in load_model(apart.with_name("like.onnx")).graph.initializers.items():
        np.testing.assert_array_equal(arrays[name], value.const_value.numpy())


def test_a_disk_without_room_leaves_external_weights_in_memory(apart, small, monkeypatch):
    monkeypatch.setattr(
        aside.tempfile, "TemporaryFile", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    trainer = Trainer(apart, loss="cross_entropy", adapter=LoRA(rank=2, targets="all"))
    frozen = [v.const_value for v in trainer.step.model.graph.initializers.values() if v.const_value.size > 16]
    assert not any(isinstance(tensor, ir.LazyTensor) for tensor in frozen)
    trainer.fit(blobs(64), batch_size=16, progress=False)


def test_the_digest_of_a_step_sees_its_constants_change():
    def of(change=0.0):
        model = ir.from_proto(classifier())
        weight = max(model.graph.initializers.values(), key=lambda v: v.const_value.size)
        weight.const_value = ir.tensor(weight.const_value.numpy() + np.float32(change), name=weight.name)
        return step_digest(model, {"y": model.graph.outputs[0].name}, ())

    assert of() == of() != of(1e-3)


def test_a_machine_that_reads_the_state_of_another_copies_none_of_it():
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="sgd", accumulate=2)
    gradient, update = trainer.machine.gradient, trainer.machine.update
    shared = [n for n in gradient.reads if n in update.slots]
    assert shared
    for name in shared:
        assert np.shares_memory(gradient.reads[name], update.now[name])


MEMORY = """
import sys
import numpy as np
from onnxgrad import LoRA, Trainer
from onnxgrad.training.loop.peak_probe import resident
before = resident("VmHWM")  # ru_maxrss would be that of the process that started this one
trainer = Trainer(sys.argv[1], loss="cross_entropy", adapter=LoRA(rank=4, targets="all"))
x = np.zeros([8, *map(int, sys.argv[3:]), 3000], np.float32)
trainer.fit({"x": x, "labels": np.arange(8)}, batch_size=4, progress=False)
print((resident("VmHWM") - before) / float(sys.argv[2]))
"""


STEPS = """
import sys
import numpy as np, onnx
from onnxgrad.runtime import StepRunner
from onnxgrad.training import attach, compile_step
from onnxgrad.training.loop.peak_probe import resident
before = resident("VmHWM")  # ru_maxrss would be that of the process that started this one
model = attach(sys.argv[1], loss="cross_entropy", optimizer="adam")
print(model.ByteSize() / float(sys.argv[2]))
runner = StepRunner(compile_step(model), threads=1)
runner.step({"x": np.zeros([4, 2000], np.float32), "labels": np.arange(4)})
print((resident("VmHWM") - before) / float(sys.argv[2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_parts_of_a_trainer_take_a_model_its_weights_and_moments(tmp_path):
    """The message of the training model has the weights once; the buffers have them and both moments.

    Standard operators write the new state beside the old one, kernels in place.
    """
    layers = "\n".join(f"m{k} = MatMul (h{k}, w{k}) h{k + 1} = Tanh (m{k})" for k in range(4))
    body = f"h0 = Identity (x) {layers} y = Identity (h4)"
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[N, 2000] x) => (float[N, 2000] y) {{ {body} }}'
    )
    for k in range(4):
        array = np.random.default_rng(k).standard_normal((2000, 2000), np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, f"w{k}"))
    onnx.save(proto, tmp_path / "m.onnx")
    size = (tmp_path / "m.onnx").stat().st_size
    command = [*subprocesses.PYTHON, "-c", STEPS, str(tmp_path / "m.onnx"), str(size)]
    found = subprocesses.run(command, text=True)
    assert found.returncode == 0, found.stderr
    message, peak = map(float, found.stdout.split())
    assert message < 1.01
    assert peak < (4.8 if Options().resolve_target().target == "native" else 6.3)


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("ends", "last", "length"),
    [
        ("(float[N, 3000] x) => (float[N, 3000] y)", "y = Identity (h10)", []),
        ("(float[N, T, 3000] x) => (float[N, 3000] y)", "y = ReduceMax <keepdims = 0> (h10, axis)", ["6"]),
    ],
    ids=["rows", "sequences"],
)
def test_an_adapter_takes_little_more_than_its_base(tmp_path, ends, last, length):
    layers = "\n".join(f"m{k} = MatMul (h{k}, w{k}) h{k + 1} = Tanh (m{k})" for k in range(10))
    body = f"h0 = Identity (x) axis = Constant <value_ints = [1]> () {layers} {last}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {ends} {{ {body} }}')
    rng = np.random.default_rng(0)
    for k in range(10):
        array = (rng.standard_normal((3000, 3000), np.float32) / 55).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, f"w{k}"))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    size = (tmp_path / "m.data").stat().st_size
    found = subprocesses.run(
        [*subprocesses.PYTHON, "-c", MEMORY, str(tmp_path / "m.onnx"), str(size), *length], text=True
    )
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) < 1.3
