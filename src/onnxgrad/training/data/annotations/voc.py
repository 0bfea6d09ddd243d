"""Pascal VOC annotations: an XML file for each picture, in ``Annotations`` beside ``JPEGImages``, or in one folder."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary
from onnxgrad.training.data.annotations.samples import BoxRow, DetectionData, Remarks, box_row, picture_size
from onnxgrad.training.data.images import SUFFIXES

#: Bytes of the largest XML file.
LARGEST = 1 << 24
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read_voc(path: Path, part: str = "train") -> DetectionData:
    """The pictures of a folder of VOC annotations; classes are the sorted names that occur.

    Pixels are counted from 1 and a box has both of its corners, as VOC defines it: x1 is xmin - 1, x2 is xmax.

    Args:
        path: of the folder.
        part: names a list of pictures in ``ImageSets/Main``, if the folder has such lists.

    Raises:
        BadInput: a file is missing, or an object cannot be used; by its file and number.
    """
    folder = path / "Annotations" if (path / "Annotations").is_dir() else path
    files = _listed(path, folder, part) or sorted(folder.glob("*.xml"))
    remarks = Remarks()
    read = [_objects(file) for file in files]
    names = sorted({name for _, objects in read for name, *_ in objects})
    pictures = [path / "JPEGImages", folder, path / "images", path.parent / "images"]
    rows = [_row(f, root, objects, names, pictures, remarks) for f, (root, objects) in zip(files, read)]
    return DetectionData(rows, names, repr(str(path)), remarks.lines())


def _listed(path: Path, folder: Path, part: str) -> list[Path]:
    """The annotations of the pictures that ``ImageSets/Main`` lists for `part`; none without lists."""
    lists = path / "ImageSets" / "Main"
    if not lists.is_dir():
        return []
    file = lists / f"{part}.txt"
    if not file.is_file():
        held = ", ".join(sorted(p.stem for p in lists.glob("*.txt") if "_" not in p.stem))
        raise BadInput(f"{str(lists)!r} has no list {part}.txt; it has {held}")
    found = [folder / f"{line.split()[0]}.xml" for line in file.read_text().splitlines() if line.strip()]
    missing = next((f for f in found if not f.is_file()), None)
    if missing is not None:
        raise BadInput(f"{str(file)!r} lists {missing.stem!r}, and there is no file {str(missing)!r}")
    return found


def _objects(file: Path) -> tuple[ElementTree.Element, list[tuple[str, list[float], bool]]]:
    """The content of an annotation, and the name, the corners and difficulty of each object."""
    try:
        with open_ordinary(file) as opened:
            text = opened.read(LARGEST + 1)
        if len(text) > LARGEST or re.search(rb"<!(DOCTYPE|ENTITY)", text):
            raise BadInput(f"{str(file)!r} is no annotation: it defines entities, or has more than {LARGEST} bytes")
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, OSError, ValueError) as error:
        raise BadInput(f"cannot read {str(file)!r} as XML: {error}") from error
    found = []
    for k, item in enumerate(root.iter("object"), 1):
        name, box = (item.findtext("name") or "").strip(), item.find("bndbox")
        texts = [None if box is None else box.findtext(c) for c in _CORNERS]
        if not name or None in texts:
            raise BadInput(f"object {k} of {str(file)!r} has no name, or no bndbox of {', '.join(_CORNERS)}")
        try:
            corners = [float(t) for t in texts if t is not None]
        except ValueError:
            raise BadInput(f"object {k} of {str(file)!r} has corners that are no numbers: {texts}") from None
        corners = [corners[0] - 1, corners[1] - 1, *corners[2:]]
        found.append((name, corners, (item.findtext("difficult") or "0").strip() == "1"))
    return root, found


def _row(
    file: Path,
    root: ElementTree.Element,
    objects: list[tuple[str, list[float], bool]],
    names: list[str],
    folders: list[Path],
    remarks: Remarks,
) -> BoxRow:
    called = (root.findtext("filename") or "").strip()
    named = [called] if called else []
    named += [f"{file.stem}{suffix}" for suffix in SUFFIXES]
    found = next((folder / n for n in named for folder in folders if (folder / n).is_file()), None)
    if found is None:
        raise BadInput(f"{str(file)!r} is of the picture {called or file.stem!r}, which is not there")
    place = repr(str(file))
    size = (root.findtext("size/width") or "", root.findtext("size/height") or "")
    known = (int(size[0]), int(size[1])) if all(s.strip().isdecimal() and int(s) for s in size) else None
    return box_row(
        found,
        known or picture_size(found, place),
        [corners for _, corners, _ in objects],
        [names.index(name) for name, *_ in objects],
        lambda k: f"object {k + 1} of {place}",
        remarks,
        crowd=[difficult for *_, difficult in objects],
        name=file.stem,
    )
