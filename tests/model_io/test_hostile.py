"""Files made to do harm: each is one error, at once, and takes no memory; nothing in a file is executed.

At random: `tests.fuzz`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import socket
import struct
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad import BadInput, load_rule, vjp
from onnxgrad.check import check
from onnxgrad.model_io import load_model, save_model
from onnxgrad.training import attach
from onnxgrad.training.data import Data, Field, open_data
from onnxgrad.training.loop.callbacks import Log
from onnxgrad.training.loop.checkpoint import Checkpoint
from tests.fuzz import __main__ as fuzz
from tests.models import mlp
from tests.training.models import classifier

IMPORTS = [helper.make_opsetid("", 21)]


@pytest.fixture(autouse=True)
def little_memory():
    """Two gigabytes more than now, at most; and what Python takes is a hundredth of that."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, old[1]))
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, old)


def weight(**fields):
    """`mlp` with something done to the tensor of its first weight."""
    model = mlp()
    tensor = model.graph.initializer[0]
    for name, value in fields.items():
        if isinstance(value, list):
            tensor.ClearField(name)
            getattr(tensor, name).extend(value)
        else:
            setattr(tensor, name, value)
    return model


def outside(location="x", **more):
    model = weight(data_location=TensorProto.EXTERNAL)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return model


def sparse(dims, indices, values=(1.0,)):
    model = mlp()
    held = model.graph.sparse_initializer.add()
    held.dims.extend(dims)
    held.values.CopyFrom(numpy_helper.from_array(np.array(values, np.float32), "s"))
    held.indices.CopyFrom(numpy_helper.from_array(np.array(indices, np.int64)))
    return model


def with_opset(version):
    model = mlp()
    model.opset_import[0].version = version
    return model


def made(op, operand, **attributes):
    """A tensor as large as a small constant asks for."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[n] y) {{
            b = {op}  f = CastLike (b, x)  s = ReduceSum (f)  y = Mul (x, s) }}"""
    )
    model.graph.initializer.extend(numpy_helper.from_array(np.array(v), k) for k, v in operand.items())
    return model


def laughs(depth, calls=10):
    """Functions that call functions ten times, and so on."""
    model = mlp()
    for i in range(depth):
        domain, name = ("f", f"f{i - 1}") if i else ("", "Relu")
        nodes = [helper.make_node(name, [f"v{k}" if k else "a"], [f"v{k + 1}"], domain=domain) for k in range(calls)]
        imports = [*IMPORTS, helper.make_opsetid("f", 1)]
        model.functions.append(helper.make_function("f", f"f{i}", ["a"], [f"v{calls}"], nodes, imports))
    model.opset_import.append(helper.make_opsetid("f", 1))
    model.graph.node.append(helper.make_node(f"f{depth - 1}", ["y"], ["z"], domain="f"))
    model.graph.output[0].name = "z"
    return model


def nested(depth):
    """An If in an If in an If, as bytes: the package protobuf does not make what it does not read."""

    def field(number, content):
        size, length = [], len(content)
        while length > 127:
            size.append(length & 127 | 128)
            length >>= 7
        tag = number << 3 | 2
        return bytes([tag, *size, length]) + content

    graph = b""
    for _ in range(depth):
        attribute = field(1, b"then_branch") + field(6, graph) + bytes([0xA0, 1, 5])
        graph = field(1, field(4, b"If") + field(5, attribute))
    return field(7, graph) + field(8, helper.make_opsetid("", 21).SerializeToString())


def with_node(node):
    """A node behind `mlp`, whose output is the model's."""
    model = mlp()
    model.graph.node.append(node)
    model.graph.output[0].name = node.output[0]
    return model


def branch(*what):
    """An If whose branch is not there, or not its own."""
    node = helper.make_node("If", ["y"], ["z"])
    for name in ("then_branch", "else_branch"):
        node.attribute.add(name=name, type=onnx.AttributeProto.GRAPH, **dict(what))
    return with_node(node)


def no_text(*where):
    data = mlp().SerializeToString()
    assert data.count(where[0]) > 0
    return data.replace(where[0], where[1])


