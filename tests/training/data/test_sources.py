"""Sources of data: files by suffix, folders, rows; ragged rows are padded, and batches of like lengths are made."""

import json
import threading
import time

import numpy as np
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training.data import Data, Field, Images, open_data
from onnxgrad.training.data.prefetch import DEPTH, ahead

F32, I64, BOOL = np.dtype(np.float32), np.dtype(np.int64), np.dtype(bool)
X = Field("x", F32, (3,))
TOKENS = Field("tokens", I64, (None,))
CLASS = Field("labels", I64, (), label=True, classes=4)
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
SENTENCES = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def only(data, size=10):
    """The one batch of all rows."""
    (batch,) = data.batches(size)
    return batch


def test_an_npy_file_is_mapped(tmp_path):
    np.save(tmp_path / "x.npy", ROWS)
    data = Data(tmp_path / "x.npy", [X])
    assert not data.arrays
    np.testing.assert_array_equal(only(data)["x"], ROWS)


def test_a_folder_of_npy_files(tmp_path):
    np.save(tmp_path / "x.npy", ROWS.astype(np.float64))
    np.save(tmp_path / "labels.npy", np.arange(4))
    data = Data(tmp_path, [X, CLASS])
    order = np.array([2, 0, 3, 1])
    first, second = data.batches(3, order)
    np.testing.assert_array_equal(first["x"], ROWS[[2, 0, 3]])
    assert first["x"].dtype == np.float32
    assert second["labels"].tolist() == [1]


def test_what_is_mapped_is_checked_batch_by_batch(tmp_path):
    np.save(tmp_path / "x.npy", np.where(ROWS == 7, np.nan, ROWS))
    batches = Data(tmp_path / "x.npy", [X]).batches(2)
    next(batches)
    with pytest.raises(BadInput, match=r"'x' .* is not finite"):
        next(batches)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.parquet

    fixed = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.ravel()), 3)
    table = pa.table({"x": fixed, "tokens": SENTENCES, "labels": [0, 1, 2, 3]})
    path = tmp_path / f"d{suffix}"
    (pyarrow.parquet.write_table if suffix == ".parquet" else pyarrow.feather.write_feather)(table, str(path))
    batch = only(Data(path, [X, TOKENS, CLASS]))
    np.testing.assert_array_equal(batch["x"], ROWS)
    assert batch["tokens"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0], [7, 8, 9, 10]]
    assert batch["labels"].tolist() == [0, 1, 2, 3]


def test_a_table_of_several_chunks(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    many = pa.table({"tokens": [[i] * (i % 5) for i in range(100)]})
    pyarrow.parquet.write_table(many, tmp_path / "d.parquet", row_group_size=7)
    found = open_data(tmp_path / "d.parquet")["tokens"].take(np.array([13, 99]), TOKENS)
    assert [a.tolist() for a in found] == [[13] * 3, [99] * 4]


def test_missing_values_of_a_table_are_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"x": [1.0, None]}), tmp_path / "d.parquet")
    with pytest.raises(BadInput, match="missing values: 1, the first in row 1"):
        Data(tmp_path / "d.parquet", [Field("x", F32, ())])


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow", "d.npy"])
def test_a_damaged_file_is_refused_by_name(tmp_path, name):
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(BadInput, match=rf"cannot read .*{name}"):
        open_data(tmp_path / name)
    with pytest.raises(BadInput, match="there is no file"):
        open_data(tmp_path / f"no-{name}")


