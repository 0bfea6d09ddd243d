"""Numbers with leading zeros are codes: text in training, in streams, and for a model that was trained on them."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.csv
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import evaluate, predict
from onnxgrad.training.data.sources import open_data
from tests.cli.said import said
from tests.training.data.test_table import linear

CODES = (["80331", "20095", "80331"] * 10 + ["01067", "04109"])[:32]
AGES = [k % 7 for k in range(32)]
PRICES = [k / 8 for k in range(32)]
COLUMNS = {"plz": CODES, "age": AGES, "price": PRICES}
SETTINGS = {"loss": "mse", "labels": "price", "inputs": {"x": "plz,age"}, "categories": "onehot", "shuffle": False,
            "learning_rate": 0.1}  # fmt: skip


def write(path, cells, delimiter=","):
    lines = [delimiter.join(row) for row in zip(*cells.values())]
    path.write_text("\n".join([delimiter.join(cells), *lines]) + "\n")
    return path


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["plain", "quoted", "semicolons", "missing"])
def test_a_column_with_leading_zeros_is_text(tmp_path, monkeypatch, form, stream):
    """Also where the first of them comes late, behind the first blocks of a stream."""
    monkeypatch.setattr("onnxgrad.training.data.shards._BLOCK", 64)
    codes = ["" if form == "missing" and k == 3 else code for k, code in enumerate(CODES)]
    cells = {"plz": [f'"{c}"' for c in codes] if form == "quoted" else codes}
    cells |= {"age": [*map(str, AGES)], "price": [*map(str, PRICES)]}
    settings = SETTINGS | ({"missing": "mean"} if form == "missing" else {})
    path = write(tmp_path / "d.csv", cells, ";" if form == "semicolons" else ",")
    typed = pa.table({**COLUMNS, "plz": codes})
    wanted = onnxgrad.train(linear(5), typed, **settings)
    found = onnxgrad.train(linear(5), path, stream=stream, **settings)
    np.testing.assert_array_equal(found.state()["w"], wanted.state()["w"])
    (features,) = found.preprocessing.inputs.values()
    assert features.table.columns[0].categories == ("01067", "04109", "20095", "80331")
    found.save(tmp_path / "o.onnx")
    few = write(tmp_path / "few.csv", {n: c[:6] for n, c in cells.items()}, ";" if form == "semicolons" else ",")
    expected = predict(tmp_path / "o.onnx", typed.slice(0, 6))["y"]
    np.testing.assert_array_equal(predict(tmp_path / "o.onnx", few)["y"], expected)
    error = expected[:, 0] - np.array(PRICES[:6])
    assert evaluate(tmp_path / "o.onnx", few).metrics["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-5)


def test_other_numbers_stay_numbers(tmp_path):
    rows = ["0 00.5 0x 00:15 2024-01-02", "10 1 1 01:00 2024-02-03", "-0 2 2 12:00 2024-03-04"]
    cells = dict(zip("abcde", zip(*map(str.split, rows))))
    columns = open_data(write(tmp_path / "d.csv", cells))
    assert [str(columns[n].chunks.type) for n in "abc"] == ["int64", "double", "string"]
    assert str(columns["e"].chunks.type) == "date32[day]"


def test_a_model_that_was_trained_on_numbers_reads_numbers(tmp_path):
    """Its columns are no codes; the file says so, whether they are prepared or only joined."""
    numbers = {"plz": np.array([*map(int, CODES)], float), "age": np.array(AGES, float)}
    prices = np.array(PRICES, np.float32)[:, None]
    path = write(tmp_path / "d.csv", {"plz": CODES, "age": [*map(str, AGES)]})
    for how in ({"standardize": True}, {}):
        trainer = onnxgrad.train(linear(2), {**numbers, "price": prices}, loss="mse", labels="price",
                                 inputs={"x": "plz,age"}, learning_rate=1e-6, **how)  # fmt: skip
        trainer.save(tmp_path / "o.onnx")
        np.testing.assert_array_equal(
            predict(tmp_path / "o.onnx", path)["y"], predict(tmp_path / "o.onnx", numbers)["y"]
        )


def test_codes_are_classes(tmp_path):
    path = write(tmp_path / "d.csv", {"age": [*map(str, AGES)], "plz": CODES})
    settings = {"loss": "cross_entropy", "labels": "plz", "inputs": {"x": "age"}}
    trainer = onnxgrad.train(linear(1, out=4), path, **settings)
    assert trainer.classes == ("01067", "04109", "20095", "80331")
    trainer.save(tmp_path / "o.onnx")
    few = write(tmp_path / "few.csv", {"age": ["1", "2"], "plz": ["80331", "20095"]})
    assert {n: int(row["rows"]) for n, row in evaluate(tmp_path / "o.onnx", few, labels="plz").classes.items()} == {
        "20095": 1, "80331": 1
    }  # fmt: skip


@pytest.mark.parametrize("stream", ["", " --stream"])
def test_the_header_names_codes(tmp_path, stream):
    onnx.save(linear(5), tmp_path / "m.onnx")
    write(tmp_path / "d.csv", {"plz": CODES, "age": [*map(str, AGES)], "price": [*map(str, PRICES)]})
    line = (
        "train PLACE/m.onnx --data PLACE/d.csv --input x=plz,age --labels price --loss mse --epochs 1 -o PLACE/o.onnx"
    )
    assert "text, as numbers have leading zeros: plz of d.csv" in said(tmp_path, f"{line} --categories onehot{stream}")
    problem = said(tmp_path, f"{line}{stream}", code=2)
    assert "is text ('01067' in row 30)" in problem or "is text ('80331'" in problem
    assert "--categories onehot" in problem
    onnx.save(linear(1), tmp_path / "m.onnx")
    write(tmp_path / "d.csv", {"x": ["1", "2"], "y": ["007", "012"]})
    problem = said(tmp_path, f"train PLACE/m.onnx --data PLACE/d.csv --loss mse -o PLACE/o.onnx{stream}", code=2)
    assert "holds text ('007'), not numbers" in problem
    assert "numbers have no leading zeros" in problem


def test_numbers_are_no_dates(tmp_path):
    """In a table; in arrays, numbers are days, as the saved model takes them."""
    days = np.array(["2024-01-31", "2024-06-01", "2024-12-24"], "datetime64[D]")
    rows = {"when": days, "age": np.array([1.0, 2.0, 3.0]), "price": np.ones((3, 1), np.float32)}
    trainer = onnxgrad.train(linear(2), rows, loss="mse", labels="price", inputs={"x": "when,age"}, standardize=True)
    trainer.save(tmp_path / "o.onnx")
    wanted = predict(tmp_path / "o.onnx", rows)["y"]
    as_days = {**rows, "when": days.astype(np.int64).astype(float)}
    np.testing.assert_array_equal(predict(tmp_path / "o.onnx", as_days)["y"], wanted)
    pyarrow.csv.write_csv(pa.table({"when": [20240131, 20240601], "age": [1.0, 2.0]}), tmp_path / "d.csv")
    with pytest.raises(BadInput, match=r"'when' of .* holds numbers, and dates when the model was trained"):
        predict(tmp_path / "o.onnx", tmp_path / "d.csv")
    with pytest.raises(BadInput, match="'age' of the data holds dates, and numbers when the model was trained"):
        predict(tmp_path / "o.onnx", {**rows, "age": days})


def test_a_table_learns_its_own_columns(tmp_path):
    """An autoencoder of columns that are prepared, by command."""
    onnx.save(linear(5, out=5), tmp_path / "m.onnx")
    write(tmp_path / "d.csv", {"plz": CODES, "age": [*map(str, AGES)]})
    line = "train PLACE/m.onnx --data PLACE/d.csv --input x=plz,age --labels x --categories onehot --loss mse"
    assert "data    32 rows; x → x" in said(tmp_path, f"{line} --epochs 1 -o PLACE/o.onnx")


def test_a_stream_is_quantized_as_it_was_trained(tmp_path):
    """Its first rows, which calibrate, show no leading zero; those of another file show only digits."""
    onnx.save(linear(5), tmp_path / "m.onnx")
    write(tmp_path / "d.csv", {"plz": CODES, "age": [*map(str, AGES)], "price": [*map(str, PRICES)]})
    write(tmp_path / "e.csv", {"plz": CODES[:9], "age": [*map(str, AGES[:9])], "price": [*map(str, PRICES[:9])]})
    rest = "--loss mse --stream --epochs 1 --also int8"
    line = "train PLACE/m.onnx --data PLACE/d.csv --input x=plz,age --labels price --categories onehot"
    assert "o.int8.onnx" in said(tmp_path, f"{line} {rest} -o PLACE/o.onnx")
    assert "p.int8.onnx" in said(
        tmp_path, f"train PLACE/o.onnx --data PLACE/e.csv --labels price {rest} -o PLACE/p.onnx"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_text_of_lines_stays_text(tmp_path, monkeypatch, stream):
    """Where all of a part, or of another file, look like times."""
    monkeypatch.setattr("onnxgrad.training.data.shards._BLOCK", 64)
    codes = ["2024-01-02 00:00:00"] * 12 + ["late"] * 2
    lines = [json.dumps({"code": code, "price": k / 8}) for k, code in enumerate(codes)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "e.jsonl").write_text("\n".join(lines[:3]) + "\n")
    trainer = onnxgrad.train(linear(2), tmp_path / "d.jsonl", loss="mse", labels="price", inputs={"x": "code"},
                             categories="onehot", stream=stream, learning_rate=0.1)  # fmt: skip
    trainer.save(tmp_path / "o.onnx")
    typed = {"code": np.array(codes[:3], object)}
    np.testing.assert_array_equal(
        predict(tmp_path / "o.onnx", tmp_path / "e.jsonl")["y"], predict(tmp_path / "o.onnx", typed)["y"]
    )
