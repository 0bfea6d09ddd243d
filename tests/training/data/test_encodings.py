"""Texts of data in other encodings than UTF-8: decoded by their byte order mark, or refused with their line."""

import codecs
import json

import pyarrow as pa
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.files import open_text, read_text
from onnxgrad.training.data.shards import Shards
from onnxgrad.training.data.sources import open_data
from tests.training.data.test_table import linear

CITIES = ["Köln", "Zürich", "Łódź", "東京", "𝔄"] * 8
SIZES = [k / 4 for k in range(40)]
LINES = {
    "csv": "größe,stadt\n" + "".join(f"{size},{city}\n" for size, city in zip(SIZES, CITIES)),
    "jsonl": "".join(
        json.dumps({"größe": size, "stadt": city}, ensure_ascii=False) + "\n" for size, city in zip(SIZES, CITIES)
    ),
}
MARKED = {"utf-8": b"", "utf-8-sig": b"", "utf-16": b"", "utf-32": b"", "utf-16-be": codecs.BOM_UTF16_BE}


@pytest.mark.parametrize("encoding", MARKED)
@pytest.mark.parametrize("suffix", LINES)
def test_a_byte_order_mark_names_the_encoding(tmp_path, monkeypatch, suffix, encoding):
    """Blocks end within characters."""
    monkeypatch.setattr("onnxgrad.files._BLOCK", 7)
    path = tmp_path / f"d.{suffix}"
    path.write_bytes(MARKED[encoding] + LINES[suffix].encode(encoding))
    found = open_data(path)
    assert found["größe"].array.tolist() == SIZES
    assert found["stadt"].array.tolist() == CITIES
    assert pa.concat_tables(map(pa.table, Shards(path))).to_pydict() == {"größe": SIZES, "stadt": CITIES}
    assert read_text(path, 1 << 20) == LINES[suffix]
    with open_text(path) as file:
        assert [file.readline().decode(), file.seek(0), file.read().decode()] == [
            LINES[suffix].partition("\n")[0] + "\n", 0, LINES[suffix]
        ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("suffix", LINES)
def test_other_encodings_are_refused(tmp_path, suffix, stream):
    """By the line, also far behind what pyarrow reads first; and UTF-16 without a mark."""
    settings = {"loss": "mse", "labels": "größe", "inputs": {"x": "stadt"}, "categories": "onehot", "stream": stream}
    one = "0.5,Köln" if suffix == "csv" else '{"größe": 0.5, "stadt": "Köln"}'
    other = "0.5,Bonn" if suffix == "csv" else '{"größe": 0.5, "stadt": "Bonn"}'
    head = ["größe,stadt"] if suffix == "csv" else []
    text = "\n".join([*head, *[other] * 90000]).encode() + b"\n"
    path = tmp_path / f"d.{suffix}"
    path.write_bytes(text + one.encode("cp1252") + b"\n")
    line = 90001 + len(head)
    with pytest.raises(BadInput, match=rf"is no text in UTF-8: b'\\xf6' in line {line}\n  hint: .*iconv"):
        onnxgrad.train(linear(1), path, **settings)
    path.write_bytes(LINES[suffix].encode("utf-16-le"))
    with pytest.raises(BadInput, match="may be UTF-16 without a byte order mark"):
        onnxgrad.train(linear(5), path, **settings)
