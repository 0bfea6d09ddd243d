"""What a trainer holds: counted in bytes of arrays and messages, or by who copies, on small models."""

import tracemalloc

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.model_io import aside, load_model, save_model, stream, zeros
from onnxgrad.runtime.resident import Resident
from onnxgrad.training import Trainer, attach, compile_step
from onnxgrad.training.build.attach import attached
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


def test_a_disk_without_room_leaves_weights_in_memory(tmp_path, small, monkeypatch):
    def full(**_):
        class File:
            def tell(self):
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
    for tensor in handed_out.training_info[0].algorithm.initializer:
        assert len(tensor.raw_data) == zeros.held(tensor).nbytes
    like, found = compile_step(source).state, compile_step(handed_out).state
    assert list(like) == list(found)
    for name, tensor in like.items():
        assert tensor.initial.numpy().tobytes() == found[name].initial.numpy().tobytes()


def test_zeros_below_zero_are_written(small):
    assert zeros.declared(ir.tensor(np.full(3, -0.0, np.float32))).raw_data == np.full(3, -0.0, np.float32).tobytes()


def test_fit_copies_no_state(tmp_path, monkeypatch):
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="adam")

    def refuse(self):
        raise AssertionError("the whole state was copied")

    monkeypatch.setattr(Resident, "state", refuse)
    trainer.fit(blobs(64), validation=blobs(32), batch_size=16, checkpoint=tmp_path / "run", progress=False)
    trainer.save(tmp_path / "model.onnx")


def test_the_saved_model_stays_when_training_goes_on():
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="adam")
    model = trainer.inference_model()
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


def test_a_model_written_tensor_by_tensor_reads_back_the_same(tmp_path, monkeypatch):
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="adam")
    trainer.fit(blobs(64), batch_size=16, progress=False)
    for save, name in ((trainer.save, "model.onnx"), (trainer.save_training_model, "training.onnx")):
        save(tmp_path / f"plain-{name}")
        with monkeypatch.context() as small:
            small.setattr(stream, "FROM", 1)
            save(tmp_path / name)
        assert onnx.load(tmp_path / name) == onnx.load(tmp_path / f"plain-{name}")
        onnx.checker.check_model(tmp_path / name)
    assert (tmp_path / "model.onnx").read_bytes() != (tmp_path / "plain-model.onnx").read_bytes()
    onnxruntime.InferenceSession(tmp_path / "model.onnx")


def test_a_file_that_nobody_could_read_is_not_written(tmp_path, monkeypatch):
    trainer = Trainer(classifier(), loss="cross_entropy", optimizer="adam")
    monkeypatch.setattr(stream, "FROM", 1)
    monkeypatch.setattr(stream, "_MOST", 1000)
    with pytest.raises(BadInput, match="more than one file can hold"):
        trainer.save_training_model(tmp_path / "training.onnx")
    assert not list(tmp_path.iterdir())
