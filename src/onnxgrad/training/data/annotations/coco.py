"""COCO annotations: one JSON file of pictures, categories and objects, each with a box and perhaps an outline."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary
from onnxgrad.training.data.annotations.samples import BoxRow, DetectionData, Remarks, box_row, picture_size


def read_coco(path: Path) -> DetectionData:
    """The pictures of a COCO file, with the boxes of its categories, numbered in the order of their ids.

    Raises:
        BadInput: it is no such file, a picture is missing, or an annotation cannot be used; by its id.
    """
    source = repr(str(path))
    content = _loaded(path, source)
    names, number = _categories(content, source)
    pictures = {_id(p, f"a picture of {source}"): p for p in content["images"]}
    objects: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for position, annotation in enumerate(content["annotations"]):
        place = _place(annotation, position, source)
        if not isinstance(annotation, Mapping) or annotation.get("image_id") not in pictures:
            raise BadInput(f"{place} is of a picture that {source} does not have")
        if annotation.get("category_id") not in number:
            raise BadInput(
                f"{place} is of the category {annotation.get('category_id')!r}, which {source} does not have"
            )
        objects[annotation["image_id"]].append(annotation)
    files, remarks = _Files(path), Remarks()
    rows = [_row(p, objects[key], number, files, source, remarks) for key, p in pictures.items()]
    return DetectionData(rows, names, source, remarks.lines())


def _loaded(path: Path, source: str) -> dict[str, Any]:
    try:
        with open_ordinary(path) as file:
            content = json.load(file)
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {source} as JSON: {error}") from error
    parts = ("images", "annotations", "categories")
    lists = [isinstance(content, dict) and isinstance(content.get(part), list) for part in parts]
    if not all(lists):
        missing = parts[lists.index(False)]
        hint = "\n  hint: a table in JSON is a .jsonl file, an object per line" if not any(lists) else ""
        raise BadInput(f"{source} is no COCO file: it has no list {missing!r} (it needs {', '.join(parts)}){hint}")
    return content


def _categories(content: Mapping[str, Any], source: str) -> tuple[list[str], dict[Any, int]]:
    """The names of the classes, and their numbers by the ids of the categories."""
    found = {_id(c, f"a category of {source}"): str(c.get("name", c["id"])) for c in content["categories"]}
    ids = sorted(found) if all(isinstance(i, int) for i in found) else list(found)
    names = [found[i] for i in ids]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise BadInput(f"{source} has two categories called {twice!r}")
    return names, {i: k for k, i in enumerate(ids)}


def _id(entry: Any, what: str) -> Any:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("id"), (int, str)):
        raise BadInput(f"{what} has no id")
    return entry["id"]


def _place(annotation: Any, position: int, source: str) -> str:
    own = annotation.get("id") if isinstance(annotation, Mapping) else None
    return f"annotation {own} of {source}" if own is not None else f"annotation number {position} of {source}"


class _Files:
    """The picture files of annotations at `path`: beside it, or in a folder that is usual for them."""

    def __init__(self, path: Path) -> None:
        above, own = path.parent, path.stem.removeprefix("instances_").removeprefix("person_keypoints_")
        beside = [above, above / "images", above / own, above / "images" / own]
        up = [above.parent, above.parent / "images", above.parent / own, above.parent / "images" / own]
        self.folders = [*beside, *up]

    def find(self, name: str, place: str) -> Path:
        """The file called `name`. Raises BadInput without one."""
        for k, folder in enumerate(self.folders):
            if (file := folder / name).is_file():
                self.folders.insert(0, self.folders.pop(k))  # the next one is likely there, too
                return file
        raise BadInput(f"{place} is the file {name!r}, which is not there; looked for in {self.folders[0]} and others")


def _row(
    picture: Mapping[str, Any],
    objects: list[Mapping[str, Any]],
    number: Mapping[Any, int],
    files: _Files,
    source: str,
    remarks: Remarks,
) -> BoxRow:
    place = f"picture {picture['id']} of {source}"
    if not isinstance(picture.get("file_name"), str):
        raise BadInput(f"{place} has no file_name")
    file = files.find(picture["file_name"], place)
    width, height = picture.get("width"), picture.get("height")
    if isinstance(width, int) and isinstance(height, int) and min(width, height) > 0:
        size = (width, height)
    else:
        size = picture_size(file, place)
    boxes = [_corners(a, k, source) for k, a in enumerate(objects)]
    for k, a in enumerate(objects):
        if "area" in a and not (_is_number(a["area"]) and a["area"] >= 0):
            raise BadInput(f"{_place(a, k, source)} has the area {a['area']!r}")
    areas = [a.get("area", (b[2] - b[0]) * (b[3] - b[1])) for a, b in zip(objects, boxes)]
    return box_row(
        file,
        size,
        boxes,
        [number[a["category_id"]] for a in objects],
        lambda k: _place(objects[k], k, source),
        remarks,
        crowd=[bool(a.get("iscrowd", 0)) for a in objects],
        areas=areas,
        segments=tuple(a.get("segmentation") for a in objects),
        points=_points(objects, source),
        name=picture["id"],
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _corners(annotation: Mapping[str, Any], position: int, source: str) -> tuple[float, float, float, float]:
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        raise BadInput(f"{_place(annotation, position, source)} has the bbox {box!r}, not [x, y, width, height]")
    x, y, width, height = map(float, box)
    return x, y, x + width, y + height


def _points(objects: list[Mapping[str, Any]], source: str) -> np.ndarray | None:
    """Key points [n, K, 3] as x, y, visibility; zeros for an object without them."""
    given = [a.get("keypoints") for a in objects]
    size = max((len(g) for g in given if isinstance(g, list)), default=0)
    if not size:
        return None
    found = np.zeros((len(objects), size // 3, 3))
    for k, numbers in enumerate(given):
        if numbers is None or numbers == []:
            continue
        fits = isinstance(numbers, list) and len(numbers) == size and size % 3 == 0
        if not fits or not all(_is_number(v) and math.isfinite(v) for v in numbers):
            raise BadInput(f"{_place(objects[k], k, source)} has keypoints that are not x, y, visibility of each point")
        found[k] = np.reshape(numbers, (-1, 3))
    return found
