"""Files that the door reads and writes: external data, damage, sizes beyond one protobuf, failed saves."""

from __future__ import annotations

import os
import socket

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import numpy_helper

from onnxgrad import BadInput, vjp
from onnxgrad.check import check
from onnxgrad.model_io import load_model, save, save_model
from onnxgrad.runtime import Options, Session
from onnxgrad.training.loop.evaluation import plain_session
from tests.models import mlp

# --- files ------------------------------------------------------------------------------------------


def _bad_files(tmp_path):
    whole = mlp().SerializeToString()
    no_opset = mlp()
    no_opset.ClearField("opset_import")
    broken = mlp()
    broken.graph.node[0].input[0] = "nowhere"
    twice = mlp()
    twice.graph.node[1].output[0] = "h"
    cycle = mlp()
    cycle.graph.node[0].input[0] = "t"
    return {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "one byte short": whole[:-1],
        "text": b"This is not a model, but a letter.\n" * 10,
        "random": np.random.default_rng(1).bytes(2000),
        "zeros": bytes(500),
        "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.",
        "no opset": no_opset.SerializeToString(),
        "reads nothing": broken.SerializeToString(),
        "defined twice": twice.SerializeToString(),
        "a cycle": cycle.SerializeToString(),
    }


@pytest.mark.parametrize("kind", list(_bad_files(None)))
def test_files_that_are_no_model(tmp_path, kind):
    path = tmp_path / "bad.onnx"
    path.write_bytes(_bad_files(tmp_path)[kind])
    with pytest.raises(BadInput):
        vjp(path, wrt="w")


def test_every_truncation_is_refused(tmp_path):
    """Wherever the file was cut, it is never taken for a (smaller) model."""
    whole = mlp().SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput):
            vjp(path, wrt="w")


def test_directories_and_missing_files(tmp_path):
    with pytest.raises(BadInput, match="is a directory"):
        vjp(tmp_path, wrt="w")
    with pytest.raises(BadInput, match="there is no file"):
        vjp(tmp_path / "none.onnx", wrt="w")


def _external(tmp_path, size=3000):
    source = mlp()
    big = np.arange(size * 2, dtype=np.float32).reshape(size, 2) / size
    source.graph.initializer[0].CopyFrom(numpy_helper.from_array(big, "w"))
    source.graph.input[0].type.tensor_type.shape.dim[1].dim_value = size
    path = tmp_path / "big.onnx"
    onnx.save(source, path, save_as_external_data=True, location="big.data", size_threshold=100)
    return path, big


def test_external_data_is_read_lazily_and_written_again(tmp_path):
    path, big = _external(tmp_path)
    held = load_model(path)
    tensor = held.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    derived = vjp(held, wrt=["w", "x"])
    assert derived.graph.initializers["w"].const_value is tensor
    assert tensor.raw is None, "the weight was read"
    out = tmp_path / "sub" / "out.onnx"
    out.parent.mkdir()
    files = save_model(derived, out)
    assert [p.name for p in files] == ["out.onnx", "out.onnx.data"]
    assert sorted(os.listdir(out.parent)) == ["out.onnx", "out.onnx.data"]
    np.testing.assert_array_equal(load_model(out).graph.initializers["w"].const_value.numpy(), big)
    onnx.checker.check_model(str(out), full_check=True)


def test_a_path_with_external_data_gives_a_model_that_holds_its_weights(tmp_path):
    path, big = _external(tmp_path)
    derived = vjp(path, wrt="w")
    held = next(t for t in derived.graph.initializer if t.name == "w")
    assert held.data_location == T.DEFAULT
    np.testing.assert_array_equal(numpy_helper.to_array(held), big)


def test_saving_over_the_source(tmp_path):
    path, big = _external(tmp_path)
    os.rename(tmp_path / "big.data", tmp_path / "big.onnx.data")
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        entry.value = "big.onnx.data" if entry.key == "location" else entry.value
    path.write_bytes(proto.SerializeToString())
    save_model(vjp(load_model(path), wrt="w"), path)
    again = load_model(path)
    np.testing.assert_array_equal(again.graph.initializers["w"].const_value.numpy(), big)
    assert "w_grad" in {o.name for o in again.graph.outputs}


