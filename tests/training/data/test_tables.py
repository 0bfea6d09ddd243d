"""Tables as people have them: text, a column per number, classes by name; and rows set aside."""

import json

import numpy as np
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training.data import Data, Field, open_data, split
from onnxgrad.training.data.columns import Mapped

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
X = Field("X", F32, (3,))
CLASS = Field("labels", I64, (), label=True, classes=3)
NUMBER = Field("target", F32, (1,), label=True)
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
KINDS = ["cat", "dog", "cat", "ant"]


def written(path, separator=","):
    lines = [separator.join(["f0", "f1", "f2", "kind"])]
    lines += [separator.join([*map(str, row), kind]) for row, kind in zip(ROWS, KINDS)]
    path.write_text("\n".join(lines) + "\n")
    return path


def only(data):
    (batch,) = data.batches(100)
    return batch


@pytest.mark.parametrize(("name", "separator"), [("d.csv", ","), ("d.tsv", "\t")])
def test_a_wide_table_with_classes_by_name(tmp_path, name, separator):
    pytest.importorskip("pyarrow")
    data = Data(written(tmp_path / name, separator), [X, CLASS], inputs={"X": "f0..f2", "labels": "kind"})
    np.testing.assert_array_equal(only(data)["X"], ROWS)
    assert only(data)["labels"].tolist() == [1, 2, 1, 0]
    assert data.classes == ("ant", "cat", "dog")


def test_names_have_the_numbers_of_the_model(tmp_path):
    pytest.importorskip("pyarrow")
    inputs = {"X": "f*", "labels": "kind"}
    data = Data(written(tmp_path / "d.csv"), [X, CLASS], inputs=inputs, classes=("dog", "cat", "ant"))
    assert only(data)["labels"].tolist() == [1, 0, 1, 2]
    with pytest.raises(BadInput, match=r"class 'ant' in row \d+, which is none of those"):
        Data(tmp_path / "d.csv", [X, CLASS], inputs=inputs, classes=("dog", "cat"))


def test_objects_line_by_line(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"X": row.tolist(), "labels": k}) + "\n" for row, k in zip(ROWS, KINDS)))
    data = Data(path, [X, CLASS])
    np.testing.assert_array_equal(only(data)["X"], ROWS)
    assert only(data)["labels"].tolist() == [1, 2, 1, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("null\n", "line 1 of .*d.jsonl' is 'null'; each line must be a JSON object"),
        ("\n \n  null", "line 3 .* is 'null'"),
        ('{"a": 1}\n' * 150_000 + "null\n" * 300_000, "line 150001 .* is 'null'"),
        ('{"a": 1}\n[2]\n', r"line 2 .* is '\[2\]'"),
        ('{"a":\n1}\n', "line 1 "),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, "line 1 of .*deep"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "line 1 of .*deep"),
        ('{"a": "x\xff"}', r"d.jsonl' is no text in UTF-8: b'.xff' in line 1"),
    ],
    ids=lambda text: text[:8].strip(),
)
def test_objects_line_by_line_that_are_none(tmp_path, text, words):
    """pyarrow ends the process on null, and on deep nesting."""
    pytest.importorskip("pyarrow")
    (tmp_path / "d.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput, match=words):
        Data(tmp_path / "d.jsonl", [Field("a", F32, ())])


def test_objects_of_many_lists_and_of_text_with_brackets(tmp_path):
    pytest.importorskip("pyarrow")
    rows = [{"X": [[k, 1.0]] * 600, "text": '[{"\\' * 600} for k in range(2)]
    (tmp_path / "d.jsonl").write_text("\r\n".join(map(json.dumps, rows)))
    data = Data(tmp_path / "d.jsonl", [Field("X", F32, (600, 2))])
    assert only(data)["X"][1, 599].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n3\n", "cannot read .* as a table"),
        ("", "cannot read .* as a table"),
        ("a,b\n1,\n2,3\n", "array 'b' of .*missing values"),
        ("a,b\n", "no rows|0 rows|empty"),
        ("a,b,a\n1,2,3\n", "d.csv' has 2 columns called 'a'"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, text, words):
    pytest.importorskip("pyarrow")
    path = tmp_path / "d.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        Data(path, [Field("a", F32, ()), Field("b", F32, ())])


def test_what_is_missing_matters_only_where_it_is_read(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "d.csv"
    path.write_text("a,when,b\n1,2020-01-01,\n2,,3\n")
    assert only(Data(path, [Field("a", F32, ())]))["a"].tolist() == [1, 2]
    with pytest.raises(BadInput, match=r"column 'b', which is to feed 'X': .*missing values"):
        Data(path, [X], inputs={"X": "a,b"})


COLUMNS = {f"f{i}": np.arange(4.0) + 10 * i for i in range(12)} | {"kind": np.array(KINDS)}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("f0..f11", range(12)),
        ("f9..f11", (9, 10, 11)),
        ("f3,f1,f5..f6", (3, 1, 5, 6)),
        ("f1*", (1, 10, 11)),
    ],
)
def test_columns_are_joined_in_this_order(text, chosen):
    joined = open_data(COLUMNS, inputs={"X": text})["X"]
    np.testing.assert_array_equal(joined.array, np.stack([COLUMNS[f"f{i}"] for i in chosen], axis=1))


