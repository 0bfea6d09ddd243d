"""Small pictures with boxes in the formats that detectors are trained on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

#: Pictures: (width, height), and boxes x1, y1, x2, y2 with their classes.
SCENES = [
    ((64, 48), [((4, 6, 20, 30), "cat"), ((30, 10, 60, 40), "dog")]),
    ((40, 60), [((0, 0, 40, 60), "dog")]),
    ((50, 50), []),
]
NAMES = ["cat", "dog"]


def draw_picture(path: Path, size: tuple[int, int], seed: int = 0) -> None:
    """A PNG file of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)


def write_coco(folder: Path, scenes=SCENES, names=NAMES, **changes) -> Path:  # type: ignore[no-untyped-def]
    """A COCO file; categories have the ids 3, 7, …; `changes` are made to the first annotation."""
    content: dict = {"categories": [{"id": 3 + 4 * k, "name": n} for k, n in enumerate(names)]}
    content["images"], content["annotations"] = [], []
    for k, (size, boxes) in enumerate(scenes):
        draw_picture(folder / "images" / f"{k}.png", size, k)
        content["images"].append({"id": 100 + k, "file_name": f"{k}.png", "width": size[0], "height": size[1]})
        for (x1, y1, x2, y2), name in boxes:
            entry = {
                "id": len(content["annotations"]) + 11,
                "image_id": 100 + k,
                "category_id": 3 + 4 * names.index(name),
            }
            content["annotations"].append({**entry, "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0})
    content["annotations"][0] |= changes
    (folder / "boxes.json").write_text(json.dumps(content))
    return folder / "boxes.json"


def write_yolo(folder: Path, scenes=SCENES, names=NAMES, part: str = "train") -> Path:  # type: ignore[no-untyped-def]
    """A YOLO data set with ``data.yaml``."""
    (folder / "labels" / part).mkdir(parents=True)
    for k, ((w, h), boxes) in enumerate(scenes):
        draw_picture(folder / "images" / part / f"{k}.png", (w, h), k)
        lines = [
            f"{names.index(n)} {(a + c) / 2 / w:.9f} {(b + d) / 2 / h:.9f} {(c - a) / w:.9f} {(d - b) / h:.9f}"
            for (a, b, c, d), n in boxes
        ]
        if lines:
            (folder / "labels" / part / f"{k}.txt").write_text("\n".join(lines) + "\n")
    listed = "\n".join(f"  {k}: {n}" for k, n in enumerate(names))
    (folder / "data.yaml").write_text(f"# a data set\npath: .\n{part}: images/{part}  # relative\nnames:\n{listed}\n")
    return folder / "data.yaml"


def write_voc(folder: Path, scenes=SCENES) -> Path:  # type: ignore[no-untyped-def]
    """A folder of VOC annotations; its pixels are counted from 1."""
    (folder / "Annotations").mkdir(parents=True)
    for k, (size, boxes) in enumerate(scenes):
        draw_picture(folder / "JPEGImages" / f"{k}.png", size, k)
        objects = "".join(
            f"<object><name>{n}</name><bndbox><xmin>{a + 1}</xmin><ymin>{b + 1}</ymin><xmax>{c}</xmax><ymax>{d}</ymax>"
            "</bndbox></object>"
            for (a, b, c, d), n in boxes
        )
        text = f"<annotation><filename>{k}.png</filename>{objects}</annotation>"
        (folder / "Annotations" / f"{k}.xml").write_text(text)
    return folder


def write_table(folder: Path, scenes=SCENES) -> Path:  # type: ignore[no-untyped-def]
    """A table of boxes."""
    lines = ["image,class,x1,y1,x2,y2"]
    for k, (size, boxes) in enumerate(scenes):
        draw_picture(folder / f"{k}.png", size, k)
        lines += [f"{k}.png,{n},{a},{b},{c},{d}" for (a, b, c, d), n in boxes] or [f"{k}.png,,,,,"]
    (folder / "boxes.csv").write_text("\n".join(lines) + "\n")
    return folder / "boxes.csv"
