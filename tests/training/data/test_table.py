"""Tables as they are: missing values, categories, dates and booleans, in training and in the saved model."""

from __future__ import annotations

import csv
import datetime

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer, evaluate, predict
from onnxgrad.training.data.column_fit import ColumnFit, TableSettings
from onnxgrad.training.data.columns import Dense
from onnxgrad.training.data.raw_columns import RawColumn, raw_column
from onnxgrad.training.data.sources import open_data
from onnxgrad.training.data.table import MISSING, Table
from tests.commands import command

RNG = np.random.default_rng(0)
AGES = [None if i % 7 == 3 else 20 + i * 0.53 for i in range(40)]
COLOURS = [None if i % 9 == 2 else ["red", "green", "blue", "red"][i % 4] for i in range(40)]
DAYS = [datetime.date(2024, 1 + i % 12, 1 + i % 28) for i in range(40)]
MEMBERS = [i % 3 == 0 for i in range(40)]
TARGETS = [round(0.1 * i, 1) for i in range(40)]
COLUMNS = {"age": AGES, "colour": COLOURS, "when": DAYS, "member": MEMBERS, "target": TARGETS}
NAMES = "age,colour,when,member"
INPUTS = {"x": NAMES}


def linear(width, dtype="float", out=1):
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        net ({dtype}[N, {width}] x) => (float[N, {out}] y) {{ y = MatMul (x, w) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((width, out), 0.1, np.float32), "w"))
    return model


def write_csv(path, german=False):
    def cell(value):
        if value is None:
            return ""
        if german and isinstance(value, float):
            return str(value).replace(".", ",")
        if german and isinstance(value, datetime.date):
            return value.strftime("%d.%m.%Y")
        return str(value).lower() if isinstance(value, bool) else str(value)

    with open(path, "w", newline="") as file:
        writer = csv.writer(file, delimiter=";" if german else ",")
        writer.writerow(COLUMNS)
        writer.writerows([[cell(v) for v in row] for row in zip(*COLUMNS.values())])
    return path


def sources(tmp_path):
    table = pa.table(COLUMNS)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    yield "arrow", table
    yield "parquet", tmp_path / "rows.parquet"
    yield "csv", write_csv(tmp_path / "rows.csv")
    yield "german csv", write_csv(tmp_path / "german.csv", german=True)
    arrays = {
        "age": np.array([np.nan if a is None else a for a in AGES]),
        "colour": np.array(["" if c is None else c for c in COLOURS]),
        "when": np.array(DAYS, "datetime64[D]"),
        "member": np.array(MEMBERS),
        "target": np.array(TARGETS),
    }
    yield "arrays", arrays
    yield "rows", [dict(zip(COLUMNS, row)) for row in zip(AGES, COLOURS, arrays["when"], MEMBERS, TARGETS)]


