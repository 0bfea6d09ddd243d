"""The fingerprint of data: the same for the same rows, another one if a single number is another."""

import numpy as np
import pytest

from onnxgrad.training.data import Data, Field, Images

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
X, CLASS = Field("x", F32, (3,)), Field("labels", I64, (), label=True, classes=4)
ROWS = np.arange(3000, dtype=np.float32).reshape(1000, 3)
LABELS = np.arange(1000) % 4


class Lazy:
    """Rows that are made when they are asked for."""

    def __init__(self, rows, own=None):
        self.rows, self.asked = rows, 0
        if own is not None:
            self._fingerprint = own

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.asked += 1
        return {"x": self.rows[i], "labels": LABELS[i]}


def saved(rows, place):
    np.save(place / "x.npy", rows)
    np.save(place / "labels.npy", LABELS)
    return place


def table(rows, place):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"x": list(rows), "labels": LABELS}), place / "d.parquet")
    return place / "d.parquet"


@pytest.mark.parametrize(
    "source",
    [
        lambda rows, place: {"x": rows, "labels": LABELS},
        lambda rows, place: {"x": list(rows), "labels": LABELS},
        lambda rows, place: [{"x": r, "labels": k} for r, k in zip(rows, LABELS)],
        lambda rows, place: Lazy(rows),
        saved,
        lambda rows, place: saved(np.asfortranarray(rows), place),
        table,
    ],
    ids=["arrays", "lists", "dicts", "made on demand", "npy", "npy by columns", "parquet"],
)
def test_one_number(tmp_path, source):
    def fingerprint(rows):
        return Data(source(rows, tmp_path), [X, CLASS]).fingerprint

    changed = ROWS.copy()
    changed[777, 1] = np.nextafter(changed[777, 1], 0)
    assert fingerprint(ROWS) == fingerprint(ROWS.copy()) != fingerprint(changed)
    assert fingerprint(ROWS) != fingerprint(ROWS[::-1])


def test_ragged_rows_are_told_from_their_neighbours():
    tokens = Field("tokens", I64, (None,))
    one, other = (Data({"tokens": r}, [tokens]).fingerprint for r in ([[1, 2], [3]], [[1], [2, 3]]))
    assert one != other


def test_rows_on_demand_are_read_once_for_it_and_a_fingerprint_of_their_own_is_believed():
    rows = Lazy(ROWS)
    data = Data(rows, [X, CLASS])
    rows.asked = 0
    assert data.fingerprint == data.fingerprint
    assert rows.asked == 1000
    named = [Data(Lazy(ROWS, own), [X, CLASS]) for own in ("a", "a", "b")]
    assert named[0].fingerprint == named[1].fingerprint != named[2].fingerprint
    assert named[0].columns["x"].fetch.items.asked < 3


def test_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    fields = [Field("images", F32, (1, 4, 4)), CLASS]
    for kind in "ab":
        (tmp_path / kind).mkdir()
        image.fromarray(np.full((4, 4), 7, np.uint8)).save(tmp_path / kind / "1.png")
    first = Data(tmp_path, fields).fingerprint
    assert first == Data(tmp_path, fields).fingerprint != Data(tmp_path, fields, images=Images(mean=0.5)).fingerprint
    image.fromarray(np.full((4, 4), 8, np.uint8)).save(tmp_path / "b" / "1.png")
    assert Data(tmp_path, fields).fingerprint != first
