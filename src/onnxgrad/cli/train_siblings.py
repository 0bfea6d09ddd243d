"""Quantized forms of a trained model (``--also int8,int4``): files beside it, each measured on the held-out data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model, save_model
from onnxgrad.runtime.trial import check_runs
from onnxgrad.training.data import open_data
from onnxgrad.training.data.columns import Columns
from onnxgrad.training.data.items import first_rows
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.shards import Shards
from onnxgrad.training.data.wide import complete_rows
from onnxgrad.training.loop.quantize import ROWS, quantized
from onnxgrad.training.loop.recipe import Recipe
from onnxgrad.training.option_strings import looked_up
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.quantization.place import Scheme

#: Schemes by the words of `--also`.
SCHEMES = {
    "int8": Scheme(),
    "uint8": Scheme(weights="uint8"),
    "int4": Scheme(weights="int4", block_size=32),
    "uint4": Scheme(weights="uint4", block_size=32),
}


def sibling_paths(also: str | None, output: Path) -> dict[str, Path]:
    """The files beside `output` by the names in `also`, which has commas between them. Raises BadInput for others."""
    names = [text.strip() for text in (also or "").split(",") if text.strip()]
    for name in names:
        looked_up("quantized form", name, SCHEMES)
    return {name: output.with_suffix(f".{name}.onnx") for name in names}


def write_siblings(paths: dict[str, Path], trained: Path, data: Columns | Path, recipe: Recipe) -> None:
    """Quantize the model at `trained`; activations are calibrated over the first rows of `data`.

    Raises:
        BadInput: nothing in the model can be quantized so.
    """
    preparation = recipe.data
    rows: Any = data
    if isinstance(data, Path):
        stream = Shards(data)
        stream.know(Preprocessing.of(load_model(trained)).kinds)
        rows = first_rows(stream, ROWS)
    if preparation.missing == "drop":
        rows = complete_rows(open_data(rows), preparation.inputs)
    if preparation.tables is not None:  # the file takes the columns that fed its input
        preparation = replace(preparation, inputs=None, missing=None, categories=None, standardize=False)
    for name, path in paths.items():
        try:
            made = quantized(
                load_model(trained), rows, SCHEMES[name], rows=ROWS, preparation=preparation, task=recipe.task
            )
        except BadInput as error:
            raise BadInput(f"{trained} was written, but not as {name} (--also): {error}") from error
        save_model(folded(made), path)
        check_runs(path, trained)