def test_every_form_of_a_table_is_the_same_table(tmp_path):
    found = {}
    for name, source in sources(tmp_path):
        trainer = onnxgrad.train(linear(6), source, loss="mse", labels="target", inputs=INPUTS, missing="mean",
                                 standardize=True, learning_rate=0.01, shuffle=False)  # fmt: skip
        found[name] = trainer.data(source).arrays["x"]
        assert np.isfinite(trainer.history.epochs[0]["loss"])
    for name, array in found.items():
        np.testing.assert_allclose(array, found["arrow"], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("way", ["mean", "median", "indicator"])
@pytest.mark.parametrize("standardize", [False, True])
def test_numbers_are_those_of_scikit_learn(way, standardize):
    impute = pytest.importorskip("sklearn.impute")
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    ages = np.array([np.nan if a is None else a for a in AGES])
    colours = np.array(["" if c is None else c for c in COLOURS], object)
    raws = {"age": raw_column(Dense(ages), "age"), "colour": raw_column(Dense(colours), "colour")}
    settings = TableSettings(way, None, standardize)
    fits = [ColumnFit(name, settings) for name in raws]
    for fit in fits:
        fit.add(raws[fit.name])
    table = Table.fit(fits, settings, False, "x")
    found = table(raws, "the data")
    filler = impute.SimpleImputer(strategy="median" if way == "median" else "mean", add_indicator=way == "indicator")
    numbers = filler.fit_transform(ages[:, None])
    marks = numbers[:, 1:]
    numbers = StandardScaler().fit_transform(numbers[:, :1]) if standardize else numbers[:, :1]
    if way == "indicator":  # a missing category is none of them
        texts = OneHotEncoder(categories=[["blue", "green", "red"]], handle_unknown="ignore").fit_transform(
            colours[:, None]
        )
        marks = np.concatenate([marks, (colours == "")[:, None]], 1)
    else:
        filled = impute.SimpleImputer(missing_values="", strategy="most_frequent").fit_transform(colours[:, None])
        texts = OneHotEncoder().fit_transform(filled)
    np.testing.assert_allclose(found, np.concatenate([numbers, texts.toarray(), marks], 1), rtol=1e-6, atol=1e-6)
    wanted = ["age", "colour=blue", "colour=green", "colour=red"]
    assert table.numbers == [*wanted, *(["age is missing", "colour is missing"] if way == "indicator" else [])]
    assert Table.of_json(table.to_json()) == table


@pytest.mark.parametrize("way", ["mean", "indicator"])
def test_the_saved_model_takes_raw_columns(way, tmp_path):
    source = write_csv(tmp_path / "rows.csv", german=True)
    width = 8 if way == "indicator" else 6
    trainer = onnxgrad.train(linear(width), source, loss="mse", labels="target", inputs=INPUTS, missing=way,
                             standardize=True, learning_rate=0.01, optimizer="adam", epochs=4)  # fmt: skip
    trainer.save(tmp_path / "model.onnx")
    saved = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(saved, full_check=True)
    assert [v.name for v in saved.graph.input] == NAMES.split(",")
    wanted = trainer.data(source).arrays["x"] @ trainer.state()["w"]
    np.testing.assert_allclose(predict(tmp_path / "model.onnx", source)["y"], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.predict(source)["y"], wanted, rtol=1e-5, atol=1e-6)
    plain = onnxruntime.InferenceSession(tmp_path / "model.onnx")  # no onnxgrad: a column is an array
    days = np.array([(d - datetime.date(1970, 1, 1)).days for d in DAYS], np.float64)
    fed = {
        "age": np.array([np.nan if a is None else a for a in AGES]),
        "colour": np.array([c or "" for c in COLOURS], object),
        "when": days,
        "member": np.array(MEMBERS, np.float64),
    }
    np.testing.assert_allclose(plain.run(None, fed)[0], wanted, rtol=1e-5, atol=1e-6)
    fed["colour"][:] = "violet"  # a category that training has not seen is none of them
    assert np.isfinite(plain.run(None, fed)[0]).all()
    metrics = evaluate(tmp_path / "model.onnx", source, labels="target").metrics
    assert np.isclose(metrics["mae"], trainer.evaluate(source)["mae"], rtol=1e-5)


def test_a_saved_model_is_trained_further_and_a_training_model_too(tmp_path):
    settings = {"loss": "mse", "labels": "target", "optimizer": "sgd", "learning_rate": 0.01}
    table = pa.table(COLUMNS)
    trainer = onnxgrad.train(linear(6), table, inputs=INPUTS, missing="mean", standardize=True, **settings)
    trainer.save(tmp_path / "model.onnx")
    trainer.save_training_model(tmp_path / "training.onnx")
    more = Trainer(tmp_path / "model.onnx", **settings)
    assert more.step.batch == ["x", "target"]
    other = Trainer(tmp_path / "training.onnx")
    for each in (more, other):
        each.fit(table, epochs=2, shuffle=False)
        each.save(tmp_path / "again.onnx")
        assert [v.name for v in onnx.load(tmp_path / "again.onnx").graph.input] == NAMES.split(",")
    np.testing.assert_allclose(more.state()["w"], other.state()["w"], rtol=1e-6)
    wanted = more.data(table).arrays["x"] @ other.state()["w"]
    np.testing.assert_allclose(predict(tmp_path / "again.onnx", table)["y"], wanted, rtol=1e-5)


def test_rows_that_are_held_out_decide_nothing():
    """Means and categories are those of the rows that train, also with validation_split."""
    columns = {"a": np.arange(40.0), "labels": np.arange(40.0)}
    trainer = onnxgrad.train(linear(1), columns, loss="mse", inputs={"x": "a"}, standardize=True,
                             validation_split=0.5, seed=3)  # fmt: skip
    (column,) = trainer.preprocessing.inputs["x"].table.columns
    shown = []
    whole = Trainer(linear(1), loss="mse")
    whole.fit(columns, inputs={"x": "a"}, validation_split=0.5, seed=3, callbacks=[_Rows(shown)])
    assert np.isclose(column.mean, np.mean(shown))
    assert not np.isclose(column.mean, 19.5)


class _Rows(onnxgrad.training.Callback):
    def __init__(self, rows):
        self.rows = rows

    def start(self, run):
        self.rows += run.data.arrays["x"].ravel().tolist()


def test_validation_data_are_prepared_as_the_training_data(tmp_path):
    rows = {"a": np.arange(20.0), "c": np.array(["u", "v"] * 10), "labels": np.arange(20.0)}
    other = {"c": np.array(["v"] * 5), "a": np.arange(5.0), "labels": np.arange(5.0)}  # one category, another order
    trainer = onnxgrad.train(linear(3), rows, loss="mse", inputs={"x": "a,c"}, standardize=True, validation=other)
    x = trainer.data(other).arrays["x"]
    assert x[:, 2].tolist() == [1.0] * 5
    assert np.isclose(trainer.history.epochs[0]["validation_loss"], trainer.evaluate(other)["loss"])


def test_rows_without_a_value_are_left_out():
    trainer = onnxgrad.train(linear(6), pa.table(COLUMNS), loss="mse", labels="target", inputs=INPUTS, missing="drop",
                             batch_size=40, learning_rate=1e-9)  # fmt: skip
    full = [i for i in range(40) if AGES[i] is not None and COLOURS[i] is not None]
    rows = trainer.data(pa.table(COLUMNS).take(full))
    assert len(rows) == len(full)
    assert np.isclose(trainer.history.epochs[0]["loss"], trainer.evaluate(rows)["loss"])
    with pytest.raises(BadInput, match=r"column 'age' of .* has no value in row 3, and the model was trained on rows"):
        predict(trainer.inference_model(), pa.table(COLUMNS))


def test_categories_for_an_embedding():
    """An input of whole numbers takes 1, 2, …, and 0 for a category that is missing or unknown."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (int64[N] ids) => (float[N, 2] y) { y = Gather (words, ids) }""")
    words = RNG.standard_normal((4, 2)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(words, "words"))
    rows = {"colour": np.array(["red", "green", "blue", "red"]), "labels": np.zeros((4, 2), np.float32)}
    trainer = onnxgrad.train(model, rows, loss="mse", inputs={"ids": "colour"}, categories="index", learning_rate=0.1)
    assert trainer.data(rows).arrays["ids"].tolist() == [3, 2, 1, 3]
    saved = onnxruntime.InferenceSession(trainer.inference_model().SerializeToString())
    found = saved.run(None, {"colour": np.array(["green", "violet"], object)})[0]
    np.testing.assert_allclose(found, trainer.state()["words"][[2, 0]], rtol=1e-6)