MODELS = {
    "a terabyte": (lambda: weight(dims=[2**40]), "declares [1099511627776]"),
    "more than all numbers": (lambda: weight(dims=[2**62, 2**62, 2**62]), "declares"),
    "less than nothing": (lambda: weight(dims=[-1, -6]), "has the dimensions [-1, -6]"),
    "cut off": (lambda: weight(raw_data=b"1234"), "holds 4"),
    "too long": (lambda: weight(raw_data=bytes(4000)), "holds 4000"),
    "of no type": (lambda: weight(data_type=0), "has no type"),
    "of an unknown type": (lambda: weight(data_type=77), "unknown type 77"),
    "a sparse terabyte": (lambda: sparse([2**20, 2**20], [5]), "4398.0 GB written out"),
    "a sparse index": (lambda: sparse([2, 2], [4]), "has an index outside of [2, 2]"),
    "a negative sparse index": (lambda: sparse([2, 2], [-1]), "has an index outside of [2, 2]"),
    "sparse dimensions": (lambda: sparse([-2, 2], [0]), "has the dimensions [-2, 2]"),
    "sparse lengths": (lambda: sparse([2, 2], [0, 1]), "values of shape [1] and indices of shape [2]"),
    "a file elsewhere": (lambda: outside("../../etc/passwd"), "outside the folder of the model"),
    "a file far away": (lambda: outside("/etc/passwd"), "only places in the folder of the model"),
    "a file on a drive": (lambda: outside("C:\\boot.ini"), "only places in the folder of the model"),
    "a file hidden deep": (lambda: outside("a/../../b"), "outside the folder of the model"),
    "a file without a name": (lambda: outside(""), "without a place"),
    "a file with a zero": (lambda: outside("a\0b"), "without a place"),
    "a place before a file": (lambda: outside(offset=-8), "from -8 on"),
    "a place behind a file": (lambda: outside(offset=2**60), "which does not exist"),
    "a place that is none": (lambda: outside(offset="far"), "says in no number"),
    "a length": (lambda: outside(length=2**50), f"its external data {2**50} from 0"),
    "opset -1": (lambda: with_opset(-1), "imports opset -1"),
    "opset 2**62": (lambda: with_opset(2**62), "imports opset 4611686018427387904"),
    "opset 0": (lambda: with_opset(0), "imports opset 0"),
    "a billion laughs": (lambda: laughs(12), "come to 1000000000004 nodes"),
    "a deep nest": (lambda: nested(2000), "is not a readable ONNX model"),
    "a branch that is not there": (branch, "'then_branch' holds nothing"),
    "a branch of a function": (lambda: branch(("ref_attr_name", "b")), "an attribute of a function"),
    "text that is none": (
        lambda: with_node(helper.make_node("Einsum", ["y"], ["z"], equation=b"\xff\xfe")),
        "the attribute 'equation' holds text that is none",
    ),
    "a name that is no text": (lambda: no_text(b"\x01t", b"\x01\xff"), "is no text"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind, tmp_path):
    make, words = MODELS[kind]
    model = make()
    path = tmp_path / "m.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    tracemalloc.reset_peak()
    with pytest.raises(BadInput) as caught:
        check(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("op", "operand"),
    [
        ("ConstantOfShape (n)", {"n": [2**40]}),
        ("Range (a, n, d)", {"a": 0, "n": 2**40, "d": 1}),
        ("Expand (a, n)", {"a": 1, "n": [2**20, 2**20]}),
        ("Tile (a, n)", {"a": [1, 2], "n": [2**40]}),
        ("Pad (a, n)", {"a": [1, 2], "n": [2**40, 0]}),
        ("OneHot (a, n, d)", {"a": [1], "n": 2**40, "d": [0, 1]}),
    ],
    ids=lambda x: x.split()[0] if isinstance(x, str) else "",
)
def test_what_constants_ask_for_is_not_made(op, operand):
    """The model is valid: it is differentiated, and nothing of that size is made meanwhile."""
    derived = vjp(made(op, operand), wrt="x")
    assert derived.ByteSize() < 10_000


def test_external_data_behind_the_end_of_a_file(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    onnx.save(outside(offset=96), tmp_path / "m.onnx")
    with pytest.raises(BadInput, match="is cut off"):
        load_model(tmp_path / "m.onnx")


def npy(header: str) -> bytes:
    text = header.encode() + b" " * 20 + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def zipped(content: bytes) -> bytes:
    to = io.BytesIO()
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", content)
    return to.getvalue()


class Mine:
    def __reduce__(self):
        return (Path("executed").write_text, ("",))


def objects() -> bytes:
    to = io.BytesIO()
    np.save(to, np.array([Mine()], object), allow_pickle=True)
    return to.getvalue()


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (2500000000000,), }"
ARRAYS = {
    "a header of ten terabytes.npy": npy(HUGE),
    "a header of ten terabytes.npz": zipped(npy(HUGE)),
    "a negative header.npy": npy(HUGE.replace("2500000000000", "-1")),
    "a negative header.npz": zipped(npy(HUGE.replace("2500000000000", "-1"))),
    "a header that is code.npy": npy("__import__('os').system('touch executed')"),
    "a header that is code.npz": zipped(npy("__import__('os').system('touch executed')")),
    "objects.npy": objects(),
    "objects.npz": zipped(objects()),
    "a pickle.npy": pickle.dumps(Mine()),
    "a pickle.npz": pickle.dumps(Mine()),
    "a zipped pickle.npz": zipped(pickle.dumps(Mine())),
    "no array.npz": zipped(b"hello"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(ARRAYS[name])
    with pytest.raises(BadInput, match=name):
        Data(open_data(name), [Field("x", np.dtype(np.float32), ())])
    assert not Path("executed").exists()


def test_what_unpacks_to_more_than_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros(1_000_000))
    monkeypatch.setattr("os.sysconf", lambda name: 1000)
    with pytest.raises(BadInput, match=r"bomb\.npz' unpacks to .* memory"):
        open_data(path)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 100) + b"[" * 100,
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode(),
                json.dumps({"w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}).encode(),
                json.dumps({"__metadata__": {"onnxgrad.checkpoint": "[" * 100_000}}).encode(),
                json.dumps({"__metadata__": {"onnxgrad.checkpoint": '{"version": 1, "run": 7}'}}).encode(),
                json.dumps({"__metadata__": {"onnxgrad.checkpoint": '{"version": 1}'}}).encode(),
            )
        ),
    ],
    ids=["length", "brackets", "terabytes", "overflow", "deep", "no run", "nothing"],
)
def test_checkpoints(header, tmp_path):
    path = tmp_path / "c.safetensors"
    path.write_bytes(header)
    with pytest.raises(BadInput, match=r"c\.safetensors' is (damaged|not a checkpoint)"):
        Checkpoint.load(path)


