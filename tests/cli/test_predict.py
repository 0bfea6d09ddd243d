"""``onnxgrad predict``, ``evaluate`` and ``info``: files in, files and lines out."""

import csv
import json

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.cli.console import warn_once
from onnxgrad.errors import BadInput
from tests.cli.said import said
from tests.training.models import classifier

X = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
NAMES = ["ant", "bee", "cat"]


@pytest.fixture
def files(tmp_path):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N, 3] x) => (float[N, 3] y) { y = Identity(x) }'
    )
    proto.metadata_props.add(key="onnxgrad.classes", value=json.dumps(NAMES))
    onnx.save(proto, tmp_path / "m.onnx")
    lines = [",".join([*map(str, row.tolist()), NAMES[row.argmax()]]) for row in X]
    (tmp_path / "d.csv").write_text("a,b,c,kind\n" + "\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_predictions_as_a_table(files, suffix):
    pytest.importorskip("pyarrow")
    said(files, f"predict PLACE/m.onnx --data PLACE/d.csv --input x=a..c -o PLACE/p.{suffix}")
    with (files / f"p.{suffix}").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="," if suffix == "csv" else "\t"))
    np.testing.assert_array_equal([[float(r[f"y_{k}"]) for k in range(3)] for r in rows], X)
    assert [r["y_class"] for r in rows] == [NAMES[k] for k in X.argmax(1)]


@pytest.mark.parametrize(("head", "middle"), [("y = Identity(s)", 0), ("y = Sigmoid(s)", 0.5)])
@pytest.mark.parametrize("shape", ["N", "N, 1"])
def test_one_score_names_two_classes(tmp_path, head, middle, shape):
    """Log-odds above 0, or a probability above a half, are the second class; other outputs have no column of it."""
    axes = "o = Constant <value = int64[1] {1}> ()" + f"t = ReduceSum <keepdims = {int(shape != 'N')}> (x, o)"
    text = f"g (float[N, 3] x) => (float[{shape}] y, float[N, 3] z) {{ {axes} s = Neg(t) {head} z = Neg(x) }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    proto.metadata_props.add(key="onnxgrad.classes", value=json.dumps(["no", "yes"]))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X)
    said(tmp_path, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.csv")
    rows = list(csv.DictReader((tmp_path / "p.csv").open(newline="")))
    assert [r["y_class"] for r in rows] == ["yes" if total < 0 else "no" for total in X.sum(1)]
    assert "z_class" not in rows[0]


def test_predictions_as_arrays(files):
    np.savez(files / "d.npz", x=X)
    said(files, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.npz")
    np.testing.assert_array_equal(np.load(files / "p.npz")["y"], X)


def test_metrics_and_a_table_of_classes(files):
    pytest.importorskip("pyarrow")
    line = "evaluate PLACE/m.onnx --data PLACE/d.csv --input x=a..c --labels kind --metrics accuracy,auc"
    text = said(files, line)
    assert "accuracy             1" in text
    assert "9 labels 'kind' against the output 'y' (classes)" in text
    found = json.loads(said(files, line + " --json"))
    assert found["metrics"] == {"accuracy": 1, "auc": 1}
    assert set(found["classes"]) <= set(NAMES)


def test_what_a_model_is(files):
    text = said(files, "info PLACE/m.onnx")
    assert "input      x  float32[N, 3]" in text
    assert "classes    ant, bee, cat" in text
    found = json.loads(said(files, "info PLACE/m.onnx --json"))
    assert found["inputs"] == [{"name": "x", "type": "float32[N, 3]", "dtype": "float", "shape": ["N", 3]}]
    assert found["operators"] == {"Identity": 1}


def test_names_are_shown_whole_and_what_trains_is_counted(tmp_path):
    name = "layer." * 60 + "scores"
    model = classifier()
    model.graph.node[-1].output[0] = model.graph.output[0].name = name
    onnx.save(model, tmp_path / "m.onnx")
    text = said(tmp_path, "info PLACE/m.onnx")
    assert f"output     {name}  float32[N, 3]" in text
    assert "trains     3 tensors, 80 numbers" in text
    assert json.loads(said(tmp_path, "info PLACE/m.onnx --json"))["trains"] == "3 tensors, 80 numbers"


def test_a_warning_is_shown_once(capsys):
    warn = warn_once()
    for text in ("a", "b", "a"):
        warn(UserWarning(text), UserWarning, "file.py", 3)
    assert capsys.readouterr().err.splitlines() == ["warning: a", "warning: b"]


def test_text_in_the_place_of_numbers_shows_no_type_of_numpy(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.array([["a"] * 6] * 4))
    problem = said(tmp_path, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.csv", code=2)
    assert "<U" not in problem
    assert "holds text ('a')" in problem


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "predict PLACE/m.onnx --data PLACE/d.csv -o PLACE/p.npz",
            "--inputs x=a..c (in Python inputs=",
        ),
        ("predict PLACE/m.onnx --data PLACE/d.csv --input x=a..c -o PLACE/p.txt", "none of .csv, .tsv, .npz"),
        ("predict PLACE/m.onnx --data PLACE/d.csv --input x=a..c -o PLACE/d.csv", "--data"),
        ("predict PLACE/m.onnx --data PLACE/d.csv --input x -o PLACE/p.npz", "not written as X=f0..f63"),
        ("predict PLACE/m.onnx --data PLACE/d.csv --input x=a..d -o PLACE/p.npz", "no column named 'd'"),
        (
            "evaluate PLACE/m.onnx --data PLACE/d.csv --input x=a..c --metrics ,",
            "no metric is named; there are",
        ),
        ("info PLACE/none.onnx", "none.onnx"),
    ],
)
def test_what_does_not_fit_is_refused(files, line, words):
    pytest.importorskip("pyarrow")
    before = {p: p.read_bytes() for p in files.iterdir()}
    assert words in said(files, line, code=2)
    assert {p: p.read_bytes() for p in files.iterdir()} == before