def test_the_command(tmp_path):
    onnx.save(linear(6), tmp_path / "model.onnx")
    write_csv(tmp_path / "rows.csv", german=True)
    done = command(
        "train", tmp_path / "model.onnx", "--data", tmp_path / "rows.csv", "--input", f"x={NAMES}",
        "--labels", "target", "--missing", "median", "--standardize", "--validation-split", "0.2",
        "--loss", "mse", "--epochs", "1",
        "-o", tmp_path / "out.onnx",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stderr.split())
    for words in ("semicolons between columns and decimal commas", "when (days since 1970-01-01)",
                  "colour (3 categories)", "missing: median"):  # fmt: skip
        assert words in shown
    done = command("predict", tmp_path / "out.onnx", "--data", tmp_path / "rows.csv", "-o", tmp_path / "y.csv")
    assert done.returncode == 0, done.stderr
    assert "the columns age, colour, when (days since 1970-01-01), member" in " ".join(done.stderr.split())
    assert len((tmp_path / "y.csv").read_text().splitlines()) == 41


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"missing": "mean", "inputs": {"x": "age,colour"}},
            "takes 6 numbers for each row, and age,colour gives 4: 'age'",
        ),
        ({"standardize": True}, r"column 'age', which is to feed 'x', has no value in row 3\n  hint: --missing mean\|"),
        ({"missing": "mode"}, "missing must be 'mean' or 'median' or 'drop' or 'indicator'"),
        ({"categories": "binary"}, "categories must be 'onehot' or 'index'"),
        ({"missing": "mean", "inputs": None}, "are of columns that are joined"),
        ({"inputs": {"x": "colour,when"}}, r"is text \('red' in row 0\)[^\n]*\n  hint: --categories onehot"),
        ({"missing": "mean", "categories": "index"}, "holds numbers, and 'x' takes the numbers of categories"),
    ],
)
def test_what_is_refused(settings, message):
    data = pa.table(COLUMNS | ({"colour": ["red"] * 40} if settings.get("inputs") == {"x": "colour,when"} else {}))
    with pytest.raises(BadInput, match=message):
        onnxgrad.train(linear(6), data, loss="mse", **{"labels": "target", "inputs": INPUTS, **settings})


