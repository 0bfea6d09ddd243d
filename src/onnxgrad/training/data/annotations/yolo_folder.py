"""YOLO data sets: a text file of boxes for each picture, and ``data.yaml``, which names folders and classes.

A line is ``class x y width height`` in shares of the picture (x, y is the middle), or ``class x1 y1 x2 y2 …``, a
polygon.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import read_text
from onnxgrad.training.data.annotations.samples import BoxRow, DetectionData, Remarks, box_row, picture_size
from onnxgrad.training.data.images import SUFFIXES

#: Names of a part of the data, in ``data.yaml`` and of folders.
PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
#: Bytes of the largest text file.
LARGEST = 1 << 26


def read_yolo(path: Path, part: str = "train") -> DetectionData:
    """The pictures of a YOLO data set.

    Args:
        path: of ``data.yaml``, or of a folder with it, or with the folders ``images`` and ``labels``.
        part: "train", "val" or "test", where the data have parts.

    Raises:
        BadInput: files are missing, or a line cannot be used; by its file and number.
    """
    described = path if path.is_file() else next((p for p in sorted(path.glob("*.y*ml"))), None)
    about = {} if described is None else read_mapping(described)
    root = path if path.is_dir() else path.parent
    names = _names(about, root, described)
    pictures = [p for place in _places(about, root, described, part) for p in _pictures(place)]
    source = repr(str(path))
    labels = {p: _label_file(p) for p in pictures}
    if not any(file.is_file() for file in labels.values()):
        first = f": of {str(pictures[0])!r} it would be {str(labels[pictures[0]])!r}" if pictures else ""
        raise BadInput(f"{source} has no pictures with files of labels{first}")
    points = about.get("kpt_shape")
    shape = None if points is None else (int(points[0]), int(points[1]))
    remarks = Remarks()
    rows = [_row(p, file, names, shape, remarks) for p, file in labels.items()]
    if not names:
        names = [str(k) for k in range(1 + max(int(r.labels.max(initial=-1)) for r in rows))]
    return DetectionData(rows, names, source, remarks.lines())


def _names(about: dict[str, Any], root: Path, described: Path | None) -> list[str]:
    """The names of the classes; empty if they are not told."""
    found = about.get("names")
    if isinstance(found, dict):
        numbers = {int(k): str(v) for k, v in found.items() if str(k).isdecimal()}
        if sorted(numbers) != list(range(len(found))):
            raise BadInput(f"the names in {str(described)!r} are not numbered 0, 1, 2, …")
        return [numbers[k] for k in range(len(numbers))]
    if isinstance(found, list):
        return [str(n) for n in found]
    listing = next((p for p in (root / "classes.txt", root / "labels" / "classes.txt") if p.is_file()), None)
    if listing is not None:
        return [line.strip() for line in read_text(listing, LARGEST).splitlines() if line.strip()]
    return [str(k) for k in range(int(about["nc"]))] if str(about.get("nc", "")).isdecimal() else []


def _places(about: dict[str, Any], root: Path, described: Path | None, part: str) -> list[Path]:
    """The folders, or lists of pictures, of a `part`."""
    aliases = PARTS.get(part, (part,))
    given = next((about[name] for name in aliases if about.get(name)), None)
    if given is None and any(about.get(name) for names in PARTS.values() for name in names):
        held = ", ".join(n for names in PARTS.values() for n in names if about.get(n))
        raise BadInput(f"{str(described)!r} has no part {part!r}; it has {held}")
    if given is not None:
        base = root / str(about.get("path") or ".")
        bases = [base, root, root.parent]
        return [_existing(str(g), bases, described) for g in (given if isinstance(given, list) else [given])]
    for folder in (root / "images", root):
        inner = [p for name in aliases for p in (folder / name / "images", folder / name) if p.is_dir()]
        if inner:
            return inner[:1]
    return [root / "images" if (root / "images").is_dir() else root]


def _existing(name: str, bases: list[Path], described: Path | None) -> Path:
    """`name` below one of `bases`; exporters write ``../train/images`` for a folder beside the file."""
    for text in (name, name.removeprefix("../")):
        for base in bases:
            if (found := base / text).exists():
                return found
    raise BadInput(f"{str(described)!r} names {name!r}, which is not there")


def _pictures(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES)
    listed = [line.strip() for line in read_text(place, LARGEST).splitlines() if line.strip()]
    found = [place.parent / name for name in listed]
    missing = next((k for k, p in enumerate(found) if not p.is_file()), None)
    if missing is not None:
        raise BadInput(f"line {missing + 1} of {str(place)!r} names {listed[missing]!r}, which is not there")
    return found


def _label_file(picture: Path) -> Path:
    """The text file for a picture: in ``labels`` in place of ``images``, or beside it."""
    parts = list(picture.parent.parts)
    if "images" in parts:
        place = len(parts) - 1 - parts[::-1].index("images")
        there = Path(*parts[:place], "labels", *parts[place + 1 :]) / f"{picture.stem}.txt"
        if there.is_file() or not picture.with_suffix(".txt").is_file():
            return there
    return picture.with_suffix(".txt")


def _row(picture: Path, file: Path, names: list[str], points: tuple[int, int] | None, remarks: Remarks) -> BoxRow:
    size = picture_size(picture, f"the labels {str(file)!r}")
    lines = read_text(file, LARGEST).splitlines() if file.is_file() else []
    boxes, labels, segments, places, marks = [], [], [], [], []
    for k, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"line {k} of {str(file)!r}"
        number, shares = _read_line(line, place)
        if number < 0 or (names and number >= len(names)):
            raise BadInput(f"{place} has the class {number}; there are {len(names)}, from 0")
        corners, outline = _corners(shares, points, place)
        boxes.append(corners * np.tile(size, 2))
        labels.append(number)
        segments.append(None if outline is None else [(outline * size).ravel().tolist()])
        if points is not None:
            marks.append(_points(shares[4:], points, size, place))
        places.append(place)
    return box_row(
        picture,
        size,
        boxes,
        labels,
        lambda k: places[k],
        remarks,
        areas=[_area(outline, box) for outline, box in zip(segments, boxes)],
        segments=tuple(segments) if any(segments) else None,
        points=np.stack(marks) if marks else None,
        name=picture.stem,
    )


def _read_line(line: str, place: str) -> tuple[int, np.ndarray]:
    try:
        first, *others = [float(t) for t in line.split()]
    except ValueError:
        raise BadInput(f"{place} is {line.strip()[:60]!r}, not a class and shares of the picture") from None
    if first != int(first):
        raise BadInput(f"{place} has the class {first:g}, no whole number")
    return int(first), np.array(others)


def _corners(shares: np.ndarray, points: tuple[int, int] | None, place: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The corners of a box, and its polygon if it is one; as shares of the picture."""
    expected = 4 if points is None else 4 + points[0] * points[1]
    is_polygon = points is None and len(shares) >= 6 and len(shares) % 2 == 0
    if len(shares) != expected and not is_polygon:
        raise BadInput(f"{place} has {len(shares) + 1} numbers; a box has {expected + 1}, a polygon 7 or more")
    box = shares if is_polygon else shares[:4]
    if np.isfinite(box).all() and (abs(box) > 2).any():
        raise BadInput(
            f"{place} is a box in pixels, where shares of the picture from 0 to 1 are wanted: "
            f"{', '.join(f'{v:g}' for v in box[:4])}"
        )
    if is_polygon:
        outline = shares.reshape(-1, 2)
        return np.concatenate([outline.min(0), outline.max(0)]), outline
    return np.concatenate([box[:2] - box[2:] / 2, box[:2] + box[2:] / 2]), None


