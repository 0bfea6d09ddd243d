"""Boxes in a table: a line of a ``.csv`` or ``.tsv`` file for each box, with its picture, its class and its corners."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from pathlib import Path

from onnxgrad.errors import BadInput
from onnxgrad.files import open_text
from onnxgrad.training.data.annotations.samples import DetectionData, Remarks, box_row, picture_size

#: Names of columns, by what they are.
FILES = ("image", "filename", "file", "path", "image_path", "img_path", "file_name", "image_id")
CLASSES = ("class", "label", "class_name", "category", "name", "labels")
CORNERS = (
    ("x1", "y1", "x2", "y2"),
    ("xmin", "ymin", "xmax", "ymax"),
    ("x_min", "y_min", "x_max", "y_max"),
    ("left", "top", "right", "bottom"),
)
SIZES = (("x", "y", "w", "h"), ("x", "y", "width", "height"))


def read_box_table(path: Path) -> DetectionData:
    """The pictures of a table; classes are the sorted names that occur.

    The first line names the columns. A line with a picture and no class is a picture without objects.

    Raises:
        BadInput: columns or a picture are missing, or a box cannot be used; by its line.
    """
    source = repr(str(path))
    with open_text(path) as file:
        text = file.read().decode()
    heading = text.partition("\n")[0]
    delimiter = max("\t;,", key=heading.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    columns = {name.strip().lower(): k for k, name in enumerate(next(lines, []))}
    of_file, of_class, corners, sized = _columns(columns, source)
    objects: dict[str, list[tuple[int, str, list[float]]]] = defaultdict(list)
    try:
        for cells in lines:
            if any(c.strip() for c in cells):
                _add(objects, [c.strip() for c in cells], lines.line_num, (of_file, of_class, corners), sized, source)
    except csv.Error as error:
        raise BadInput(f"line {lines.line_num} of {source}: {error}") from error
    names = sorted({name for found in objects.values() for _, name, _ in found if name})
    if not names:
        raise BadInput(f"{source} has no boxes")
    remarks, rows = Remarks(), []
    for called, found in objects.items():
        place, first = path.parent / called, f"line {found[0][0]} of {source}"
        if not place.is_file() and (path.parent / "images" / called).is_file():
            place = path.parent / "images" / called
        boxes = [f for f in found if f[1]]
        rows.append(
            box_row(
                place,
                picture_size(place, first),
                [box for *_, box in boxes],
                [names.index(name) for _, name, _ in boxes],
                lambda k, boxes=boxes: f"line {boxes[k][0]} of {source}",  # type: ignore[misc]
                remarks,
                name=called,
            )
        )
    return DetectionData(rows, names, source, remarks.lines())


def _columns(columns: dict[str, int], source: str) -> tuple[int, int, list[int], bool]:
    """The columns of the file, the class and the four numbers of a box; True if the last two are its size."""
    of_file = next((columns[n] for n in FILES if n in columns), None)
    of_class = next((columns[n] for n in CLASSES if n in columns), None)
    four = next((four for four in (*CORNERS, *SIZES) if set(four) <= columns.keys()), None)
    if of_file is None or of_class is None or four is None:
        raise BadInput(
            f"{source} is no table of boxes: its columns are {', '.join(map(repr, columns)) or 'none'}\n"
            "  hint: the first line names the columns image, class, x1, y1, x2, y2"
        )
    return of_file, of_class, [columns[n] for n in four], four in SIZES


def _add(
    objects: dict[str, list[tuple[int, str, list[float]]]],
    cells: list[str],
    line: int,
    columns: tuple[int, int, list[int]],
    sized: bool,
    source: str,
) -> None:
    """Add the box in the `cells` of a line."""
    of_file, of_class, corners = columns
    if max(of_file, of_class, *corners) >= len(cells) or not cells[of_file]:
        raise BadInput(f"line {line} of {source} has {len(cells)} cells, or no picture")
    texts = [cells[k] for k in corners]
    if not cells[of_class] and not any(texts):
        objects[cells[of_file]] += [(line, "", [])]
        return
    try:
        box = [float(t) for t in texts]
    except ValueError:
        raise BadInput(f"line {line} of {source} has a box that is no four numbers: {', '.join(texts)}") from None
    if not cells[of_class]:
        raise BadInput(f"line {line} of {source} has a box without a class")
    if sized:
        box = [box[0], box[1], box[0] + box[2], box[1] + box[3]]
    objects[cells[of_file]].append((line, cells[of_class], box))