def test_equal_numbers_are_not_divided_by_rounding():
    """The deviation of 1,000 times 0.1 is 3e-17 in floating point."""
    fit = ColumnFit("a", TableSettings(None, None, True))
    fit.add(RawColumn("number", np.full(1000, 0.1)))
    assert fit.column().scale == 1


def test_a_column_without_any_value_is_of_the_trained_type():
    rows = {"a": np.array(["red", "", "blue", "red"]), "labels": np.arange(4.0)}
    model = onnxgrad.train(linear(2), rows, loss="mse", inputs={"x": "a"}, missing="mean").inference_model()
    wanted = predict(model, {"a": np.array(["red", "red"])})["y"]
    np.testing.assert_array_equal(predict(model, pa.table({"a": pa.nulls(2)}))["y"], wanted)


def test_another_type_of_a_column_is_refused(tmp_path):
    rows = {"a": np.arange(4.0), "labels": np.arange(4.0)}
    trainer = onnxgrad.train(linear(1), rows, loss="mse", inputs={"x": "a"}, missing="mean")
    model = trainer.inference_model()
    with pytest.raises(BadInput, match="column 'a' of the data holds texts, and numbers when the model was trained"):
        predict(model, {"a": np.array(["1", "x"])})
    with pytest.raises(BadInput, match="the data have no column 'a'"):
        predict(model, {"b": np.arange(3.0), "c": np.arange(3.0)})
    assert predict(model, {"a": np.array([np.nan, 1.0])})["y"].shape == (2, 1)


def test_damaged_metadata_are_refused():
    rows = {"a": np.arange(4.0), "labels": np.arange(4.0)}
    model = onnxgrad.train(linear(1), rows, loss="mse", inputs={"x": "a"}, missing="mean").inference_model()
    for old, new in (('"kind": "number"', '"kind": "code"'), ('"scale": 1.0', '"scale": NaN'), ('"a"', "3, 4")):
        damaged = onnx.ModelProto.FromString(model.SerializeToString())
        assert old in damaged.metadata_props[0].value
        damaged.metadata_props[0].value = damaged.metadata_props[0].value.replace(old, new)
        with pytest.raises(BadInput, match="metadata"):
            predict(damaged, rows)
    del model.graph.node[:-1]
    model.graph.node[0].input[0] = "a"
    with pytest.raises(BadInput, match="was changed after training"):
        Trainer(model, loss="mse")