def test_external_data_that_is_missing_or_cut_off(tmp_path):
    path, _ = _external(tmp_path)
    data = (tmp_path / "big.data").read_bytes()
    (tmp_path / "big.data").write_bytes(data[:-1])
    with pytest.raises(BadInput, match="cut off"):
        load_model(path)
    (tmp_path / "big.data").unlink()
    with pytest.raises(BadInput, match="does not exist"):
        load_model(path)


def test_a_message_whose_weights_are_elsewhere(tmp_path, monkeypatch):
    """Weights may stay behind their reference; what has to be looked into is asked for."""
    path, _ = _external(tmp_path)
    bare = onnx.load(path, load_external_data=False)
    derived = vjp(bare, wrt="w")
    held = next(t for t in derived.graph.initializer if t.name == "w")
    assert list(held.external_data) == list(bare.graph.initializer[0].external_data)
    onnx.save(mlp(), path, save_as_external_data=True, location="small.data", size_threshold=0)
    with pytest.raises(BadInput, match="pass the path"):
        vjp(onnx.load(path, load_external_data=False), wrt="w")


class _Huge(ir.ExternalTensor):
    """A weight that must never be read."""

    def numpy(self):
        raise AssertionError("the weight was read")


def _huge_model() -> ir.Model:
    source = ir.from_proto(mlp(12))
    rows = 500_000_000
    source.graph.inputs[0].shape = ir.Shape(["N", rows])
    weight = source.graph.initializers["w"]
    weight.shape = ir.Shape([rows, 2])
    weight.const_value = _Huge("none.data", 0, rows * 8, ir.DataType.FLOAT, shape=ir.Shape([rows, 2]), name="w")
    return source


def test_more_than_two_gigabytes_never_go_through_one_protobuf():
    """4 GB of weights that cannot even be read: raised from opset 12 and differentiated."""
    derived = vjp(_huge_model(), wrt=["w", "x"])
    assert isinstance(derived, ir.Model)
    assert isinstance(derived.graph.initializers["w"].const_value, _Huge)


def test_a_path_to_more_than_two_gigabytes_is_refused_with_the_remedy(tmp_path, monkeypatch):
    path, _ = _external(tmp_path)
    monkeypatch.setattr("onnxgrad.model_io.open.PROTOBUF_LIMIT", 20_000)
    with pytest.raises(BadInput, match=r"onnx_ir\.load\(path\)"):
        vjp(path, wrt="w")
    assert isinstance(vjp(ir.load(path), wrt="w"), ir.Model)


def test_large_models_are_saved_with_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "EXTERNAL_FROM", 1000)
    derived = ir.from_proto(mlp())
    derived.graph.initializers["w"].const_value = ir.tensor(np.ones((3000, 2), np.float32), name="w")
    files = save_model(derived, tmp_path / "m.onnx")
    assert [p.name for p in files] == ["m.onnx", "m.onnx.data"]
    assert isinstance(derived.graph.initializers["w"].const_value, ir.Tensor), "the model in memory has changed"


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    save_model(mlp(), path)
    before = path.read_bytes()
    monkeypatch.setattr(save.stream, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(BadInput, match="No space left"):
        save_model(ir.from_proto(mlp(18)), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.onnx"]
    with pytest.raises(BadInput, match="cannot write"):
        save_model(mlp(), tmp_path / "no" / "m.onnx")
    with pytest.raises(BadInput, match="is a directory"):
        save_model(mlp(), tmp_path)


KINDS = [
    *(ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN, ir.DataType.COMPLEX64),
    *(ir.DataType.BOOL, ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.FLOAT4E2M1, ir.DataType.INT64),
]


@pytest.mark.parametrize("held", ["in the file", "in external data"])
def test_weights_of_every_kind_are_read_back(tmp_path, held):
    """Also scalars, weights without elements, and strings."""
    model = ir.from_proto(mlp())
    weights = [ir.tensor(np.array([[1, 0, 1]] * 700).astype(k.numpy()), dtype=k, name=f"k_{k.name}") for k in KINDS]
    weights += [ir.tensor(np.float32(2), name="scalar"), ir.tensor(np.zeros((0, 3), np.float32), name="nothing")]
    weights.append(ir.StringTensor(np.array([b"a", "é".encode()]), name="text"))
    for tensor in weights:
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        model.graph.register_initializer(value)
    wanted = {n: v.const_value.numpy().copy() for n, v in model.graph.initializers.items()}
    if held == "in external data":
        ir.save(model, tmp_path / "a.onnx", external_data="a.data", size_threshold_bytes=1024)
        model = load_model(tmp_path / "a.onnx")
    files = save_model(model, tmp_path / "b.onnx")
    assert len(files) == (2 if held == "in external data" else 1)
    onnx.checker.check_model(tmp_path / "b.onnx")
    found = load_model(tmp_path / "b.onnx").graph.initializers
    assert found.keys() == wanted.keys()
    is_external = {isinstance(v.const_value, ir.ExternalTensor) for v in found.values()}
    assert is_external == ({True, False} if held == "in external data" else {False})
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name].const_value.numpy(), array)
        assert found[name].const_value.dtype == model.graph.initializers[name].const_value.dtype