def test_a_picture_is_what_its_name_says_or_nothing(tmp_path):
    """The library would hand PostScript, whatever the file is called, to a program that executes it."""
    pytest.importorskip("PIL")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    columns = open_data(tmp_path)
    with pytest.raises(BadInput, match="cannot read the picture"):
        columns["images"].take(np.arange(1), Field("images", np.dtype(np.float32), (3, 8, 8)))


# --- what is no ordinary file ------------------------------------------------------------------------


def _pipe(path):
    os.mkfifo(path)


def _device(path):
    os.symlink("/dev/zero", path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


def _resumed_log(path):
    log = Log(path)
    try:
        log.start(SimpleNamespace(step_count=1, epoch=1))
    finally:
        log.stop()


READERS = {
    "model.onnx": check,
    "loss.onnx": lambda path: attach(classifier(), loss=path, optimizer="sgd"),
    "rule.onnx": load_rule,
    "data.npz": open_data,
    "data.npy": open_data,
    "data.parquet": open_data,
    "data.arrow": open_data,
    "folder/x.npy": lambda path: open_data(os.path.dirname(path)),
    "classes/a/x.png": lambda path: open_data("classes")["images"].take(
        np.arange(1), Field("images", np.dtype(np.float32), (3, 8, 8))
    ),
    "checkpoint.safetensors": lambda path: Checkpoint.load(Path(path)),
    "log.jsonl": _resumed_log,
}


@pytest.mark.parametrize("special", [_pipe, _device, _socket])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_ordinary_file_is_not_opened(name, special, tmp_path, monkeypatch):
    """A pipe would be waited for, and its writer would go on; a device never ends."""
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    special(name)
    opened = os.open

    def open_no(path, flags, *more, **options):
        assert os.fspath(path) != name, "it was opened"
        return opened(path, flags, *more, **options)

    monkeypatch.setattr("os.open", open_no)
    with pytest.raises(BadInput, match="ordinary file"):
        READERS[name](name)


@pytest.mark.parametrize("special", [_pipe, _device, _socket])
def test_what_is_called_like_a_temporary_file(special, tmp_path, monkeypatch):
    """It is neither opened nor removed, and not waited for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("mine")
    os.symlink(tmp_path / "mine", ".m.onnx.aaaaaaaa.partial")
    special(".m.onnx.bbbbbbbb.partial")
    save_model(mlp(), "m.onnx")
    assert onnx.load("m.onnx") == mlp()
    assert os.path.lexists(".m.onnx.bbbbbbbb.partial")
    assert (tmp_path / "mine").read_text() == "mine"


#: What the fuzzer has found, by its number; none of it comes back.
FOUND = (
    11,
    12,
    43,
    45,
    164,
    206,
    276,
    315,
    396,
    402,
    448,
    890,
    941,
    1066,
    1142,
    1322,
    101284,
    104385,
    104742,
    105295,
    105305,
)
FOUND += (107705, 112063, 112196, 112955, 200765, 243332)


@pytest.mark.parametrize(
    "numbers", [(*FOUND, *range(5000, 5010)), pytest.param(range(5010, 5100), marks=pytest.mark.complete)], ids=len
)
def test_at_random(tmp_path, numbers):
    """A few of the many cases of `tests.fuzz`; those that once fell out among them."""
    for number in numbers:
        what, outcome = fuzz.attempt(number, tmp_path)
        assert "Traceback" not in outcome, f"case {number}, {what}: {outcome}"
        tracemalloc.reset_peak()
