"""Annotated pictures by their path: COCO's JSON, folders of YOLO or VOC, a table of boxes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from onnxgrad.errors import BadInput
from onnxgrad.training.data.annotations.box_table import read_box_table
from onnxgrad.training.data.annotations.coco import read_coco
from onnxgrad.training.data.annotations.samples import DetectionData
from onnxgrad.training.data.annotations.voc import read_voc
from onnxgrad.training.data.annotations.yolo_folder import PARTS, read_yolo

#: Suffixes of files of annotations.
ANNOTATIONS = (".json", ".yaml", ".yml", ".csv", ".tsv")


def read_detection(
    path: str | os.PathLike | DetectionData, classes: Sequence[str] | None = None, part: str = "train"
) -> DetectionData:
    """The pictures with boxes at `path`.

    Args:
        path: of a COCO file (``.json``); of ``data.yaml``, or a folder of YOLO; of a folder of VOC; of a table of boxes
            (``.csv``, ``.tsv``).
        classes: names; the boxes of others are left out. Default: all classes of the data.
        part: "train", "val" or "test", where the data have parts.

    Raises:
        BadInput: it is none of these, or an annotation cannot be used; with its file and line, or its id.
        UnknownName: there is no such class.
    """
    data, declared = (path, True) if isinstance(path, DetectionData) else _read(Path(path), part)
    return data if classes is None or tuple(classes) == data.names else data.with_classes(list(classes), declared)


def _read(path: Path, part: str) -> tuple[DetectionData, bool]:
    """The data at `path`; True if they declare their classes, and not only those that occur."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise BadInput(f"there is no file or folder {str(path)!r}")
    if suffix == ".json":
        return read_coco(path), True
    if suffix in (".csv", ".tsv"):
        return read_box_table(path), False
    if suffix in (".yaml", ".yml"):
        return read_yolo(path, part), True
    if path.is_dir():
        return _read_folder(path, part)
    raise BadInput(
        f"{str(path)!r} holds no boxes\n"
        "  hint: boxes are read from COCO's .json, from data.yaml or a folder of YOLO, from a folder of VOC, or from a "
        ".csv with the columns image, class, x1, y1, x2, y2"
    )


def _read_folder(path: Path, part: str) -> tuple[DetectionData, bool]:
    if (path / "Annotations").is_dir() or next(path.glob("*.xml"), None) is not None:
        return read_voc(path, part), False
    if next(path.glob("*.y*ml"), None) is not None or (path / "labels").is_dir():
        return read_yolo(path, part), True
    files = sorted(path.glob("*.json")) or sorted((path / "annotations").glob("*.json"))
    fitting = [f for f in files if any(n in f.stem.split("_") or f.stem.endswith(n) for n in PARTS.get(part, (part,)))]
    instances = [f for f in fitting if f.stem.startswith("instances")] or fitting
    chosen = files if len(files) == 1 else instances[:1]
    if chosen:
        return read_coco(chosen[0]), True
    if files:
        raise BadInput(f"{str(path)!r} has several files of annotations: {', '.join(f.name for f in files[:4])}")
    return read_yolo(path, part), True


__all__ = ["ANNOTATIONS", "DetectionData", "read_detection"]
