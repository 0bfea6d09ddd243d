"""Small files that ask for much: each is answered in little time and memory, and large honest models pass.

Every case runs in a process of its own, with an end to its time and memory far above what it takes.
"""

from __future__ import annotations

import functools
import io
import itertools
import resource

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad import BadInput, Function, grad, vjp
from onnxgrad.check import check
from onnxgrad.model_io import open_model, read
from onnxgrad.model_io.checks import declared_sizes, notes_in_files
from onnxgrad.training.data import Field, open_data
from tests.commands import script

BYTES = 3 << 30


def graph(nodes, initializers=None, x=("x", TensorProto.FLOAT, [2]), y=None, inputs=(), functions=(), values=()):
    held = [numpy_helper.from_array(np.array(v), k) for k, v in (initializers or {}).items()]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, y)
    ends = [helper.make_tensor_value_info(*x), *(helper.make_tensor_value_info(*i) for i in inputs)]
    body = helper.make_graph(nodes, "g", ends, [out], held, value_info=list(values))
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    return helper.make_model(body, opset_imports=imports, functions=list(functions), ir_version=10)


def node(op, *operands, to, **attributes):
    return helper.make_node(op, list(operands), [to], **attributes)


def doubled(op, operand, rest=(), depth=34, initializers=None, dtype=np.int64, **attributes):
    """`op` on its own result, over and over; what comes out is the shape of the result."""
    nodes = [
        node(op, f"t{i}", *([f"t{i}"] if operand == "twice" else rest), to=f"t{i + 1}", **attributes)
        for i in range(depth)
    ]
    nodes += [helper.make_node("ReduceProd", [f"t{depth}"], ["s"], keepdims=0)]
    nodes += [helper.make_node("Cast", ["s"], ["c"], to=1), node("Mul", "x", "c", to="y")]
    return graph(nodes, {"t0": np.ones(2, dtype), **(initializers or {})})


def laughs(depth, calls=10):
    functions = []
    for i in range(depth):
        inner = [
            helper.make_node(
                f"f{i - 1}" if i else "Neg", [f"v{k}" if k else "a"], [f"v{k + 1}"], domain="f" if i else ""
            )
            for k in range(calls)
        ]
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
        functions.append(helper.make_function("f", f"f{i}", ["a"], [f"v{calls}"], inner, imports))
    return graph([helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="f")], functions=functions)


def shaped_by(op, length):
    """A shape of so many axes that an input says."""
    data = ["x"] if op != "ConstantOfShape" else []
    nodes = [helper.make_node(op, [*data, "s"], ["z"]), node("ReduceSum", "z", to="r"), node("Mul", "x", "r", to="y")]
    return graph(nodes, inputs=[("s", TensorProto.INT64, [length])])


def squares(depth):
    """A size whose formula doubles with every node."""
    nodes = [node("Shape", "x", to="a0"), node("Shape", "z", to="b0")]
    for i in range(depth):
        nodes += [node("Mul", f"a{i}", f"b{i}", to=f"m{i}"), node("Add", f"m{i}", f"a{i}", to=f"a{i + 1}")]
        nodes += [node("Sub", f"m{i}", f"b{i}", to=f"b{i + 1}")]
    nodes += [node("Expand", "one", f"a{depth}", to="e"), node("ReduceSum", "e", to="r"), node("Mul", "x", "r", to="y")]
    given = ("x", TensorProto.FLOAT, ["N"]), ("z", TensorProto.FLOAT, ["M"])
    return graph(nodes, {"one": np.float32([1])}, x=given[0], inputs=[given[1]])


def notes(size):
    model = graph([node("Neg", "x", to="y")])
    model.metadata_props.add(key="k", value="v" * size)
    return model