TABLE = """
    <ir_version: 10, opset_import: ["": 21]>
    g (float[N, 3] x) => (float[N] price, float[N, 1, 3] range, int64[N] best, float[N, 0] none, bfloat16[N, 3] half) {
        one = Constant <value = int64[1] {1}> ()
        zero = Constant <value = int64[1] {0}> ()
        price = ReduceSum <keepdims = 0> (x, one)
        range = Unsqueeze (x, one)
        best = ArgMax <axis = 1, keepdims = 0> (x)
        none = Slice (x, zero, zero, one)
        half = Cast <to = 16> (x)
    }"""


def test_a_table_has_one_width(tmp_path):
    onnx.save(onnx.parser.parse_model(TABLE), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X)
    said(tmp_path, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.csv")
    heading, *rows = csv.reader((tmp_path / "p.csv").open(newline=""))
    cells = "range_0_0 range_0_1 range_0_2"
    assert heading == f"price {cells} best half_0 half_1 half_2".split()
    assert {len(row) for row in rows} == {len(heading)}
    np.testing.assert_allclose([float(row[0]) for row in rows], X.sum(1), rtol=1e-6)
    np.testing.assert_array_equal([row[4] for row in rows], X.argmax(1).astype(str))
    said(tmp_path, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.npz")
    arrays = np.load(tmp_path / "p.npz")
    assert {n: arrays[n].shape for n in arrays} == {
        "price": (9,), "range": (9, 1, 3), "best": (9,), "none": (9, 0), "half": (9, 3)
    }  # fmt: skip
    assert arrays["half"].dtype == np.float32


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ("float[N, 2] y, float[N] y_1", "two columns would be called 'y_1'"),
        ("float[1] t, float[N] y_1", "'t' is float32[1] for 9 rows"),
        ("seq(float) s, float[N] y_1", "'s' is no tensor"),
    ],
)
def test_outputs_that_are_no_columns_are_refused(tmp_path, outputs, words):
    nodes = """
        one = Constant <value = int64[1] {1}> ()
        y_1 = ReduceSum <keepdims = 0> (x, one)
        y = Concat <axis = 1> (x, x)
        zero = Constant <value = int64[1] {0}> ()
        t = ReduceSum <keepdims = 0> (x, zero)
        s = SequenceConstruct (x, x)"""
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 1] x) => '
    outputs = outputs.replace("seq(float) s", "seq(float[N, 1]) s")
    onnx.save(onnx.parser.parse_model(f"{head}({outputs}) {{{nodes}}}"), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X[:, :1])
    assert words in said(tmp_path, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.csv", code=2)
    assert not (tmp_path / "p.csv").exists()


def test_text_is_text_to_a_spreadsheet(tmp_path):
    texts = ["=cmd|' /C calc'!A0", "+a", "-1.5", "@x", "＝1", "\n=1", "plain"]
    node = onnx.helper.make_node(
        "LabelEncoder", ["k"], ["=file"], domain="ai.onnx.ml", keys_int64s=[*range(7)], values_strings=texts
    )
    types = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "g", [types("k", 7, ["N"])], [types("=file", 8, ["N"])])
    sets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=sets, ir_version=10), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", k=np.arange(7))
    said(tmp_path, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.csv")
    heading, *rows = csv.reader((tmp_path / "p.csv").open(newline=""))
    assert [heading, *rows] == [
        ["'=file"],
        ["'" + texts[0]],
        ["'+a"],
        ["-1.5"],
        ["'@x"],
        ["'＝1"],
        ["'\n=1"],
        ["plain"],
    ]
    said(tmp_path, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.npz")
    assert np.load(tmp_path / "p.npz")["=file"].tolist() == texts  # np.load refuses pickles


def test_pictures_without_classes(tmp_path):
    image = pytest.importorskip("PIL.Image")
    head = '<ir_version: 10, opset_import: ["": 20]> '
    body = "g (float[N, 1, 2, 2] x) => (float[N] y) { a = Constant<value = int64[3] {1, 2, 3}>() y = ReduceMean "
    onnx.save(onnx.parser.parse_model(f"{head}{body}<keepdims = 0> (x, a) }}"), tmp_path / "m.onnx")
    (tmp_path / "pics" / "a").mkdir(parents=True)
    for k, name in enumerate(["two.png", "one.png", "a/three.png"]):
        image.new("L", (2, 2), 51 * (k + 1)).save(tmp_path / "pics" / name)

    def predicted(data: str) -> list[list[str]]:
        said(tmp_path, f"predict PLACE/m.onnx --data PLACE/{data} -o PLACE/p.csv")
        heading, *rows = csv.reader((tmp_path / "p.csv").open(newline=""))
        assert heading == ["file", "y"]
        return [[name, f"{float(y):.2f}"] for name, y in rows]

    assert predicted("pics/one.png") == [["one.png", "0.40"]]
    assert predicted("pics") == [["a/three.png", "0.60"]]  # folders are classes
    (tmp_path / "pics" / "a" / "three.png").rename(tmp_path / "three.png")
    (tmp_path / "pics" / "a").rmdir()
    assert predicted("pics") == [["one.png", "0.40"], ["two.png", "0.20"]]
    (tmp_path / "empty").mkdir()
    assert "holds neither" in said(tmp_path, "predict PLACE/m.onnx --data PLACE/empty -o PLACE/q.csv", code=2)


def test_an_array_alone_feeds_a_model_of_one_input(files):
    np.testing.assert_array_equal(onnxgrad.predict(files / "m.onnx", X)["y"], X)
    two = '<ir_version: 10, opset_import: ["": 20]> g (float[N] a, float[N] b) => (float[N] y) { y = Add (a, b) }'
    with pytest.raises(BadInput, match=r"1 array without a name, and there are 2 inputs to feed: a \(float32"):
        onnxgrad.predict(onnx.parser.parse_model(two), X)


@pytest.mark.parametrize("command", ["predict", "evaluate", "train", "quantize"])
def test_batches_have_rows(files, command):
    np.savez(files / "d.npz", x=X, y=X.argmax(1))
    output = "" if command == "evaluate" else " -o PLACE/o.npz"
    text = said(files, f"{command} PLACE/m.onnx --data PLACE/d.npz --batch-size 0{output}", code=2)
    assert "--batch-size" in text
    assert "greater than or equal to 1" in text


def test_pictures_of_several_sizes(tmp_path):
    """Smaller ones are padded at the bottom and on the right, and their own sizes stand beside them."""
    image = pytest.importorskip("PIL.Image")
    head = '<ir_version: 10, opset_import: ["": 20]> g (float[N, 1, H, W] x) => (float[N, 2, H, W] y) '
    onnx.save(onnx.parser.parse_model(f"{head}{{ y = Concat <axis = 1> (x, x) }}"), tmp_path / "m.onnx")
    pixels = [np.full((h, w), 51 * (k + 1), np.uint8) for k, (h, w) in enumerate([(4, 6), (7, 3), (5, 5)])]
    (tmp_path / "pics").mkdir()
    for k, array in enumerate(pixels):
        image.fromarray(array).save(tmp_path / "pics" / f"{k}.png")
    for size in (1, 2, 256):
        said(tmp_path, f"predict PLACE/m.onnx --data PLACE/pics -o PLACE/p.npz --batch-size {size}")
        found = np.load(tmp_path / "p.npz")
        assert list(found) == ["file", "height", "width", "y"]
        assert [*zip(found["height"], found["width"])] == [a.shape for a in pixels]
        assert found["y"].shape == (3, 2, 7, 6)
        for y, array in zip(found["y"], pixels):
            h, w = array.shape
            np.testing.assert_allclose(y[:, :h, :w], np.broadcast_to(array / 255, (2, h, w)), rtol=1e-6)
    (tmp_path / "pics" / "1.png").unlink()
    (tmp_path / "pics" / "2.png").unlink()
    said(tmp_path, "predict PLACE/m.onnx --data PLACE/pics -o PLACE/p.npz")
    assert list(np.load(tmp_path / "p.npz")) == ["file", "y"]


def test_other_sizes_in_other_batches(tmp_path):
    onnx.save(onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N, T] x) => (float[N, T] y) { y = Neg (x) }'
    ), tmp_path / "m.onnx")  # fmt: skip
    (tmp_path / "d.jsonl").write_text('{"x": [1, 2]}\n{"x": [3]}\n')
    line = "predict PLACE/m.onnx --data PLACE/d.jsonl -o PLACE/p.npz --batch-size"
    assert "--batch-size 2 (in Python batch_size=)" in said(tmp_path, f"{line} 1", code=2)
    said(tmp_path, f"{line} 2")
    np.testing.assert_array_equal(np.load(tmp_path / "p.npz")["y"], [[-1, -2], [-3, 0]])


def test_a_table_as_json_is_no_coco_file(files):
    (files / "d.json").write_text('[{"a": 1}]')
    problem = said(files, "predict PLACE/m.onnx --data PLACE/d.json -o PLACE/p.csv", code=2)
    assert "a table in JSON is a .jsonl file, an object per line" in problem
