"""The matching of arrays to inputs, conversions, and refusals in one line that names the array."""

import io

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxgrad import predict
from onnxgrad.errors import BadInput
from onnxgrad.training.data import Data, Field, load_npz, match

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
IMAGE = Field("image", F32, (1, 2, 2))
CLASS = Field("labels", I64, (), label=True, classes=3)


def images(n=4, dtype=np.float32):
    return np.arange(n * 4).reshape(n, 1, 2, 2).astype(dtype)


def labels(n=4, dtype=np.int64):
    return (np.arange(n) % 3).astype(dtype)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        (["image", "labels"], ["image", "labels"]),
        (["labels", "image", "extra"], ["image", "labels"]),
        (["x", "y"], ["x", "y"]),
        (["y", "X", "weights"], ["X", "y"]),
        (["image", "t"], ["image", "t"]),
        (["image", "what"], ["image", "what"]),
        (["what", "labels"], ["what", "labels"]),
        (["images", "targets", "ids_of_rows"], ["images", "targets"]),
    ],
)
def test_arrays_meet_inputs_by_name_or_by_role(arrays, expected):
    chosen = match(dict.fromkeys(arrays, images()), [IMAGE, CLASS], "d")
    assert [chosen["image"], chosen["labels"]] == expected


def test_labels_that_are_an_input_are_said():
    like = Field("labels", IMAGE.dtype, IMAGE.shape, label=True)
    with pytest.raises(BadInput, match=r"\n  hint: labels='image' \(--labels image\) compares with the input"):
        match({"image": images()}, [IMAGE, like], "d")
    with pytest.raises(BadInput, match=r"no labels .*\n  hint: pictures in a folder for each class have labels"):
        match({"images": images()}, [IMAGE, CLASS], "d")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (["image"], r"has no labels for the input 'labels' \(int64\[N\]\); it holds 'image'"),
        (["labels"], r"has no array for the input 'image' \(float32\[N, 1, 2, 2\]\); it holds 'labels'"),
        (["imag", "labels", "other"], r"no array named 'image' .*; did you mean 'imag'"),
        (["image", "y", "t"], "no labels named 'labels'"),
        (["a", "b"], "no array named 'image'"),
        (["image", "x"], "no labels named 'labels'"),
    ],
)
def test_what_cannot_be_matched_is_refused(arrays, words):
    with pytest.raises(BadInput, match=words):
        match(dict.fromkeys(arrays, images()), [IMAGE, CLASS], "d")


@pytest.mark.parametrize(
    ("dtype", "field"),
    [
        (np.float64, IMAGE),
        (np.float16, IMAGE),
        (np.uint8, IMAGE),
        (np.int64, IMAGE),
        (ml_dtypes.bfloat16, IMAGE),
        (np.uint8, CLASS),
        (np.int32, CLASS),
        (np.uint64, CLASS),
        (np.float32, CLASS),
    ],
)
def test_conversions_that_lose_nothing(dtype, field):
    array = labels(4, dtype) if field is CLASS else images(4, dtype)
    found = Data({field.name: array}, [field]).arrays[field.name]
    assert found.dtype == field.dtype
    np.testing.assert_array_equal(found, array.astype(field.dtype))


def test_a_wide_float_is_rounded():
    found = Data({"image": np.full((1, 1, 2, 2), 0.1)}, [IMAGE]).arrays["image"]
    assert found.ravel()[0] == np.float32(0.1)