class TestPictures:
    @pytest.fixture
    def folder(self, tmp_path):
        image = pytest.importorskip("PIL.Image")
        for i, kind in enumerate(["cats", "dogs"]):
            (tmp_path / kind).mkdir()
            for j in range(2):
                pixels = np.full((4, 6, 3), 100 * i + 50 * j, np.uint8)
                image.fromarray(pixels).save(tmp_path / kind / f"{j}.png")
        return tmp_path

    @pytest.mark.parametrize("shape", [(3, 4, 6), (4, 6, 3), (1, 4, 6), (3, 8, 8), (3, None, None)])
    def test_layouts(self, folder, shape):
        batch = only(Data(folder, [Field("images", F32, shape), CLASS]))
        sizes = tuple(n or m for n, m in zip(shape, (3, 4, 6)))
        assert batch["images"].shape == (4, *sizes)
        np.testing.assert_allclose(batch["images"].mean((1, 2, 3)) * 255, [0, 50, 100, 150], atol=1e-3)
        assert batch["labels"].tolist() == [0, 0, 1, 1]

    def test_they_are_normalized(self, folder):
        how = Images(mean=(0.1, 0.2, 0.3), std=0.5)
        batch = only(Data(folder, [Field("images", F32, (3, 4, 6)), CLASS], images=how))
        np.testing.assert_allclose(
            batch["images"][3, :, 0, 0], (150 / 255 - np.array([0.1, 0.2, 0.3])) / 0.5, rtol=1e-6
        )

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_pictures_are_turned_as_they_are_looked_at(self, tmp_path, orientation):
        """By the orientation that cameras write into EXIF, in rows and in their sizes."""
        image = pytest.importorskip("PIL.Image")
        turns = [np.asarray, np.fliplr, lambda p: np.rot90(p, 2), np.flipud, lambda p: p.swapaxes(0, 1), np.rot90,
                 lambda p: np.rot90(p, 2).swapaxes(0, 1), lambda p: np.rot90(p, 3)]  # fmt: skip
        shown = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)
        exif = image.Exif()
        exif[0x0112] = orientation
        stored = image.fromarray(np.ascontiguousarray(turns[orientation - 1](shown)))
        stored.save(tmp_path / "0.png", exif=exif)
        column, field = open_data(tmp_path)["images"], Field("images", F32, (3, None, None))
        np.testing.assert_allclose(column.take(np.arange(1), field)[0].transpose(1, 2, 0) * 255, shown, atol=1e-4)
        assert column.sizes(field).tolist() == [[6, 4]]

    def test_a_damaged_picture_is_named(self, folder):
        (folder / "cats" / "0.png").write_bytes(b"no picture")
        with pytest.raises(BadInput, match=r"cannot read the picture .*0\.png"):
            only(Data(folder, [Field("images", F32, (3, 4, 6)), CLASS]))

    def test_a_class_without_pictures(self, folder):
        (folder / "eels").mkdir()
        with pytest.raises(BadInput, match=r"eels.* holds no pictures"):
            open_data(folder)

    def test_what_takes_no_pictures(self, folder):
        with pytest.raises(BadInput, match="pictures cannot feed the input 'images'"):
            only(Data(folder, [Field("images", F32, (7,)), CLASS]))


def test_an_empty_folder_and_one_of_sounds(tmp_path):
    with pytest.raises(BadInput, match=r"neither \.npy files nor folders of pictures, one per class\n"):
        open_data(tmp_path)
    (tmp_path / "yes").mkdir()
    (tmp_path / "yes" / "0.WAV").write_bytes(b"RIFF")
    with pytest.raises(BadInput, match=r"one per class, but '\.wav'\n  hint: sounds .* as arrays, numpy\.savez"):
        open_data(tmp_path)


class Lazy:
    """Like ``datasets.Dataset``: rows are dicts, made when they are asked for."""

    def __init__(self, rows):
        self.rows, self.read = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.read += 1
        return self.rows[i]


def rows():
    return [{"tokens": s, "labels": i} for i, s in enumerate(SENTENCES)]


@pytest.mark.parametrize("source", [rows, lambda: Lazy(rows()), lambda: iter(rows()), lambda: (r for r in rows())])
def test_rows_that_are_dicts(source):
    batch = only(Data(source(), [TOKENS, CLASS]))
    assert batch["tokens"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0], [7, 8, 9, 10]]
    assert batch["labels"].tolist() == [0, 1, 2, 3]


def test_a_row_is_read_once_for_all_its_columns():
    source = Lazy(rows())
    data = Data(source, [TOKENS, CLASS])
    source.read = 0
    only(data)
    assert source.read == 4


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], "no rows"),
        ([1, 2], "1 array without a name, and there are 2 inputs"),
        ([(1, 2)], r"array 'tokens' of the data is int64\[1\]; expected int64\[N, \?\]"),
        ([object()], "a row of the data is object"),
        (3, "int is no data"),
        ([{"tokens": [1], "labels": 0}, {"labels": 1}], "row 1 has no 'tokens'; it has 'labels'"),
        ({"tokens": [[1], [[2]]], "labels": [0, 1]}, "'tokens' differ in rank|differ in rank"),
        ({"tokens": ["a", "bc"], "labels": [0, 1]}, "'tokens' of the data is text.* takes tokens"),
    ],
)
def test_what_is_no_data(source, words):
    with pytest.raises(BadInput, match=words):
        only(Data(source, [TOKENS, CLASS]))