def test_columns_that_are_read_later_are_joined_row_by_row():
    columns = {name: Mapped(array) for name, array in COLUMNS.items() if name != "kind"}
    data = Data(columns, [X], inputs={"X": "f0..f2"})
    assert not data.arrays
    np.testing.assert_array_equal(only(data)["X"], np.stack([COLUMNS[f"f{i}"] for i in range(3)], axis=1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f0..f12", "'f12'.*did you mean"),
        ("f2..f1", "ends before it begins"),
        ("g*", "no column 'g\\*'|'g\\*'"),
        ("f0,f0", "named twice"),
        ("f0,kind", "'kind', which is to feed 'X', is .* not one number per row"),
        ("first..f2", "'first'"),
    ],
)
def test_columns_that_are_not_there_are_refused(text, words):
    with pytest.raises(BadInput, match=words):
        open_data(COLUMNS, inputs={"X": text})


def test_one_number_per_row_is_written_with_and_without_an_axis():
    for target in (np.arange(4.0), np.arange(4.0)[:, None]):
        assert only(Data({"X": ROWS, "target": target}, [X, NUMBER]))["target"].shape == (4, 1)
    for labels in (np.arange(3), np.arange(3)[:, None]):
        assert only(Data({"X": ROWS[:3], "labels": labels}, [X, CLASS]))["labels"].shape == (3,)


def test_each_class_is_split_by_itself():
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    data = Data({"X": np.random.default_rng(0).random((100, 3)), "labels": labels}, [X, CLASS])
    train, held = split(data, 0.2, seed=3)
    assert np.bincount(only(held)["labels"]).tolist() == [12, 6, 2]
    assert (len(train), len(held)) == (80, 20)
    rows = np.concatenate([only(train)["X"], only(held)["X"]])
    assert {row.tobytes() for row in rows} == {row.tobytes() for row in only(data)["X"]}
    again = split(data, 0.2, seed=3)[1]
    np.testing.assert_array_equal(only(again)["X"], only(held)["X"])
    assert not np.array_equal(only(split(data, 0.2, seed=4)[1])["X"], only(held)["X"])
    assert train.fingerprint != data.fingerprint != held.fingerprint


def test_rows_that_are_read_later_are_split():
    data = Data({"X": Mapped(ROWS), "target": Mapped(np.arange(4.0))}, [X, NUMBER])
    train, held = split(data, 0.25, seed=0)
    found = np.concatenate([only(train)["target"], only(held)["target"]])[:, 0]
    assert sorted(found) == [0, 1, 2, 3]
    np.testing.assert_array_equal(np.concatenate([only(train)["X"], only(held)["X"]]), ROWS[found.astype(int)])


def test_names_of_classes_stay_with_a_split():
    columns = {"X": np.repeat(ROWS, 5, axis=0), "labels": np.repeat(KINDS, 5)}
    train, held = split(Data(columns, [X, CLASS]), 0.25, seed=0)
    assert train.classes == held.classes == ("ant", "cat", "dog")
    before = np.array(train.classes)[only(held)["labels"]]
    held.number(("dog", "cat", "ant"))
    np.testing.assert_array_equal(np.array(held.classes)[only(held)["labels"]], before)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 0.01])
def test_a_share_that_leaves_nothing_is_refused(share):
    with pytest.raises(BadInput, match="share"):
        split(Data({"X": ROWS, "labels": np.zeros(4, int)}, [X, CLASS]), share, seed=0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.csv", "a;b;kind\n1.5;2;x\n3;4.25;y\n"),
        ("d.csv", "a;b;kind\n1,5;2;x\n3;4,25;y\n"),
        ("d.csv", '"a";"b";"kind"\n"1,5";"2";"x"\n"3";"4,25";"y"\n'),
        ("d.csv", '"a";"b";"kind, really"\n1,5;2;x\n3;4,25;y\n'),
        ("d.tsv", "a\tb\tkind\n1,5\t2\tx\n3\t4,25\ty\n"),
        ("d.csv", 'a,b,kind\n1.5,2,"x;z"\n3,4.25,y\n'),
    ],
)
def test_tables_of_spreadsheets(tmp_path, name, text):
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text)
    two = Field("x", F32, (2,))
    data = Data(tmp_path / name, [two], inputs={"x": "a,b"})
    np.testing.assert_array_equal(only(data)["x"], [[1.5, 2], [3, 4.25]])


def test_numbers_that_are_text_are_named_by_cell(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "d.csv").write_text("a;b\n1;2\n1.234,5;3\n")
    with pytest.raises(BadInput, match=r"column 'a', .* is text \('1.234,5' in row 1\), not one number per row"):
        Data(tmp_path / "d.csv", [Field("x", F32, (2,))], inputs={"x": "a,b"})


@pytest.mark.parametrize("library", ["pyarrow", "pandas", "polars"])
def test_tables_in_memory(library):
    arrow = pytest.importorskip("pyarrow")
    module = pytest.importorskip(library)
    columns = {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0], "kind": ["x", "y", "x"]}
    table = arrow.table(columns) if library == "pyarrow" else module.DataFrame(columns)
    fields = [Field("x", np.dtype(np.float32), (2,)), Field("kind", np.dtype(np.int64), (), label=True)]
    data = Data(table, fields, inputs={"x": "a,b"})
    (batch,) = data.batches(3)
    assert batch["x"].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert batch["kind"].tolist() == [0, 1, 0]
    assert data.classes == ("x", "y")


def test_files_of_other_kinds_are_told(tmp_path):
    (tmp_path / "d.xlsx").write_bytes(b"PK")
    with pytest.raises(BadInput, match=r"hint: data are files of \.npz, \.npy"):
        Data(tmp_path / "d.xlsx", [])


def test_the_row_that_has_other_columns_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "d.csv").write_text("a,b\n" + "1,2\n" * 30 + "3\n" + "1,2\n")
    with pytest.raises(BadInput, match=r"Row #32: Expected 2 columns, got 1"):
        open_data(tmp_path / "d.csv")