def _area(outline: list[list[float]] | None, box: np.ndarray) -> float:
    """The area of a polygon, or of a box without one."""
    if outline is None:
        return float(np.prod(box[2:] - box[:2]))
    x, y = np.reshape(outline[0], (-1, 2)).T
    return float(abs(np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y)) / 2)


def _points(shares: np.ndarray, shape: tuple[int, int], size: tuple[int, int], place: str) -> np.ndarray:
    """Key points [K, 3] as x, y in pixels and visibility; 2 without one."""
    given = shares.reshape(shape)
    if shape[1] not in (2, 3) or not np.isfinite(given).all():
        raise BadInput(f"{place} has key points that are no x, y, or x, y, visibility")
    seen = given[:, 2:] if shape[1] == 3 else np.full((shape[0], 1), 2.0)
    return np.concatenate([given[:, :2] * size, seen], axis=1)


_ENTRY = re.compile(r"(?P<indent>\s*)(?:-\s+|(?P<key>[\w'\"-]+)\s*:\s*)(?P<value>.*)")


def read_mapping(path: Path) -> dict[str, Any]:
    """The part of YAML that ``data.yaml`` uses: entries of text, lists, and one level of entries or items below.

    Raises:
        BadInput: it cannot be read.
    """
    found: dict[str, Any] = {}
    last = ""
    lines = iter(enumerate(read_text(path, LARGEST).splitlines(), 1))
    for number, line in lines:
        line = _without_comment(line)
        if not line.strip() or line.strip() == "---":
            continue
        while line.count("[") > line.count("]"):  # a list over several lines
            more = next(lines, None)
            if more is None:
                raise BadInput(f"line {number} of {str(path)!r} begins a list that does not end")
            line += " " + _without_comment(more[1]).strip()
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise BadInput(f"line {number} of {str(path)!r} is {line.strip()[:60]!r}, not key: value")
        key, value = entry["key"], _value(entry["value"].strip())
        if not entry["indent"] and key is not None:
            found[key.strip("'\"")] = value
            last = key.strip("'\"")
        elif isinstance(found.get(last), str) and found[last] and last:
            raise BadInput(f"line {number} of {str(path)!r} belongs to {last!r}, which has a value already")
        elif last and key is None:
            found[last] = [*(found[last] if isinstance(found[last], list) else []), value]
        elif last:
            nested = found[last] if isinstance(found[last], dict) else {}
            found[last] = {**nested, str(key).strip("'\""): value}
    return found


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line).rstrip()


def _value(text: str) -> Any:
    """A list in brackets, a mapping in braces, or text without its quotes."""
    if text.startswith("[") and text.endswith("]"):
        return [_value(t) for t in _items(text[1:-1])]
    if text.startswith("{") and text.endswith("}"):
        pairs = (item.partition(":")[::2] for item in _items(text[1:-1]))
        return {_value(k.strip()): _value(v.strip()) for k, v in pairs}
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _items(text: str) -> list[str]:
    """The items between commas, which may stand in quotes."""
    return [m.strip() for m in re.findall(r"""(?:"[^"]*"|'[^']*'|[^,"'])+""", text) if m.strip()]
