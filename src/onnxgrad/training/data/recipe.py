"""The recipe of data preparation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_kind
from onnxgrad.settings import setting
from onnxgrad.training.data.images import Images
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.option_strings import one_of


@dataclass(frozen=True)
class PreparationRecipe:
    """The settings that turn columns, images and text into arrays for a model."""

    panel: ClassVar[str] = "Data"

    inputs: Mapping[str, str] | None = setting(
        None,
        "Which columns feed an input: X=f0..f63, X=age,height, X='pixel*', X=images. Default: those of the same names.",
        python="As {'X': 'f0..f63'}.",
        short=("--input",),
        many=True,
    )
    images: Images | None = setting(
        None,
        "Images(…): mean, deviation and size of pictures.",
        instead="pictures are read as --image-mean and --image-std say",
    )
    image_mean: float | tuple[float, ...] | None = setting(
        None, "Subtracted from pictures (0 to 1): 0.5, or one per channel.", kind=str
    )
    image_std: float | tuple[float, ...] | None = setting(None, "Pictures are divided by it, likewise.", kind=str)
    tokenizer: Any = setting(
        None,
        "tokenizer.json: a column of text becomes input_ids, attention_mask and token_type_ids, as the model has "
        "them; `inputs` names the column, as in input_ids=review.",
        python="Also a tokenizers.Tokenizer.",
        kind=Path,
    )
    max_length: int | None = setting(
        None, "The most tokens of a row. Default: the length that the model fixes, or else that of the tokenizer."
    )

    # of a training run, which has settings for them
    is_streamed: ClassVar[Any] = False
    holds_out: ClassVar[Any] = False
    buffer_rows: ClassVar[Any] = 0
    class_names: ClassVar[Any] = None
    tables: ClassVar[Any] = None

    def __post_init__(self) -> None:
        check_kind("images", self.images, Images, "an Images(…)")
        numbers = [_channels(name, getattr(self, name)) for name in ("image_mean", "image_std")]
        if self.images is not None and any(n is not None for n in numbers):
            raise BadInput("images and image_mean or image_std exclude each other")

    def pictures(self, trained: Preprocessing) -> Images | None:
        """The conversion of images by these settings, or else as the model was `trained`; None without either."""
        mean, std = (_channels(name, getattr(self, name)) for name in ("image_mean", "image_std"))
        return trained.images_for(self.images or trained.images_with(mean, std))

    def arguments(self, trained: Preprocessing) -> dict[str, Any]:
        """Arguments of `Data` by these settings, for a model that was `trained` like that. Raises BadInput."""
        text = trained.text(self.tokenizer, self.max_length)
        images = self.pictures(trained)
        return {"inputs": self.inputs, "images": images, "text": text, "trained": trained, "tables": self.tables}


@dataclass(frozen=True)
class LabelledRowsRecipe:
    """The settings of `evaluate` that choose its rows, and the classes in their predictions."""

    panel: ClassVar[str] = "Data"

    missing: str | None = setting(
        None, "drop: leave out rows without a label, or without a value that the model does not fill in."
    )
    class_axis: int | None = setting(
        None, "The axis of the classes in predictions of three axes or more: 1, -1. Default: by the model."
    )

    def __post_init__(self) -> None:
        if self.missing is not None:
            one_of("missing", self.missing, ["drop"])


def _channels(name: str, given: Any) -> tuple[float, ...] | None:
    """One number, or one per channel. Raises BadInput for other values."""
    if given is None:
        return None
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    is_number = all(isinstance(n, (int, float)) and math.isfinite(n) for n in found)
    if len(found) not in (1, 3) or not is_number or (name == "image_std" and 0 in found):
        raise BadInput(f"{name} is a number, or one per channel (0.5,0.5,0.5), not {given!r}")
    return found
