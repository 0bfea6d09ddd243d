"""Tables that are read as streams: their preparation is fitted in one pass, and is that of the rows in memory."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import predict
from onnxgrad.training.data.column_fit import ColumnFit, TableSettings
from onnxgrad.training.data.raw_columns import RawColumn
from onnxgrad.training.data.table import MISSING
from tests.training.data.test_table import COLUMNS, INPUTS, NAMES, linear

RNG = np.random.default_rng(1)


def streams(tmp_path):
    """The same rows as streams, in parts of a few rows."""
    table = pa.table({**COLUMNS, "late": [None] * 30 + [1.5] * 10})  # whose type its first parts do not show
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    yield table, tmp_path / "rows.parquet"
    yield table, tmp_path / "rows.csv"
    yield table, lambda: iter(table.to_pylist())
    yield table, lambda: table.to_batches(9)


@pytest.mark.parametrize("way", MISSING)
def test_a_stream_is_prepared_as_its_rows_in_memory(way, tmp_path, monkeypatch):
    monkeypatch.setattr("onnxgrad.training.data.shards._BLOCK", 256)
    names = f"{NAMES},late"
    width = {"indicator": 10, "drop": 7}.get(way, 7)
    settings = {"loss": "mse", "labels": "target", "inputs": {"x": names}, "missing": way, "standardize": True,
                "shuffle": False, "batch_size": 5, "optimizer": "sgd", "learning_rate": 0.01, "epochs": 2}  # fmt: skip
    for table, source in streams(tmp_path):
        wanted = onnxgrad.train(linear(width), table, **settings)
        found = onnxgrad.train(linear(width), source, **settings, **({"stream": True} if not callable(source) else {}))
        np.testing.assert_allclose(found.state()["w"], wanted.state()["w"], rtol=1e-5, atol=1e-7)
        model = found.inference_model()
        kept = {n: table[n] for n in table.column_names} if way != "drop" else table.drop_null()
        np.testing.assert_allclose(
            predict(model, pa.table(kept))["y"], predict(wanted.inference_model(), pa.table(kept))["y"], rtol=1e-4
        )


def test_a_folder_whose_files_show_other_types(tmp_path):
    """Text, of which the first file has only digits, is text in all of them."""
    table = pa.table({"code": ["12"] * 10 + ["x1", "x2"] * 5, "target": np.arange(20.0)})
    for part in range(2):
        pyarrow.csv.write_csv(table.slice(10 * part, 10), tmp_path / f"{part}.csv")
    settings = {"loss": "mse", "labels": "target", "inputs": {"x": "code"}, "missing": "mean", "shuffle": False}
    found = onnxgrad.train(linear(3), tmp_path, stream=True, **settings)
    np.testing.assert_array_equal(found.state()["w"], onnxgrad.train(linear(3), table, **settings).state()["w"])


def test_a_stream_that_is_read_once_is_not_fitted():
    rows = pa.table(COLUMNS).to_pylist()
    with pytest.raises(BadInput, match="is an iterator, which can be read once only"):
        onnxgrad.train(linear(6), iter(rows), loss="mse", labels="target", inputs=INPUTS, missing="mean")


def test_statistics_of_parts_are_those_of_all_rows():
    values = RNG.standard_normal(4000) * 3 + 1e3
    values[RNG.random(4000) < 0.1] = np.nan
    for way in ("mean", "median"):
        settings = TableSettings(way, None, True)
        whole, parts = ColumnFit("a", settings), ColumnFit("a", settings, sample=4000)
        whole.add(RawColumn("number", values))
        for part in np.array_split(values, 37):
            parts.add(RawColumn("number", part))
        wanted = values.copy()
        wanted[np.isnan(values)] = np.nanmedian(values) if way == "median" else np.nanmean(values)
        for fit in (whole, parts):
            column = fit.column()
            np.testing.assert_allclose([column.mean, column.scale], [wanted.mean(), wanted.std()], rtol=1e-12)
    some = ColumnFit("a", TableSettings("median"), sample=500)
    for part in np.array_split(values, 37):
        some.add(RawColumn("number", part))
    rank = np.nanmean(values < some.column().fill)
    assert abs(rank - 0.5) < 0.1
    assert "is that of 500 rows of" in some.note