class TestPadding:
    def test_where_rows_end(self):
        mask = Field("attention_mask", I64, (None,))
        lengths = Field("tokens_lengths", I64, ())
        batch = only(Data({"tokens": SENTENCES, "labels": np.arange(4)}, [TOKENS, mask, lengths, CLASS]))
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
        assert batch["tokens_lengths"].tolist() == [3, 1, 2, 4]

    def test_a_mask_that_is_given_is_taken(self):
        mask = Field("attention_mask", I64, (None,))
        given = [[0] * len(s) for s in SENTENCES]
        batch = only(Data({"tokens": SENTENCES, "attention_mask": given}, [TOKENS, mask]))
        assert not batch["attention_mask"].any()

    def test_labels_are_padded_with_what_the_loss_ignores(self):
        tags = Field("tags", I64, (None,), label=True, classes=20, ignored=-100)
        batch = only(Data({"tags": SENTENCES}, [tags]))
        assert batch["tags"][1].tolist() == [4, -100, -100, -100]

    def test_padding_is_no_class(self):
        tags = Field("tags", I64, (None,), label=True, classes=20, indices=True)
        for source in ({"tags": SENTENCES}, [{"tags": s} for s in SENTENCES]):
            with pytest.raises(BadInput, match=r"says what is padding\n  hint: cross_entropy:ignore_index=-100"):
                only(Data(source, [tags]))

    def test_both_axes_of_a_picture(self):
        image = Field("image", F32, (1, None, None))
        rows = [np.ones((1, 2, 3), np.float32), np.ones((1, 4, 1), np.float32)]
        batch = only(Data({"image": rows}, [image]))
        assert batch["image"].shape == (2, 1, 4, 3)
        assert batch["image"].sum() == 10

    def test_to_a_multiple(self):
        assert only(Data({"tokens": SENTENCES}, [TOKENS], pad_to=8))["tokens"].shape == (4, 8)

    def test_to_the_size_that_the_model_takes(self):
        assert only(Data({"tokens": SENTENCES}, [Field("tokens", I64, (6,))]))["tokens"].shape == (4, 6)
        with pytest.raises(BadInput, match=r"a row of size 4 along axis 1; expected int64\[N, 3\]"):
            only(Data({"tokens": SENTENCES}, [Field("tokens", I64, (3,))]))


@pytest.mark.parametrize(
    ("shape", "wanted", "hint"),
    [
        ((2, 8, 8, 3), (3, 8, 8), r"takes channels first: array.transpose\(0, 3, 1, 2\)"),
        ((2, 3, 8, 8), (8, 8, 3), r"takes channels last: array.transpose\(0, 2, 3, 1\)"),
        ((2, 192), (3, 8, 8), r"reshape it to \[2, 3, 8, 8\]"),
    ],
)
def test_channels_on_the_other_side_are_not_reshaped(shape, wanted, hint):
    with pytest.raises(BadInput, match=hint):
        Data({"image": np.zeros(shape, np.float32)}, [Field("image", F32, wanted)])


class TestOrder:
    @pytest.fixture
    def data(self):
        lengths = np.random.default_rng(0).integers(1, 50, 1003)
        return Data({"tokens": [np.full(n, n) for n in lengths]}, [TOKENS])

    def test_every_row_once(self, data):
        assert sorted(data.order([1, 0], 16)) == list(range(1003))

    def test_it_is_decided_by_the_seed(self, data):
        np.testing.assert_array_equal(data.order([1, 0], 16), data.order([1, 0], 16))
        assert (data.order([1, 0], 16) != data.order([1, 1], 16)).any()

    def test_rows_of_like_lengths_meet(self, data):
        def padding(order):
            batches = list(data.batches(16, order))
            return sum(b["tokens"].size for b in batches) / sum((b["tokens"] > 0).sum() for b in batches)

        assert padding(data.order([1, 0], 16)) < 1.1 < 1.7 < padding(np.random.default_rng(0).permutation(1003))

    def test_batches_do_not_come_by_length(self, data):
        lengths = [b["tokens"].shape[1] for b in data.batches(16, data.order([1, 0], 16))]
        assert abs(np.corrcoef(lengths, np.arange(len(lengths)))[0, 1]) < 0.3

    def test_a_run_goes_on_in_the_middle(self, data):
        order = data.order([1, 0], 16)
        whole = [json.dumps(b["tokens"].tolist()) for b in data.batches(16, order)]
        rest = [json.dumps(b["tokens"].tolist()) for b in data.batches(16, order, start=160)]
        assert rest == whole[10:]


class TestAhead:
    def test_it_is_the_same(self):
        assert list(ahead(iter(range(100)))) == list(range(100))

    def test_an_error_comes_in_its_place(self):
        def failing():
            yield 1
            raise BadInput("here")

        batches = ahead(failing())
        assert next(batches) == 1
        with pytest.raises(BadInput, match="here"):
            next(batches)

    def test_whoever_stops_early_leaves_no_thread(self):
        before = threading.active_count()
        batches = ahead(iter(range(10**9)))
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        batches.close()
        assert threading.active_count() == before

    def test_it_works_while_the_step_runs(self):
        made = []

        def making():
            for i in range(10):
                made.append(i)
                yield i

        batches = ahead(making())
        next(batches)
        for _ in range(1000):
            if len(made) == DEPTH + 2:
                break
            time.sleep(0.005)
        assert len(made) == DEPTH + 2, "and no more than it may hold"
        batches.close()

    def test_batches_that_wait_are_not_overwritten(self, tmp_path):
        np.save(tmp_path / "x.npy", np.arange(300, dtype=np.float32).reshape(100, 3))
        mapped = open_data(tmp_path / "x.npy")
        data = Data({**mapped, "labels": np.arange(100) % 4}, [X, CLASS])
        order = np.random.default_rng(0).permutation(100)
        batches = data.batches(7, order)
        first = next(batches)
        time.sleep(0.2)
        assert (first["x"][:, 0] / 3 % 4 == first["labels"]).all()
        for batch in batches:
            assert (batch["x"][:, 0] / 3 % 4 == batch["labels"]).all()