def test_dates_are_found_in_text_and_said(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n31.12.2024,2024-12-31\n01.02.2025,2025-02-01\n")
    raws = {n: raw_column(c, n) for n, c in open_data(tmp_path / "rows.csv").items()}
    assert raws["a"].kind == raws["b"].kind == "date"
    assert raws["a"].values.tolist() == raws["b"].values.tolist() == [20088.0, 20120.0]
    assert set(MISSING) == {"mean", "median", "drop", "indicator"}


@pytest.mark.parametrize(
    ("texts", "days"),
    [
        (["2024-12-31T12:00:00.5", "2024-12-31T12:00:00"], [20088.5 + 0.5 / 86400, 20088.5]),
        (["2024-12-31 06:00:00.000000000Z", "2024-12-31T06:00:00+02:00"], [20088.25, 20088.25 - 1 / 12]),
        (["31.12.2024", "01.02.2025"], [20088, 20120]),
        (["9999-12-31", "0001-01-01"], [2932896, -719162]),  # beyond what 64 bits of nanoseconds hold
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_forms_of_dates(texts, days, suffix, tmp_path):
    lines = [f'{{"a": "{text}"}}' for text in texts] if suffix == "jsonl" else ["a", *texts]
    (tmp_path / f"rows.{suffix}").write_text("\n".join(lines))
    (column,) = open_data(tmp_path / f"rows.{suffix}").values()
    raw = raw_column(column, "a")
    assert raw.kind == "date"
    np.testing.assert_allclose(raw.values, days, rtol=1e-15)


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["rows", "stream"])
def test_a_quantized_sibling_of_rows_that_are_left_out(stream, tmp_path):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 6] x) => (float[N, 2] y) { h = MatMul (x, w) a = Relu (h) y = MatMul (a, v) }""")
    for name, shape in {"w": (6, 16), "v": (16, 2)}.items():
        array = RNG.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "model.onnx")
    done = command(
        "train", tmp_path / "model.onnx", "--data", write_csv(tmp_path / "rows.csv"), "--input", f"x={NAMES}",
        "--labels", "target", "--missing", "drop", "--standardize", "--loss", "mean((scores[:, 0] - target)**2)",
        "--epochs", "1", "--also", "int8", "-o", tmp_path / "out.onnx", *stream,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = pa.table({**COLUMNS}).drop_null()
    floats, integers = (predict(tmp_path / f"out{s}.onnx", whole)["y"] for s in ("", ".int8"))
    np.testing.assert_allclose(integers, floats, atol=0.1 * np.abs(floats).max())


@pytest.mark.parametrize("settings", [{"missing": "median"}, {"missing": "mean", "categories": "index"}], ids=str)
def test_another_preparation_of_a_trained_model_is_refused(settings):
    table = pa.table(COLUMNS)
    how = {"loss": "mse", "labels": "target", "inputs": INPUTS, "missing": "mean", "standardize": True}
    trained = onnxgrad.train(linear(6), table, **how).inference_model()
    onnxgrad.train(trained, table, **how)
    with pytest.raises(BadInput, match="missing: mean, and this preparation is not fitted again"):
        onnxgrad.train(trained, table, **{**how, **settings})
    plain = onnxgrad.train(linear(6), table, **{**how, "standardize": False}).inference_model()
    with pytest.raises(BadInput, match="missing: mean, and this preparation is not fitted again"):
        onnxgrad.train(plain, table, **how)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["mean", "drop"])
def test_labels_are_not_prepared(way, stream, tmp_path):
    """A column that `inputs` gives to the loss is neither filled nor standardized."""
    pyarrow.csv.write_csv(pa.table({**COLUMNS, "price": [1000.0 + i for i in range(40)]}), tmp_path / "rows.csv")
    settings = {"loss": "mse", "missing": way, "standardize": True, "stream": stream, "optimizer": "sgd",
                "learning_rate": 1e-12, "epochs": 1}  # fmt: skip
    trainer = onnxgrad.train(linear(6), tmp_path / "rows.csv", inputs={**INPUTS, "labels": "price"}, **settings)
    other = onnxgrad.train(linear(6), tmp_path / "rows.csv", inputs=INPUTS, labels="price", **settings)
    assert trainer.history.epochs[0]["loss"] == pytest.approx(other.history.epochs[0]["loss"], rel=1e-6)
    assert trainer.history.epochs[0]["loss"] > 1e5
    pyarrow.csv.write_csv(pa.table({**COLUMNS, "price": [None] * 40}), tmp_path / "rows.csv")
    none = "every row of .* has a missing value" if way == "drop" else "no row of .* has a label"
    with pytest.raises(BadInput, match=none):
        onnxgrad.train(linear(6), tmp_path / "rows.csv", inputs={**INPUTS, "labels": "price"}, **settings)


def test_many_columns_of_numbers_are_prepared_by_a_few_nodes():
    """Of columns that stand side by side, also with gaps, between text: the numbers are those of pandas' way."""
    arrays = {f"f{i}": RNG.standard_normal(30) for i in range(300)}
    for i in range(0, 300, 7):
        arrays[f"f{i}"][RNG.integers(0, 30, 3)] = np.nan
    arrays["kind"] = RNG.choice(["a", "b"], 30)
    names = ",".join([*(f"f{i}" for i in range(150)), "kind", *(f"f{i}" for i in range(150, 300))])
    rows = {**arrays, "target": np.zeros(30)}
    settings = {"loss": "mse", "labels": "target", "missing": "indicator", "standardize": True, "learning_rate": 1e-9}
    trainer = onnxgrad.train(linear(302 + 43), rows, inputs={"x": names}, **settings)
    model = trainer.inference_model()
    assert len(model.graph.node) < 40
    filled = np.stack([np.where(np.isnan(a), np.nanmean(a), a) for n, a in arrays.items() if n != "kind"], axis=1)
    scaled = (filled - filled.mean(0)) / filled.std(0)
    kinds = np.stack([arrays["kind"] == k for k in "ab"], axis=1)
    gone = np.stack([np.isnan(arrays[f"f{i}"]) for i in range(0, 300, 7)], axis=1)
    x = np.concatenate([scaled[:, :150], kinds, scaled[:, 150:], gone], axis=1)
    np.testing.assert_allclose(trainer.data(rows).arrays["x"], x, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(predict(model, rows)["y"], x @ trainer.state()["w"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["rows", "stream"])
def test_codes_stay_text_where_all_of_them_are_digits(stream, tmp_path, monkeypatch):
    """In held-out rows, in predictions and in further training: zeros in front are kept."""
    monkeypatch.chdir(tmp_path)
    for name, codes in {"all": ["007", "10", "x1"], "digits": ["10", "007"]}.items():
        rows = "".join(f"{c},{k}\n" for k, c in enumerate(codes * 4))
        (tmp_path / f"{name}.csv").write_text(f"code,goal\n{rows}")
    onnx.save(linear(3), "m.onnx")
    how = ("--loss", "mse", "--epochs", 1, "--labels", "goal", "--learning-rate", 0.1)
    first = ("--input", "x=code", "--categories", "onehot", "--validation", "digits.csv")
    done = command("train", "m.onnx", "--data", "all.csv", *how, *first, *stream, "-o", "a.onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = predict("a.onnx", "digits.csv")["y"][:2, 0]
    weight = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("a.onnx").graph.initializer}["w"]
    np.testing.assert_allclose(found, weight[[1, 0], 0], rtol=1e-6)
    done = command("train", "a.onnx", "--data", "digits.csv", *how, *stream, "-o", "b.onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_word_among_numbers_is_named(tmp_path):
    (tmp_path / "rows.csv").write_text("a,labels\n1.5,1\n?,2\n3,3\n4.25,4\n")
    with pytest.raises(BadInput, match=r"and a gives 4, as 'a' is text: '\?' is no number\n  hint: leave"):
        onnxgrad.train(linear(1), tmp_path / "rows.csv", loss="mse", inputs={"x": "a"}, missing="mean")


@pytest.mark.parametrize("settings", [{"standardize": True}, {"missing": "mean"}])
def test_infinite_numbers_are_refused(settings):
    rows = {"a": np.array([1.0, 2.0, -np.inf, 3.0]), "labels": np.zeros((4, 1), np.float32)}
    with pytest.raises(BadInput, match="column 'a' is not finite: -inf in row 2"):
        onnxgrad.train(linear(1), rows, loss="mse", inputs={"x": "a"}, **settings)
    good = {**rows, "a": np.arange(4.0)}
    model = onnxgrad.train(linear(1), good, loss="mse", inputs={"x": "a"}, **settings).inference_model()
    with pytest.raises(BadInput, match=r"column 'a' of .* is not finite: -inf in row 2"):
        predict(model, rows)


@pytest.mark.parametrize("stream", [False, True])
def test_fields_of_objects_are_columns(stream, tmp_path):
    """By their own names, or with dots, where two objects have one; as in rows that are dicts."""
    lines = [f'{{"sensor": {{"t": {i}.0, "h": {2 * i}}}, "other": {{"h": 5}}, "y": {i}.5}}' for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    rows = {"a": np.arange(9.0), "b": 2 * np.arange(9.0), "y": np.arange(9) + 0.5}
    how = {"loss": "mse", "labels": "target", "shuffle": False, "learning_rate": 0.1}
    wanted = onnxgrad.train(linear(2), rows, inputs={"x": "a,b", "target": "y"}, **how)
    names = {"x": "t,sensor.h", "target": "y"}
    found = onnxgrad.train(linear(2), tmp_path / "rows.jsonl", inputs=names, stream=stream, **how)
    np.testing.assert_array_equal(found.state()["w"], wanted.state()["w"])


@pytest.mark.parametrize("values", [["1,234.5", "2,000", "3.5"], ["1.234,5", "3,5", "2.000"], ["1'000", "20"]])
def test_separators_of_thousands_make_no_categories(values):
    rows = {"a": np.array(values, object), "labels": np.zeros((len(values), 1), np.float32)}
    with pytest.raises(BadInput, match="separators of thousands"):
        onnxgrad.train(linear(3), rows, loss="mse", inputs={"x": "a"}, categories="onehot")
    rows["a"][0] = "192.168.001.b"
    model = linear(len(values))
    onnxgrad.train(model, rows, loss="mse", inputs={"x": "a"}, categories="onehot")


LACKING = {"number": [None, 5.0, None], "class": [None, "b", "c"], "whole": [2, None, 1]}


def unlabelled(kind, tmp_path):
    """Forms of `COLUMNS` with labels of which the first three rows are `LACKING`, and rows of the rest alone."""
    own = {"number": [float(i) for i in range(37)], "class": list("abc" * 12 + "a"), "whole": [0, 1, 2] * 12 + [0]}
    labels = LACKING[kind] + own[kind]
    table = pa.table({**{n: COLUMNS[n] for n in ("age", "colour", "when", "member")}, "y": labels})
    rest = table.filter(pa.array([v is not None for v in labels]))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=9)
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    numbers = np.array([np.nan if v is None else v for v in labels]) if kind != "class" else np.array(labels, object)
    columns = {n: table[n].to_pylist() for n in table.column_names}
    yield rest, table
    yield rest, tmp_path / "rows.parquet"
    yield rest, tmp_path / "rows.csv"
    yield rest, table.to_pylist()
    yield rest, columns
    yield rest, {**{n: np.array(c, object) for n, c in columns.items()}, "y": numbers}
    yield rest, lambda: table.to_batches(7)
    yield rest, lambda: iter(table.to_pylist())


@pytest.mark.parametrize("missing", ["drop", "mean", "indicator"])
@pytest.mark.parametrize("kind", LACKING)
def test_rows_without_a_label_are_left_out(kind, missing, tmp_path):
    """Means, categories, classes, steps and numbers are those of the rest of the rows."""
    loss = "mse" if kind == "number" else "cross_entropy:weight=balanced"
    trained = {}  # on the rest, by the settings of tables and of streams
    for rest, source in unlabelled(kind, tmp_path):
        streamed = callable(source)
        settings = {"loss": loss.partition(":")[0] if streamed else loss, "inputs": INPUTS, "missing": missing,
                    "standardize": True, "shuffle": False, "batch_size": 8, "learning_rate": 0.1}  # fmt: skip
        model = linear(6 + 2 * (missing == "indicator"), out=1 if kind == "number" else 3)
        if kind == "class" and streamed:
            settings["classes"] = "a,b,c"
        found = onnxgrad.train(model, source, **settings)
        if streamed not in trained:
            trained[streamed] = onnxgrad.train(model, rest, **settings)
        wanted = trained[streamed]
        np.testing.assert_array_equal(found.state()["w"], wanted.state()["w"])
        assert found.classes == wanted.classes
        assert found.history.epochs[0]["loss"] == wanted.history.epochs[0]["loss"]
    numbers = {**settings, "missing": None, "standardize": False, "inputs": {"x": "member,member2"}}
    table = pa.table({"member": [1.0] * 3, "member2": [2.0] * 3, "y": LACKING[kind]})
    with pytest.raises(BadInput, match=r"missing drop of train and evaluate leaves|no label in row 0"):
        onnxgrad.train(linear(2, out=1 if kind == "number" else 3), table, **numbers)


@pytest.mark.parametrize("way", ["mean", "drop"])
def test_rows_without_a_label_are_not_measured(way, tmp_path):
    """Nor are those without a value, where the model does not fill it in; saved models and metadata are alike."""
    trainer = onnxgrad.train(linear(6), COLUMNS, loss="mse", labels="target", inputs=INPUTS, missing=way)
    trainer.save(tmp_path / "o.onnx")
    for rest, source in list(unlabelled("number", tmp_path))[:6]:
        columns = {n: rest[n].to_pylist() for n in rest.column_names}
        full = [way == "mean" or None not in row for row in zip(columns["age"], columns["colour"])]
        y = predict(tmp_path / "o.onnx", rest.filter(pa.array(full)))["y"][:, 0].astype(float)
        error = y - np.array(columns["y"])[full]
        found = evaluate(tmp_path / "o.onnx", source, missing="drop")
        assert found.rows == len(error) == sum(full) == (38 if way == "mean" else 29)
        assert found.metrics["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-6)
        assert f"{40 - len(error)} of 40 rows of" in found.notes[0]
        assert "lack a value and are left out, 2 of them without a label" in found.notes[0]
        with pytest.raises(BadInput, match=r"missing values: 2|no value in row [03]|not finite"):
            evaluate(tmp_path / "o.onnx", source)
    with pytest.raises(BadInput, match=r"missing must be 'drop', not 'mean'"):
        evaluate(tmp_path / "o.onnx", source, missing="mean")


def test_rows_that_are_left_out_are_counted(tmp_path):
    """Of all rows of a stream too, whose parts do not say it again; labels that `inputs` joins are labels."""
    names = ("age", "colour", "when", "member")
    prices = {"a": [None, 1.0, None] + [2.0] * 37, "b": [None, None] + [3.0] * 38}
    pyarrow.csv.write_csv(pa.table({**{n: COLUMNS[n] for n in names}, **prices}), tmp_path / "rows.csv")
    onnx.save(linear(6, out=2), tmp_path / "m.onnx")
    lacking = sum(AGES[i] is None or COLOURS[i] is None or i < 3 for i in range(40))
    for stream in ((), ("--stream",)):
        done = command(
            "train", tmp_path / "m.onnx", "--data", tmp_path / "rows.csv", "--input", f"x={NAMES}", "--missing", "drop",
            "--loss", "mse", "--input", "labels=a,b", "-o", tmp_path / f"o{len(stream)}.onnx", "--epochs", 1, *stream,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown = " ".join(done.stderr.split())
        assert f"{lacking} of 40 rows of {tmp_path / 'rows.csv'} lack" in shown.replace("'", "")
        assert shown.count("lack a value and are left out, 3 of them without a label") == 1
