"""The recipe of a detector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_kind, check_whole
from onnxgrad.settings import changed_settings, setting

#: Overlaps that the term of boxes can be made of.
BOX_LOSSES = ("iou", "giou", "diou", "ciou")


@dataclass(frozen=True)
class DetectionRecipe:
    """The settings of the task detection: classes and pictures of a detector, and its loss."""

    panel: ClassVar[str] = "Data"

    classes: Sequence[str] | str | None = setting(
        None,
        "Classes that a detector learns, with commas between: cat,dog; boxes of others are left out. Weights of "
        "classes that the model names alike are kept. Default: those of the data.",
        python="Also a list of names.",
        kind=str,
    )
    image_size: int | None = setting(
        None,
        "Width and height of pictures, where a detector leaves them open. Default: as its exporter noted, or 640.",
    )
    box_loss: str | None = setting(
        None,
        "How boxes of a detector are compared: iou, giou, diou or ciou. Default: as the authors of its head do it.",
    )
    place_offset: float | None = setting(
        None,
        "Centre of a place, in places, from which a detector like NanoDet or PicoDet measures distances: 0 or 0.5. "
        "Default: as the file shows it.",
    )
    unfold_bn: bool = setting(
        False,
        "Insert BatchNormalization behind convolutions whose exporter has folded it, with the statistics of the data.",
    )

    def __post_init__(self) -> None:
        check_whole(32, image_size=self.image_size)
        check_kind("classes", self.classes, (str, list, tuple), "names, as 'cat,dog'")
        if self.classes is not None and (not self.names or len(set(self.names)) < len(self.names)):
            raise BadInput(f"classes are different names, as cat,dog, not {self.classes!r}")
        if self.box_loss is not None and self.box_loss not in BOX_LOSSES:
            raise BadInput(f"box_loss is {', '.join(BOX_LOSSES)}, not {self.box_loss!r}")

        if self.place_offset not in (None, 0, 0.5):
            raise BadInput(f"place_offset is 0 or 0.5, not {self.place_offset!r}")

    def check_task(self, detects: bool) -> None:
        """Raise BadInput if a setting is given for another task."""
        own = [name for name in changed_settings(self) if name != "classes"]  # which streams of rows have as well
        if own and not detects:
            raise BadInput(f"{own[0]} is a setting of the task detection, which this run has not")

    @property
    def names(self) -> list[str]:
        """The names of `classes`; empty if they are those of the data."""
        given = self.classes.split(",") if isinstance(self.classes, str) else self.classes or ()
        return [n.strip() for n in given if n.strip()]
