"""Values inside a detector, for one or several pictures: shapes of raw maps, anchors that the graph computes."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import required_inputs
from onnxgrad.ir.match import not_none
from onnxgrad.runtime import Options
from onnxgrad.training.graph.inner_values import inner_values
from onnxgrad.training.metadata import CLASSES, DETECTOR, read_entry

#: Side of a picture where neither the model nor the caller fixes one.
DEFAULT_SIDE = 640
#: Few runs of a graph are not worth more than standard operators.
PORTABLE = Options(target="portable")


def picture_input(graph: ir.Graph) -> ir.Value:
    """The input of pictures: the only float input of four axes.

    Raises:
        BadInput: there is none, or several.
    """
    inputs = required_inputs(graph)
    found = [v for v in inputs if v.shape is not None and len(v.shape) == 4]
    if len(found) != 1:
        held = ", ".join(repr(v.name) for v in inputs) or "none"
        flat = any(v.shape is not None and len(v.shape) == 3 for v in inputs)
        hint = "\n  hint: export it for a batch, x of [1, 3, H, W] and not a list of pictures" if flat else ""
        raise BadInput(f"a detector takes pictures, one input [N, 3, H, W]; the inputs are {held}{hint}")
    return found[0]


def picture_size(model: ir.Model, asked: int | tuple[int, int] | None = None) -> tuple[int, int]:
    """Height and width of pictures: those that the model fixes, those `asked` for, those of a note, or 640.

    A note is of training, or of an exporter.

    Raises:
        BadInput: the model fixes another size than the one asked for.
    """
    image = picture_input(model.graph)
    fixed = [d if isinstance(d, int) else None for d in list(not_none(image.shape))[2:]]
    noted = [int(t) for t in model.metadata_props.get("imgsz", "").strip("[] ").split(",") if t.strip().isdigit()]
    trained = read_entry(
        model.metadata_props, DETECTOR, lambda about: [int(about["letterbox"][k]) for k in ("height", "width")]
    )
    noted = trained or noted
    wanted = asked if isinstance(asked, tuple) else (asked, asked)
    if any(w is not None and f is not None and w != f for w, f in zip(wanted, fixed)):
        raise BadInput(f"the model takes pictures of {fixed[1]} by {fixed[0]} pixels; drop image_size={asked}")
    free: list[int | None] = [DEFAULT_SIDE, DEFAULT_SIDE]
    if asked:
        free = [*wanted]
    elif len(noted) in (1, 2):
        free = [noted[0], noted[-1]]
    height, width = (f or g or DEFAULT_SIDE for f, g in zip(fixed, free))
    return height, width


def noted_offset(model: ir.Model) -> float | None:
    """The centre of a place, in places, that training noted. Raises BadInput if the note is damaged."""

    def read(about: dict[str, Any]) -> float | None:
        found = about.get("place_offset")
        return None if found is None else float(found)

    return read_entry(model.metadata_props, DETECTOR, read)


def run_values(model: ir.Model, values: Sequence[str], feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of these names, inside `model`, for `feeds`. Raises BadInput if ONNX Runtime fails."""
    return next(inner_values(model, values, [feeds], PORTABLE))


def noise(model: ir.Model, rows: int, size: tuple[int, int]) -> dict[str, np.ndarray]:
    """A feed of random pictures; further inputs, as sizes of pictures or scales, are whole numbers `size`, or ones."""
    image = picture_input(model.graph)
    assert image.shape is not None
    channels = image.shape[1] if isinstance(image.shape[1], int) else 3
    drawn = np.random.default_rng(0).random((rows, channels, *size))
    feeds = {image.name or "": drawn.astype(not_none(image.dtype).numpy())}
    for value in model.graph.inputs:
        if value is not image and not value.is_initializer() and value.shape is not None and value.dtype is not None:
            shape = [d if isinstance(d, int) else rows for d in value.shape]
            whole = value.dtype.is_integer() and shape[-1:] == [2]
            feeds[value.name or ""] = np.broadcast_to(size if whole else 1, shape).astype(value.dtype.numpy())
    return feeds


def stored_names(model: ir.Model, classes: int) -> tuple[str, ...] | None:
    """The names of classes in the metadata: onnxgrad's, those of Ultralytics, or lines of PaddleDetection."""
    readers: dict[str, Callable[[str], Any]] = {
        CLASSES: json.loads, "names": ast.literal_eval, "character": str.splitlines,
    }  # fmt: skip
    for key, read in readers.items():
        try:
            found = read(model.metadata_props[key])
        except (KeyError, ValueError, SyntaxError):
            continue
        names = [str(found[k]) for k in sorted(found)] if isinstance(found, dict) else [str(n) for n in found]
        if len(names) == classes and len(set(names)) == classes:
            return tuple(names)
    return None
