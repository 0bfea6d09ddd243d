"""Readers of boxes: the same samples from every format, and one error for whatever is broken, with its place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training.data.annotations.reading import read_detection
from onnxgrad.training.data.annotations.yolo_folder import read_mapping
from tests.training.detection.pictures import SCENES, draw_picture, write_coco, write_table, write_voc, write_yolo

WRITERS = {"coco": write_coco, "yolo": write_yolo, "voc": write_voc, "csv": write_table}


@pytest.mark.parametrize("kind", WRITERS)
def test_samples_of_each_format(tmp_path, kind):
    data = read_detection(WRITERS[kind](tmp_path))
    assert data.names == ("cat", "dog")
    assert len(data) == 3
    assert data.counts.tolist() == [1, 2]
    for sample, ((width, height), boxes) in zip(data, SCENES):
        assert sample["image"].shape == (height, width, 3)
        assert sample["image"].dtype == np.uint8
        np.testing.assert_allclose(sample["boxes"], np.reshape([b for b, _ in boxes], (-1, 4)), atol=1e-5)
        assert [data.names[k] for k in sample["labels"]] == [n for _, n in boxes]
        assert sample["boxes"].dtype == np.float32
        assert sample["labels"].dtype == np.int64
        assert sample["crowd"].dtype == bool
        assert not sample["crowd"].any()


def test_folders_are_recognised(tmp_path):
    write_coco(tmp_path / "coco")
    write_yolo(tmp_path / "yolo")
    assert len(read_detection(tmp_path / "coco")) == len(read_detection(tmp_path / "yolo")) == 3
    (tmp_path / "yolo" / "data.yaml").unlink()
    assert read_detection(tmp_path / "yolo").names == ("0", "1")


def test_chosen_classes(tmp_path):
    data = read_detection(write_coco(tmp_path), ["dog"])
    assert data.names == ("dog",)
    assert data.counts.tolist() == [2]
    assert "1 boxes are of other classes" in data.notes[0]
    with pytest.raises(UnknownName, match=r"'dgo'.*dog"):
        read_detection(tmp_path / "boxes.json", ["dgo"])
    both = read_detection(tmp_path / "boxes.json", ["dog", "cat"])
    assert both[0]["labels"].tolist() == [1, 0]
    table = read_detection(write_table(tmp_path), ["bird", "dog"])  # a table need not have a box of every class
    assert table.counts.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bbox": [1, 2, float("nan"), 4]}, "annotation 11 of .* numbers that are not finite"),
        ({"bbox": [20, 2, -5, 4]}, "annotation 11 of .* negative width"),
        ({"bbox": [100, 2, 5, 4]}, "annotation 11 of .* no part inside of its picture of 64 × 48"),
        ({"bbox": [1, 2, 3]}, r"annotation 11 of .* not \[x, y, width, height\]"),
        ({"category_id": 5}, "annotation 11 of .* category 5"),
        ({"image_id": 5}, "annotation 11 of .* a picture that"),
        ({"area": -1}, "annotation 11 of .* the area -1"),
    ],
)
def test_broken_annotations_of_coco(tmp_path, change, problem):
    path = write_coco(tmp_path, **change)
    with pytest.raises(BadInput, match=problem):
        read_detection(path)


def test_broken_files_of_coco(tmp_path):
    path = write_coco(tmp_path)
    (tmp_path / "images" / "1.png").unlink()
    with pytest.raises(BadInput, match=r"picture 101 of .* '1.png', which is not there"):
        read_detection(path)
    path.write_text("{")
    with pytest.raises(BadInput, match="as JSON"):
        read_detection(path)
    path.write_text(json.dumps({"images": [], "annotations": []}))
    with pytest.raises(BadInput, match="no list 'categories'"):
        read_detection(path)


def test_sizes_of_pictures_are_compared(tmp_path):
    data = read_detection(write_coco(tmp_path))
    draw_picture(tmp_path / "images" / "0.png", (10, 10))
    with pytest.raises(BadInput, match="10 by 10 pixels, and its annotation says 64 by 48"):
        _ = data[0]


def test_a_turned_picture_is_turned(tmp_path):
    path = write_table(tmp_path, SCENES[1:])
    picture = Image.fromarray(np.zeros((40, 70, 3), np.uint8))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / "0.png", exif=exif)
    assert read_detection(path)[0]["image"].shape == (70, 40, 3)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("2 0.5 0.5 0.1 0.1", "class 2; there are 2"),
        ("0 0.5 0.5 0.1", "has 4 numbers; a box has 5"),
        ("0 0.5 0.5 nan 0.1", "not finite"),
        ("0 0.5 0.5 -0.1 0.1", "negative width"),
        ("0 30 20 10 10", "a box in pixels"),
        ("cat 0.5 0.5 0.1 0.1", "not a class and shares"),
        ("0.5 0.5 0.5 0.1 0.1", "no whole number"),
    ],
)
def test_broken_lines_of_yolo(tmp_path, line, problem):
    path = write_yolo(tmp_path)
    (tmp_path / "labels" / "train" / "1.txt").write_text(f"1 0.5 0.5 1 1\n\n{line}\n")
    with pytest.raises(BadInput, match=f"line 3 of .*1.txt.*{problem}"):
        read_detection(path)


def test_polygons_and_parts_of_yolo(tmp_path):
    path = write_yolo(tmp_path)
    (tmp_path / "labels" / "train" / "2.txt").write_text("1 0.1 0.2 0.5 0.2 0.3 0.8\n")
    data = read_detection(path)
    np.testing.assert_allclose(data[2]["boxes"], [[5, 10, 25, 40]])
    assert data.rows[2].segments is not None
    with pytest.raises(BadInput, match="no part 'val'; it has train"):
        read_detection(path, part="val")


def test_mappings_of_yaml(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text(
        "path: ../a  # where\ntrain:\n  - images/a\n  - images/b\nnames: ['one, two', \"b\",\n  c]\n"
        "kpt_shape: [17, 3]\nnc: 3\n"
    )
    assert read_mapping(path) == {
        "path": "../a",
        "train": ["images/a", "images/b"],
        "names": ["one, two", "b", "c"],
        "kpt_shape": ["17", "3"],
        "nc": "3",
    }
    path.write_text("names: {0: a, 1: b}\n")
    assert read_mapping(path) == {"names": {"0": "a", "1": "b"}}
    path.write_text("names\n")
    with pytest.raises(BadInput, match=r"line 1 of .* not key: value"):
        read_mapping(path)


def test_broken_lines_of_tables(tmp_path):
    path = write_table(tmp_path)
    text = path.read_text()
    for line, problem in (
        ("0.png,cat,1,2,x,4", "no four numbers"),
        ("0.png,,1,2,3,4", "without a class"),
        ("0.png,cat,1,2", "4 cells"),
        ("0.png,cat,9,2,3,4", "negative width"),
    ):
        path.write_text(text + line + "\n")
        with pytest.raises(BadInput, match=f"line 6 of .*{problem}"):
            read_detection(path)
    path.write_text(text + "9.png,cat,1,2,3,4\n")
    with pytest.raises(BadInput, match=r"line 6 of .* names the picture .*9.png', which is not there"):
        read_detection(path)
    path.write_text("0.png,1,2,3,4,cat\n")
    with pytest.raises(BadInput, match="no table of boxes"):
        read_detection(path)


def test_broken_files_of_voc(tmp_path):
    folder = write_voc(tmp_path)
    file = folder / "Annotations" / "0.xml"
    text = file.read_text()
    file.write_text(text.replace("<xmin>31</xmin>", "<xmin>a</xmin>"))
    with pytest.raises(BadInput, match=r"object 2 of .*0\.xml.* no numbers"):
        read_detection(folder)
    file.write_text("<!DOCTYPE a [<!ENTITY b 'c'>]>" + text)
    with pytest.raises(BadInput, match="defines entities"):
        read_detection(folder)
    file.write_text(text.replace("</name>", "</name><difficult>1</difficult>"))
    assert read_detection(folder)[0]["crowd"].all()


def test_odd_boxes_stay_and_are_noted(tmp_path):
    path = write_coco(tmp_path, bbox=[50, 10, 30, 0])
    data = read_detection(path)
    assert data[0]["boxes"][0].tolist() == [50, 10, 80, 10]
    assert [n.partition(";")[0] for n in data.notes] == ["1 boxes reach out of their pictures", "1 boxes have no area"]
    assert all("annotation 11 of" in n for n in data.notes)


def test_what_is_no_data(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(BadInput, match="holds no boxes"):
        read_detection(tmp_path / "a.txt")
    with pytest.raises(BadInput, match="no file or folder"):
        read_detection(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no pictures with files of labels"):
        read_detection(tmp_path / "empty")