# --- where external data may be ---------------------------------------------------------------------


def _snapshot(tmp_path, blobs="blobs"):
    """A model as the Hugging Face Hub keeps it: links into a folder of blobs."""
    _, big = _external(tmp_path)
    repository = tmp_path / "models--someone--something"
    snapshot = repository / "snapshots" / "0123abc" / "onnx"
    snapshot.mkdir(parents=True)
    (repository / blobs).mkdir()
    for name, sha in (("big.onnx", "aa11"), ("big.data", "bb22")):
        os.rename(tmp_path / name, repository / blobs / sha)
        os.symlink(f"../../../{blobs}/{sha}", snapshot / name)
    return snapshot / "big.onnx", big


def test_a_snapshot_in_a_cache_is_read(tmp_path):
    path, big = _snapshot(tmp_path)
    os.symlink(path.parent, tmp_path / "short")
    for where in (path, tmp_path / "short" / "big.onnx"):
        held = load_model(where).graph.initializers["w"].const_value
        np.testing.assert_array_equal(held.numpy(), big)
        derived = vjp(where, wrt="w")
        np.testing.assert_array_equal(numpy_helper.to_array(derived.graph.initializer[0]), big)
    save_model(vjp(load_model(path), wrt="w"), tmp_path / "out.onnx")
    np.testing.assert_array_equal(load_model(tmp_path / "out.onnx").graph.initializers["w"].const_value.numpy(), big)


def test_only_the_blobs_of_its_own_repository(tmp_path):
    path, _ = _snapshot(tmp_path, "elsewhere")
    with pytest.raises(BadInput, match="leads out of the folder"):
        load_model(path)
    os.symlink("elsewhere", path.parents[3] / "blobs")  # the folder of blobs must not be a link itself
    with pytest.raises(BadInput, match="leads out of the folder"):
        load_model(path)


def _link(data, away):
    os.rename(data, away)
    os.symlink(away, data)


def _through_a_folder(data, away):
    away.mkdir()
    os.rename(data, away / "big.data")
    os.symlink(away, data.parent / "sub")
    path = data.with_name("big.onnx")
    proto = onnx.load(path, load_external_data=False)
    next(e for e in proto.graph.initializer[0].external_data if e.key == "location").value = "sub/big.data"
    path.write_bytes(proto.SerializeToString())


def _socket(data, away):
    data.unlink()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(data))


ELSEWHERE = {
    "a link": (_link, "leads out of the folder"),
    "a hard link": (lambda data, away: os.link(data, away), "a hard link"),
    "a link to a folder": (_through_a_folder, "leads out of the folder"),
    "a link to a device": (lambda data, away: (data.unlink(), os.symlink("/dev/zero", data)), "no ordinary file"),
    "a pipe": (lambda data, away: (data.unlink(), os.mkfifo(data)), "no ordinary file"),
    "a socket": (_socket, "no ordinary file"),
    "a folder": (lambda data, away: (data.unlink(), data.mkdir()), "no ordinary file"),
    "itself": (lambda data, away: (data.unlink(), os.symlink(data, data)), "does not exist"),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_external_data_elsewhere(tmp_path, monkeypatch, kind):
    """Seen when the model is read, by `check` as by `grad`; nothing but an ordinary file is opened."""
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    path, _ = _external(tmp_path / "models")
    move, says = ELSEWHERE[kind]
    move(tmp_path / "models" / "big.data", tmp_path / "away")
    for call in (load_model, check, lambda p: vjp(p, wrt="w"), Session, plain_session):
        with pytest.raises(BadInput, match=says):
            call(path)


@pytest.mark.parametrize("target", ["portable", "native"])
def test_a_small_model_with_external_data_runs(tmp_path, target):
    """`predict` and `Function` load it as a message, for which ONNX Runtime has no folder."""
    path, big = _external(tmp_path)
    feeds = {v.name: np.full((2, len(big)), 1e-4, np.float32) for v in load_model(path).graph.inputs}
    expected = Session(path).run(feeds)
    found = Session(load_model(path), Options(target=target)).run(feeds)
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6)