def documented(nodes, size):
    """A text of so many bytes at the model, and at each of so many nodes."""
    names = [f"v{i}" for i in range(nodes)]
    chain = [node("Neg", a, to=b) for a, b in itertools.pairwise(["x", *names])]
    model = graph([*chain, node("Neg", names[-1], to="y")])
    for held in (model, model.graph, *model.graph.node):
        held.doc_string = "d" * size
    return model


def loops(depth):
    """A Loop in a Loop in a Loop, a thousand million times each."""
    name, nodes = f"w{depth}", [helper.make_node("Mul", [f"w{depth}", f"w{depth}"], [f"r{depth}"])]
    for i in range(depth, 0, -1):
        info = helper.make_tensor_value_info
        body = helper.make_graph(
            [*nodes, helper.make_node("Identity", [f"c{i}"], [f"d{i}"])],
            f"b{i}",
            [info(f"i{i}", 7, []), info(f"c{i}", 9, []), info(f"w{i}", 1, [2])],
            [info(f"d{i}", 9, []), info(f"r{i}", 1, [2])],
        )
        into, out = (f"w{i - 1}", f"r{i - 1}") if i > 1 else ("x", "y")
        nodes = [helper.make_node("Loop", ["n", "", into], [out], body=body)]
        name = into
    assert name == "x"
    return graph(nodes, {"n": 10**9})


def made(op, *operands, then=(), **attributes):
    """A large tensor that `op` makes of small constants; its sum scales the result."""
    held = {f"c{i}": v for i, v in enumerate(operands) if v is not None}
    given = [f"c{i}" if v is not None else "" for i, v in enumerate(operands)]
    nodes = [node(op, *given, to="t0", **attributes)]
    nodes += [node(after, f"t{i}", to=f"t{i + 1}") for i, after in enumerate(then)]
    nodes += [helper.make_node("Cast", [f"t{len(then)}"], ["f"], to=TensorProto.FLOAT)]
    nodes += [node("ReduceSum", "f", to="r", keepdims=0), node("Mul", "x", "r", to="y")]
    return graph(nodes, held)


def repeated(op, *before, after=(), depth=30):
    """`op` on its own result of long whole numbers."""
    nodes = [node(op, *before, f"t{i}", *after, to=f"t{i + 1}") for i in range(depth)]
    nodes += [helper.make_node("Cast", [f"t{depth}"], ["f"], to=TensorProto.FLOAT)]
    nodes += [node("ReduceSum", "f", to="r", keepdims=0), node("Mul", "x", "r", to="y")]
    held = {"t0": np.arange(200_000), "i": np.arange(200_000) % 7, "c": np.ones(200_000, bool)}
    return graph(nodes, {name: held[name] for name in {"t0", *before, *after}})


def calls(depth):
    """Functions that each call the one before."""
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    functions = [
        helper.make_function(
            "f",
            f"f{i}",
            ["a"],
            ["b"],
            [helper.make_node(f"f{i - 1}" if i else "Neg", ["a"], ["b"], domain="f" if i else "")],
            imports,
        )
        for i in range(depth)
    ]
    return graph([helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="f")], functions=functions)