@pytest.mark.parametrize(
    ("array", "field", "words"),
    [
        (labels().astype(np.float64) + 0.5, CLASS, "float64 that int64 cannot"),
        (np.array([2**40]), Field("labels", np.dtype(np.int32), (), label=True), "int64 that int32 cannot"),
        (np.array([2**63], np.uint64), Field("labels", I64, (), label=True), "uint64 that int64 cannot"),
        (np.full((1, 1, 2, 2), 2**24 + 1), IMAGE, "int64 that float32 cannot"),
        (np.full((1, 1, 2, 2), 1e300), IMAGE, "as float32, is not finite"),
        (np.full((1, 1, 2, 2), "a"), IMAGE, "not numbers"),
        (np.full((1, 1, 2, 2), 1j), IMAGE, "not numbers"),
        (np.full((1, 1, 2, 2), None), IMAGE, "has no value in row 0"),
    ],
)
def test_conversions_that_lose_something_are_refused(array, field, words):
    with pytest.raises(BadInput, match=f"array '{field.name}' of the data.* {words}"):
        Data({field.name: array}, [field])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"image": images().reshape(4, 4)},
            r"'image' .*float32\[4, 4\]; expected float32\[N, 1, 2, 2\] .*reshape it",
        ),
        ({"image": np.zeros((4, 1, 2, 3), np.float32)}, r"expected float32\[N, 1, 2, 2\]$"),
        ({"image": np.float32(3)}, "expected"),
        ({"image": images() * np.nan}, "'image' of the data is not finite: nan in row 0"),
        ({"image": np.ma.masked_equal(images(), images()[2, 0, 0, 0])}, "not finite: nan in row 2"),
        ({"labels": np.ma.masked_equal(labels(), 1)}, "not finite: nan in row 1"),
        ({"image": np.where(images() == 9, np.inf, images())}, "not finite: inf in row 2"),
        ({"labels": np.eye(4, 3)}, "class indices, not one-hot"),
        ({"labels": labels() + 1}, "has the label 3 in row 2; the model tells 3 classes apart, 0 to 2"),
        ({"labels": labels() - 1}, "has the label -1 in row 0"),
        ({"labels": labels(5)}, "differ in their number of rows: 'image' has 4, 'labels' has 5"),
        ({"image": images(0), "labels": labels(0)}, "empty: 'image' has 0 rows"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    with pytest.raises(BadInput, match=words) as caught:
        Data({"image": images(), "labels": labels()} | change, [IMAGE, CLASS])
    assert len(str(caught.value).splitlines()) <= 2  # what is wrong, and a hint


def test_a_model_that_looks_for_nan_is_fed_it():
    filling = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        filling (float[N, 2] x) => (float[N, 2] y) <float zero = {0}> { gone = IsNaN (x) y = Where (gone, zero, x) }""")
    assert predict(filling, np.array([[np.nan, 2]]))["y"].tolist() == [[0, 2]]
    with pytest.raises(BadInput, match="is not finite: inf in row 0"):
        predict(filling, np.array([[np.inf, np.nan]], np.float32))


def test_the_label_that_the_loss_ignores_is_no_class():
    field = Field("labels", I64, (), label=True, classes=3, ignored=-100)
    Data({"labels": np.array([0, -100, 2])}, [field])
    with pytest.raises(BadInput, match="label -1 "):
        Data({"labels": np.array([0, -1, 2])}, [field])


def test_batches_cover_every_row_once_in_order():
    data = Data({"image": images(10), "labels": labels(10)}, [IMAGE, CLASS])
    order = np.random.default_rng(0).permutation(10)
    for start in (0, 4):
        seen, addresses = [], []
        for batch in data.batches(4, order, start):
            seen += batch["image"][:, 0, 0, 0].tolist()
            assert (batch["labels"] == labels(10)[(batch["image"][:, 0, 0, 0] / 4).astype(int)]).all()
            addresses.append(batch["image"].ctypes.data)
        assert seen == (order[start:] * 4).tolist()
        assert addresses[0] == addresses[-2] or start
    assert [len(b["labels"]) for b in data.batches(4)] == [4, 4, 2]


class TestFiles:
    def test_arrays_come_back(self, tmp_path):
        np.savez_compressed(tmp_path / "d.npz", image=images(), labels=labels())
        assert load_npz(tmp_path / "d.npz")["labels"].tolist() == labels().tolist()

    def test_missing(self, tmp_path):
        with pytest.raises(BadInput, match="there is no file"):
            load_npz(tmp_path / "d.npz")

    def test_truncated_anywhere(self, tmp_path):
        whole = io.BytesIO()
        np.savez(whole, image=images(50), labels=labels(50))
        path = tmp_path / "d.npz"
        for size in range(0, whole.getbuffer().nbytes, 37):
            path.write_bytes(whole.getvalue()[:size])
            with pytest.raises(BadInput, match=r"cannot read .*d\.npz"):
                load_npz(path)

    def test_a_flipped_byte_in_the_data(self, tmp_path):
        np.savez(tmp_path / "d.npz", image=images(50))
        data = bytearray((tmp_path / "d.npz").read_bytes())
        data[len(data) // 2] ^= 255
        (tmp_path / "d.npz").write_bytes(data)
        with pytest.raises(BadInput, match="cannot read"):
            load_npz(tmp_path / "d.npz")

    def test_python_objects_are_not_loaded(self, tmp_path):
        np.savez(tmp_path / "d.npz", image=images(), evil=np.array([{}], object))
        with pytest.raises(BadInput, match=r"'evil' .* holds Python objects"):
            load_npz(tmp_path / "d.npz")

    def test_a_single_array_has_no_name(self, tmp_path):
        np.save(tmp_path / "d.npy", images())
        with pytest.raises(BadInput, match="one array without a name"):
            load_npz(tmp_path / "d.npy")

    def test_no_arrays(self, tmp_path):
        np.savez(tmp_path / "d.npz")
        with pytest.raises(BadInput, match="holds no arrays"):
            load_npz(tmp_path / "d.npz")

    def test_text(self, tmp_path):
        (tmp_path / "d.npz").write_text("hello")
        with pytest.raises(BadInput, match="not a NumPy file"):
            load_npz(tmp_path / "d.npz")