def test_links_within_the_folder_are_read(tmp_path):
    path, big = _external(tmp_path)
    Session(path), plain_session(path)
    (tmp_path / "sub").mkdir()
    _link(tmp_path / "big.data", tmp_path / "sub" / "data")
    np.testing.assert_array_equal(load_model(path).graph.initializers["w"].const_value.numpy(), big)
    os.link(tmp_path / "sub" / "data", tmp_path / "sub" / "again")
    np.testing.assert_array_equal(load_model(path).graph.initializers["w"].const_value.numpy(), big)


@pytest.mark.parametrize("write", [lambda t, to: t.numpy(), lambda t, to: t.tofile(to), lambda t, to: t.tobytes()])
def test_a_file_that_changes_after_the_model_was_read(tmp_path, write):
    """It is looked at again once it is open: a link, a shorter one, or a pipe in its place is not read."""
    path, _ = _external(tmp_path)
    data = tmp_path / "big.data"
    content = data.read_bytes()
    (tmp_path / "away").write_bytes(content)
    for change in (
        lambda: (data.unlink(), os.symlink("away", data)),
        lambda: data.write_bytes(b"short"),
        lambda: (data.unlink(), os.mkfifo(data)),
    ):
        held = load_model(path).graph.initializers["w"].const_value
        change()
        with (
            pytest.raises(BadInput, match=r"not the file any more|no ordinary file"),
            open(tmp_path / "to", "wb") as to,
        ):
            write(held, to)
        data.unlink()
        data.write_bytes(content)


def _tensor_in(where):
    """A model with a tensor in external data elsewhere than among its weights."""
    found = mlp()
    held = numpy_helper.from_array(np.float32([1, 2]), "t")
    constant = onnx.helper.make_node("Constant", [], ["c"], value=held)
    if where == "a function":
        found.opset_import.append(onnx.helper.make_opsetid("f", 1))
        imports = list(found.opset_import)
        body = [constant, onnx.helper.make_node("Mul", ["a", "c"], ["b"])]
        found.functions.append(onnx.helper.make_function("f", "f", ["a"], ["b"], body, imports))
        found.graph.node.append(onnx.helper.make_node("f", ["y"], ["z"], domain="f"))
        found.graph.output[0].name = "z"
        held = found.functions[0].node[0].attribute[0].t
    elif where == "training information":
        found.training_info.add().initialization.node.append(constant)
        held = found.training_info[0].initialization.node[0].attribute[0].t
    else:
        found.graph.node.extend([constant, onnx.helper.make_node("Mul", ["y", "c"], ["z"])])
        found.graph.output[0].name = "z"
        held = found.graph.node[-2].attribute[0].t
    raw, held.raw_data = held.raw_data, b""
    held.ClearField("raw_data")
    held.data_location = T.EXTERNAL
    held.external_data.add(key="location", value="t.data")
    return found, raw


@pytest.mark.parametrize("where", ["a function", "training information", "an attribute"])
def test_tensors_that_are_no_weights_are_looked_at_as_weights_are(tmp_path, where):
    found, raw = _tensor_in(where)
    path, data = tmp_path / "m.onnx", tmp_path / "t.data"
    onnx.save(found, path)
    with pytest.raises(BadInput, match="does not exist"):
        load_model(path)
    os.mkfifo(data)
    with pytest.raises(BadInput, match="no ordinary file"):
        load_model(path)
    data.unlink()
    data.write_bytes(raw[:-1])
    with pytest.raises(BadInput, match="cut off"):
        load_model(path)
    data.write_bytes(raw)
    _link(data, tmp_path.parent / f"{tmp_path.name}.away")
    with pytest.raises(BadInput, match="leads out"):
        load_model(path)
    data.unlink()
    data.write_bytes(raw)
    loaded = load_model(path)
    data.unlink()
    save_model(loaded, tmp_path / "out.onnx")
    onnx.checker.check_model(tmp_path / "out.onnx")
    assert b"t.data" not in (tmp_path / "out.onnx").read_bytes()