BIG = 2**32
PLANE = np.array([10**5, 10**5])
#: What it is: a model, and words of the refusal; none if it is a valid model.
MODELS = {
    "ints doubled by Concat": (lambda: doubled("Concat", "twice", axis=0), ""),
    "floats doubled by Concat": (lambda: doubled("Concat", "twice", dtype=np.float32, axis=0), ""),
    "a tile of a hundred, ten times": (
        lambda: doubled("Tile", "", ["r"], 10, {"r": np.array([100])}),
        "more than can be counted in 64 bits",
    ),
    "a tile of two": (lambda: doubled("Tile", "", ["r"], 34, {"r": np.array([2])}), ""),
    "padded": (lambda: doubled("Pad", "", ["r"], 34, {"r": np.array([2**30, 2**30])}), ""),
    "gathered by long indices": (
        lambda: doubled("Gather", "", ["r"], 30, {"r": np.zeros(200_000, np.int64)}),
        "",
    ),
    "a Split of a declared size": (
        lambda: graph(
            [
                helper.make_node("Split", ["x"], ["a", "b", "c"], num_outputs=3),
                node("ReduceSum", "b", to="r"),
                node("Mul", "a", "r", to="y"),
            ],
            x=("x", TensorProto.FLOAT, ["N"]),
            values=[helper.make_tensor_value_info("b", TensorProto.FLOAT, [BIG])],
        ),
        "",
    ),
    "an input of many axes": (
        lambda: graph([node("Neg", "x", to="y")], x=("x", TensorProto.FLOAT, [1] * 100_000)),
        "100000 axes",
    ),
    "a weight of many axes": (lambda: graph([node("Mul", "x", "w", to="y")], {"w": np.ones(1, np.float32)}), "axes"),
    "Reshape to many axes": (lambda: shaped_by("Reshape", BIG), "axes"),
    "Expand to many axes": (lambda: shaped_by("Expand", BIG), "axes"),
    "ConstantOfShape of many axes": (lambda: shaped_by("ConstantOfShape", BIG), "axes"),
    "Unsqueeze of many axes": (
        lambda: graph([node("Unsqueeze", "x", "a", to="u"), node("Neg", "u", to="y")], {"a": np.arange(100_000)}),
        "axes",
    ),
    "functions in functions": (lambda: laughs(5), "come to 100000 nodes"),
    "a formula that doubles": (lambda: squares(40), ""),
    "two hundred megabytes of notes": (lambda: notes(200_000_000), "64 MiB of metadata"),
    "a megabyte of documentation at a hundred places": (lambda: documented(100, 1_000_000), "64 MiB of metadata"),
    "OneHot": (lambda: made("OneHot", np.zeros(9, np.int64), np.int64(10**10), np.float32([0, 1])), ""),
    "Resize by sizes": (lambda: made("Resize", np.ones((2, 2), np.float32), None, None, PLANE), ""),
    "Resize by scales": (
        lambda: made("Resize", np.ones((2, 2), np.float32), None, np.float32([1e5, 1e5]), mode="linear"),
        "",
    ),
    "Pad": (lambda: made("Pad", np.ones((2, 2), np.float32), np.array([10**5] * 4)), ""),
    "Range": (lambda: made("Range", np.int64(0), np.int64(10**11), np.int64(1)), ""),
    "Expand": (lambda: made("Expand", np.ones(1, np.int64), PLANE), ""),
    "Tile": (lambda: made("Tile", np.ones((1, 1), np.int64), PLANE), ""),
    "ConstantOfShape": (lambda: made("ConstantOfShape", PLANE, then=["NonZero"]), ""),
    "EyeLike": (lambda: made("ConstantOfShape", PLANE, then=["EyeLike"]), ""),
    "an outer product": (lambda: made("Mul", np.ones((10**5, 1), np.int64), np.ones((1, 10**5), np.int64)), ""),
    "many Where": (lambda: repeated("Where", "c", after=["i"]), ""),
    "many Gather": (lambda: repeated("Gather", after=["i"]), ""),
    "a thousand functions, each calling the next": (lambda: calls(1000), ""),
    "loops in loops": (lambda: loops(12), ""),
}

_RUN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
import onnxgrad
from onnxgrad.check import check
try:
    check(sys.argv[1])
    onnxgrad.grad(sys.argv[1], wrt="x")
except onnxgrad.OnnxGradError as error:
    print(type(error).__name__, error)
"""


def run(path, text=_RUN) -> str:
    """The library's message about the model at `path`."""
    (path.parent / "run.py").write_text(text)
    found = script(path.parent / "run.py", path, BYTES)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", MODELS)
def test_models(kind, tmp_path):
    make, words = MODELS[kind]
    model = make()
    if kind == "a weight of many axes":
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend([1] * 100_000)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    said = run(tmp_path / "m.onnx")
    assert words in said if words else not said, said
    assert len(said) < 500


