"""Target "auto": kernels where they are at hand, operators everywhere else, without a word and without waiting."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import Function, grad
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session, StepRunner
from onnxgrad.runtime import options as choices
from onnxgrad.runtime import session as sessions
from onnxgrad.training import Trainer, compile_step
from tests.runtime.kernels.test_steps import NATIVE, PORTABLE, batches, command, same_state
from tests.runtime.kernels.twins import calls, needs_kernels
from tests.training.models import blobs, trainable

AUTO = Options(threads=1)


@pytest.fixture(autouse=True)
def nobody_says(monkeypatch):
    monkeypatch.delenv("ONNXGRAD_TARGET", raising=False)


@pytest.fixture
def targets(monkeypatch):
    """The targets of the sessions that are made."""
    seen, native = [], Options.native
    monkeypatch.setattr(Options, "native", lambda self: seen.append(self.target) or native(self))
    return seen


def derived():
    """A gradient that there is a kernel for."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[3, 4] x) => (float y) {
        places = Constant <value_ints = [0, 2]> ()
        r = Gather (x, places)
        s = Mul (r, r)
        y = ReduceSum <keepdims = 0> (s)
    }"""
    return grad(ir.from_proto(onnx.parser.parse_model(text)), wrt=["x"], of=["y"])


@needs_kernels
def test_kernels_that_are_there_are_taken(targets):
    x = np.float32(np.arange(12).reshape(3, 4) - 5)
    assert "GatherGrad" in calls(derived())
    for run in (Session(derived()).run, lambda feeds: Function(derived()).session.run(feeds)):
        np.testing.assert_array_equal(run({"x": x})["x_grad"], 2 * x * [[1], [0], [1]])
    StepRunner(compile_step(trainable())).step(batches(1)[0])
    assert targets == ["native"] * 3


def test_without_kernels_operators_run(no_kernels, targets):
    assert Session(derived()).run({"x": np.ones((3, 4), np.float32)})
    assert StepRunner(compile_step(trainable())).step(batches(1)[0])
    assert Trainer(trainable()).options.target == "portable"
    assert set(targets) == {"portable"}
    with pytest.raises(BadInput, match="no C compiler was found when it was installed\n  hint: install a wheel"):
        StepRunner(compile_step(trainable()), options=NATIVE)


ROW = """<ir_version: 10, opset_import: ["": 21]> g (float[64, 64] x) => (float[64, 64] y) {
    a = Sin (x)
    b = Tanh (a)
    c = Mul (b, b)
    y = Exp (c)
}"""


@pytest.fixture
def ran(monkeypatch):
    """The serialized models that ONNX Runtime was given; where it was given a file, what that holds."""
    seen, create = [], sessions.onnxruntime.InferenceSession

    def session(source, *args, **kwargs):
        seen.append(source if isinstance(source, bytes) else Path(source).read_bytes())
        return create(source, *args, **kwargs)

    monkeypatch.setattr(sessions.onnxruntime, "InferenceSession", session)
    return seen


@needs_kernels
@pytest.mark.parametrize("inferred", [True, False])
def test_the_graph_says_what_there_is_not_its_notes(tmp_path, ran, inferred):
    """Of a file nobody knows more than its operators; of derivatives of elementwise functions no part has a name."""
    proto = onnx.parser.parse_model(ROW)
    derived = ir.to_proto(grad(ir.from_proto(proto), wrt=["x"]))
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    for model in (proto, derived):
        if not inferred:
            model.graph.ClearField("value_info")
        onnx.save(model, tmp_path / "m.onnx")
        expected = Session(model, PORTABLE).run({"x": x})
        for held in (model, ir.from_proto(model), model.SerializeToString(), tmp_path / "m.onnx"):
            ran.clear()
            found = Session(held, AUTO).run({"x": x})
            assert b"onnxgrad.native" in ran[0], type(held)
            for name, array in found.items():
                np.testing.assert_allclose(array, expected[name], rtol=2e-6, atol=1e-6)
        ran.clear()
        Function(tmp_path / "m.onnx", options=AUTO)(x=x)
        assert b"onnxgrad.native" in ran[0]


@needs_kernels
def test_files_that_are_left_to_the_runtime(tmp_path, ran):
    """Models with external weights, without parts for kernels, or for operators only stay unchanged, byte by byte."""
    big = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[64, 64] x) => (float[64, 64] y) {'
        "a = Mul (x, w) y = Tanh (a) }"
    )
    big.graph.initializer.append(onnx.numpy_helper.from_array(np.full((64, 64), 0.5, np.float32), "w"))
    onnx.save(big, tmp_path / "big.onnx", save_as_external_data=True, size_threshold=0)
    plain = onnx.parser.parse_model(ROW.replace("Sin", "Softmax").replace("Tanh", "Identity").replace("Mul", "MatMul"))
    onnx.save(plain, tmp_path / "plain.onnx")
    onnx.save(onnx.parser.parse_model(ROW), tmp_path / "row.onnx")
    for name, options in (("big", AUTO), ("plain", AUTO), ("row", PORTABLE)):
        path = tmp_path / f"{name}.onnx"
        found = Session(path, options).run({"x": np.ones((64, 64), np.float32)})
        assert ran == [path.read_bytes()], name
        assert np.isfinite(found["y"]).any()
        ran.clear()
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x0a" + bytes(range(200)))
    for broken in (tmp_path / "broken.onnx", tmp_path / "none.onnx", b"\xff" * 30):
        with pytest.raises(BadInput, match="ONNX Runtime cannot load the model"):
            Session(broken, AUTO)


def test_models_without_parts_for_kernels_load_none(monkeypatch):
    monkeypatch.setattr(choices, "has_kernels", lambda: pytest.fail("it looks for kernels"))
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Relu (x) }'
    model = onnx.parser.parse_model(text)
    for held in (model, ir.from_proto(model), model.SerializeToString()):
        assert Session(held).run({"x": np.float32([-1, 1])})["y"].tolist() == [0, 1]


def test_other_providers_have_none(monkeypatch):
    monkeypatch.setattr(choices, "has_kernels", lambda: pytest.fail("it looks for kernels"))
    assert Options(providers=("CUDAExecutionProvider",)).resolve_target().target == "portable"


@needs_kernels
def test_the_environment_decides(monkeypatch):
    for said in ("portable", "native"):
        monkeypatch.setenv("ONNXGRAD_TARGET", said)
        assert AUTO.resolve_target().target == said
        assert not AUTO.is_free
    assert PORTABLE.resolve_target() == PORTABLE
    monkeypatch.setenv("ONNXGRAD_TARGET", "gpu")
    with pytest.raises(BadInput, match="ONNXGRAD_TARGET must be 'auto', 'portable' or 'native', not 'gpu'"):
        StepRunner(compile_step(trainable()))


# --- a run stays on its target ---------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("begun", [PORTABLE, NATIVE], ids=["portable", "native"])
def test_a_run_goes_on_on_the_target_that_it_was_begun_on(tmp_path, begun):
    """Bit for bit, wherever one has found what is at hand in the meantime."""
    model = trainable("adam", 0.02)
    whole = Trainer(model, options=begun)
    whole.fit(blobs(), epochs=3, batch_size=16)
    Trainer(model, options=begun).fit(blobs(), epochs=2, batch_size=16, checkpoint=tmp_path)
    trainer = Trainer(model, options=AUTO)
    assert trainer.options.target == "native"
    trainer.fit(blobs(), epochs=3, batch_size=16, checkpoint=tmp_path, resume=True)
    assert trainer.options.target == begun.target
    same_state(trainer.state(), whole.state())


@needs_kernels
@pytest.mark.parametrize("parts", [1, 2])
def test_a_run_whose_kernels_are_gone(tmp_path, parts, request):
    model = trainable("adam", 0.02, accumulate=parts > 1)
    Trainer(model, options=NATIVE, accumulate=parts).fit(blobs(), epochs=1, batch_size=16, checkpoint=tmp_path)
    request.getfixturevalue("no_kernels")
    trainer = Trainer(model, options=AUTO, accumulate=parts)
    with pytest.warns(UserWarning, match="begun with kernels in C, which cannot be had here: it goes on with standard"):
        trainer.fit(blobs(), epochs=2, batch_size=16, checkpoint=tmp_path, resume=True)
    assert trainer.history.epochs[-1]["epoch"] == 2
    trainer.fit(blobs(), epochs=3, batch_size=16, checkpoint=tmp_path, resume=True)  # it is on this one by now


@needs_kernels
def test_the_command_takes_what_there_is(tmp_path):
    onnx.save(trainable("adam", 0.05), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs())
    ends = ["train", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--epochs", "1"]
    done = command(*ends, "-o", str(tmp_path / "u.onnx"), ONNXGRAD_LIBRARY=str(tmp_path / "no-library"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "u.onnx").exists()