@pytest.mark.parametrize("depth", [25, 200, 5_000])
def test_branches_in_branches(depth, tmp_path):
    """Written as bytes, since the package protobuf copies no message that deep."""

    def field(number, content):
        size, left = b"", len(content)
        while left > 127:
            size, left = size + bytes([left & 127 | 128]), left >> 7
        return bytes([number << 3 | 2]) + size + bytes([left]) + content

    def body(step, name):
        result = helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
        return field(1, step) + field(2, b"b") + field(12, result.SerializeToString())

    step = node("Neg", "x", to=f"o{depth}").SerializeToString()
    for i in reversed(range(depth)):
        branches = body(step, f"o{i + 1}"), body(node("Abs", "x", to=f"e{i}").SerializeToString(), f"e{i}")
        step = field(1, b"c") + field(2, f"o{i}".encode()) + field(4, b"If")
        for name, branch in zip((b"then_branch", b"else_branch"), branches):
            step += field(5, field(1, name) + field(6, branch) + b"\xa0\x01\x05")
    model = graph([node("Identity", "o0", to="y")], inputs=[("c", TensorProto.BOOL, [])])
    content = model.SerializeToString()
    whole = field(7, field(1, step) + model.graph.SerializeToString())
    (tmp_path / "m.onnx").write_bytes(content.replace(field(7, model.graph.SerializeToString()), whole))
    said = run(tmp_path / "m.onnx")
    assert "its graphs lie deeper in each other than" in said if depth > 25 else not said, said


def test_a_concat_of_a_million_floats():
    """An honest model."""
    size = 1_000_000
    model = graph([node("Concat", "x", "x", to="y", axis=0)], x=("x", TensorProto.FLOAT, [size]), y=[2 * size])
    derived = grad(model, wrt="x")
    assert derived.ByteSize() < 10_000


def test_many_calls_of_one_function_are_inlined_in_linear_time():
    """Ten thousand, which took minutes for counting up names."""
    inner = [node("Neg", "a", to="b"), node("Abs", "b", to="c")]
    function = helper.make_function("f", "f", ["a"], ["c"], inner, [helper.make_opsetid("", 21)])
    names = ["x", *(f"v{i}" for i in range(9_999)), "y"]
    calls = [helper.make_node("f", [a], [b], domain="f") for a, b in itertools.pairwise(names)]
    opened = open_model(graph(calls, functions=[function]))
    made = [v.name for n in opened.model.graph for v in n.outputs]
    assert len(made) == len(set(made)) == 20_000


# --- data -------------------------------------------------------------------------------------------


def test_a_table_that_unpacks_to_more_than_such_data_come_to(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "bomb.parquet"
    column = pa.chunked_array([pa.array(np.zeros(2_000_000))])
    schema = pa.schema([("x", pa.float64())])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for _ in range(80):
            writer.write_table(pa.table({"x": column}))
    assert path.stat().st_size < 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match=r"bomb\.parquet' unpacks to 1\.3 GB, more than 100 times"):
        open_data(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("packed", ["zstd", "lz4"])
@pytest.mark.parametrize("kind", ["numbers", "words", "nothing"])
def test_an_arrow_file_that_unpacks_to_more_than_such_data_come_to(packed, kind, tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setattr("onnxgrad.training.data.sources.FREE", 1 << 20)
    column = {
        "numbers": lambda: pa.array(np.zeros(1_000_000)),
        "words": lambda: pa.array(["a" * 4_000_000]).dictionary_encode(),
        "nothing": lambda: pa.nulls(10_000_000),
    }[kind]()
    path = tmp_path / "bomb.arrow"
    with pa.OSFile(str(path), "wb") as to:
        table = pa.table({"x": column})
        with pa.ipc.new_file(to, table.schema, options=pa.ipc.IpcWriteOptions(compression=packed)) as writer:
            writer.write_table(table)
    monkeypatch.setattr("pyarrow.feather.read_table", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(BadInput, match=r"bomb\.arrow' unpacks to 0\.0 GB, more than 100 times"):
        open_data(path)


@pytest.mark.parametrize("packed", ["zstd", "uncompressed"])
def test_an_honest_feather_file(packed, tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather

    monkeypatch.setattr("onnxgrad.training.data.sources.FREE", 1 << 10)
    x = np.random.default_rng(0).standard_normal(10_000)
    table = pa.table({"x": x, "t": pa.array(["a", "b"] * 5_000)})
    pyarrow.feather.write_feather(table, tmp_path / "d.feather", compression=packed, chunksize=1_000)
    columns = open_data(tmp_path / "d.feather")
    assert np.array_equal(columns["x"].array, x)
    assert columns["t"].array.tolist() == ["a", "b"] * 5_000


@pytest.mark.parametrize("at", [10, 4, -200])
def test_an_arrow_file_whose_end_is_damaged(at, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather

    path = tmp_path / "d.feather"
    pyarrow.feather.write_feather(pa.table({"x": np.arange(100.0)}), path)
    content = bytearray(path.read_bytes())
    content[-10:-6] = at.to_bytes(4, "little", signed=True)
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"cannot read .*d\.feather' as a table"):
        open_data(path)


def test_text_in_a_table_is_still_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pa.table({"t": ["a", "b", "a"], "x": [[1.0], [2.0], [3.0]]}), path)
    columns = open_data(path)
    assert columns["t"].array.tolist() == ["a", "b", "a"]


def test_arrays_that_unpack_to_more_than_such_data_come_to(tmp_path, monkeypatch):
    monkeypatch.setattr("onnxgrad.training.data.sources.FREE", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(1_000_000))
    with pytest.raises(BadInput, match=r"bomb\.npz' unpacks to 0\.0 GB, more than 100 times"):
        open_data(tmp_path / "bomb.npz")
    np.savez_compressed(tmp_path / "honest.npz", x=np.random.default_rng(0).standard_normal(300_000))
    assert len(open_data(tmp_path / "honest.npz")["x"]) == 300_000


@pytest.mark.sweep(2)
@pytest.mark.parametrize("size", [(20_000, 20_000), (100_000, 1_000)])
def test_a_picture_of_more_pixels_than_pictures_have(size, tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    to = io.BytesIO()
    image.new("1", size).save(to, "PNG")
    (tmp_path / "a" / "x.png").write_bytes(to.getvalue())
    with pytest.raises(BadInput, match=r"cannot read the picture .*pixels"):
        open_data(tmp_path)["images"].take(np.arange(1), Field("images", np.dtype(np.float32), (3, 8, 8)))


def test_a_model_that_takes_pictures_of_more_pixels_than_pictures_have(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.new("RGB", (8, 8)).save(tmp_path / "a" / "x.png")
    with pytest.raises(BadInput, match="100000 by 100000 pixels"):
        open_data(tmp_path)["images"].take(np.arange(1), Field("images", np.dtype(np.float32), (3, 100_000, 100_000)))


# --- declarations -----------------------------------------------------------------------------------

DECLARED = {
    "a shape that the operator does not give": (
        """g (double[3, 2, 2] data, int64[1] axes) => (double[2, 1, 3] reduced) {
            reduced = ReduceLogSumExp <keepdims = 1> (data, axes) }""",
        "declares contradict its operators, which shows at ReduceLogSumExp node 'reduced'",
    ),
    "scales that are no vector": (
        """g (float[1, 1, 4, 4] data, float[1, 3, 8, 8] scales) => (float[1, 1, 8, 8] y) {
            y = Resize <mode = "cubic"> (data, , scales) }""",
        r"the model is not valid: .*Resize node. Name:'y'.*elements in scales",
    ),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", DECLARED)
@pytest.mark.parametrize("how", ["path", "proto", "ir"])
def test_what_a_model_declares_wrongly_is_no_bug_in_a_rule(kind, how, tmp_path):
    text, words = DECLARED[kind]
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> ' + text)
    onnx.save(model, tmp_path / "m.onnx")
    given = {"path": tmp_path / "m.onnx", "proto": model, "ir": ir.from_proto(model)}[how]
    for derive in (check, functools.partial(grad, wrt="data")):
        with pytest.raises(BadInput, match=words):
            derive(given)


LARGE = {
    "AveragePool": ("[1, 1, 1000000]", "AveragePool <kernel_shape = [3], strides = [2]> (x)"),
    "AveragePool, padded": ("[1, 1, 1000000]", "AveragePool <kernel_shape = [3], pads = [1, 1], ceil_mode = 1> (x)"),
    "AveragePool, SAME": (
        "[1, 1, 1000000]",
        'AveragePool <kernel_shape = [3], strides = [2], auto_pad = "SAME_UPPER"> (x)',
    ),
    "AveragePool of long windows": ("[1, 1, 1000000000]", "AveragePool <kernel_shape = [500000000]> (x)"),
    "AveragePool, unknown": ("[1, 1, N]", "AveragePool <kernel_shape = [10000000000]> (x)"),
    "LpPool": ("[1, 1, 4000, 4000]", "LpPool <kernel_shape = [3, 3], strides = [2, 1]> (x)"),
    "LpPool of long windows": ("[1, 1, N]", "LpPool <kernel_shape = [1000000000]> (x)"),
    "MaxPool": ("[1, 1, 4000, 4000]", "MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)"),
    "MaxPool of large tiles": (
        "[1, 1, 100000, 100000]",
        "MaxPool <kernel_shape = [50000, 50000], strides = [50000, 50000]> (x)",
    ),
    "LRN": ("[1, 1000000, 1, 1]", "LRN <size = 5> (x)"),
    "LRN of all channels": ("[1, C, 1, 1]", "LRN <size = 1000000001> (x)"),
    "Det": ("[100000, 100000]", "Det (x)"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", LARGE)
def test_a_rule_writes_no_large_constant(kind, tmp_path):
    """Matrices of bands, places of tiles and unit matrices of the sizes that a model declares."""
    shape, op = LARGE[kind]
    result = "" if kind == "Det" else str(["K"] * shape.count(",") + ["K"]).replace("'", "")
    text = f"g (float{shape} x) => (float{result} y) {{ y = {op} }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]> {text}')
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    said = run(tmp_path / "m.onnx", _RUN.replace("onnxgrad.grad(", "onnxgrad.vjp("))
    assert not said, said
    assert vjp(model, wrt="x").ByteSize() < 100_000


def _derivative(text, x):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]> {text}')
    g = np.random.default_rng(1).standard_normal(Function(model)(x).shape).astype(np.float32)
    return Function(vjp(model, wrt="x"))(x, g)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "op",
    [
        "AveragePool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 1]> (x)",
        "AveragePool <kernel_shape = [3, 2], pads = [1, 0, 1, 1], count_include_pad = 1> (x)",
        "AveragePool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x)",
        "AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1> (x)",
        "AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], ceil_mode = 1, count_include_pad = 1> (x)",
        'AveragePool <kernel_shape = [3, 3], strides = [2, 2], auto_pad = "SAME_UPPER"> (x)',
        'AveragePool <kernel_shape = [3, 2], auto_pad = "SAME_LOWER"> (x)',
        "AveragePool <kernel_shape = [2, 2], dilations = [2, 1], strides = [2, 3]> (x)",
        "LpPool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 1]> (x)",
        "LpPool <kernel_shape = [3, 3], p = 3> (x)",
        "MaxPool <kernel_shape = [2, 4], strides = [2, 4]> (x)",
        "LRN <size = 5, alpha = 0.5> (x)",
        "LRN <size = 1001, alpha = 0.5> (x)",
        "Det (x)",
    ],
)
@pytest.mark.parametrize("most", [0, 10])
def test_without_large_constants_the_derivative_is_the_same(op, most, monkeypatch):
    shape, result = ((3, 5, 5), "[K]") if "Det" in op else ((2, 3, 8, 8), "[I, J, K, L]")
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    text = f"g (float{list(shape)} x) => (float{result} y) {{ y = {op} }}"
    expected = _derivative(text, x)
    for module in ("pool.window_sums", "pool.pooling", "linalg", "norm"):
        monkeypatch.setattr(f"onnxgrad.rules.{module}.MOST_WRITTEN", most)
    found = _derivative(text, x)
    assert len(found) == len(expected) == 2
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["ReduceProd <keepdims = 0> (x)", "CumProd (x, zero)"])
def test_a_derivative_holds_no_large_constant(op):
    """n times n for n elements: written out for few, computed by the graph for many."""
    opset = 26 if "Cum" in op else 21
    shape = "n" if "Cum" in op else ""
    text = f"g (float[50000] x) => (float[{shape}] y) <int64 zero = {{0}}> {{ y = {op} }}"
    model = onnx.parser.parse_model(f'<ir_version: 13, opset_import: ["": {opset}]> {text}')
    assert grad(model, wrt="x").ByteSize() < 100_000


NOTED = {
    "model": lambda model: model,
    "graph": lambda model: model.graph,
    "node": lambda model: model.graph.node[0],
    "function": lambda model: model.functions.add(name="f", domain="d"),
    "node of a function": lambda model: model.functions.add(name="f", domain="d").node.add(op_type="Neg"),
}


@pytest.mark.parametrize("kind", ["metadata", "documentation"])
@pytest.mark.parametrize("where", NOTED)
def test_notes_are_counted_before_the_file_is_parsed(tmp_path, monkeypatch, where, kind):
    """Parsing takes several times the size of the file."""
    for module in (notes_in_files, declared_sizes):
        monkeypatch.setattr(module, "MOST_NOTES", 5000)
    model = graph([node("Neg", "x", to="y")], {"w": np.ones(9000, np.float32)})
    onnx.save(model, tmp_path / "m.onnx")
    read.parse(tmp_path / "m.onnx")  # weights are no notes
    top = NOTED[where](model)
    if kind == "documentation":
        top.doc_string = "x" * 6000
    else:
        for k in range(300):
            top.metadata_props.add(key=str(k), value="x" * 20)
    onnx.save(model, tmp_path / "m.onnx")
    monkeypatch.setattr(onnx, "load", None)
    with pytest.raises(BadInput, match="MiB of metadata, which are not read"):
        read.parse(tmp_path / "m.onnx")


def test_documentation_of_the_last_node_is_counted(monkeypatch):
    monkeypatch.setattr(declared_sizes, "MOST_NOTES", 5000)
    model = graph([node("Neg", "x", to="y")])
    model.graph.node[0].doc_string = "x" * 6000
    with pytest.raises(BadInput, match="MiB of metadata, which are not read"):
        declared_sizes.check_message(model, "the model")


def test_what_is_no_message_is_left_to_the_parser(tmp_path, monkeypatch):
    monkeypatch.setattr(notes_in_files, "MOST_NOTES", 100)
    rng = np.random.default_rng(0)
    for content in (b"\xff" * 500, b"\x3a\xff\xff\xff\xff\x0f" + b"x" * 500, *(rng.bytes(300) for _ in range(50))):
        (tmp_path / "m.onnx").write_bytes(content)
        with pytest.raises(BadInput, match=r"is not a readable ONNX model|MiB of metadata"):
            read.parse(tmp_path / "m.onnx")
