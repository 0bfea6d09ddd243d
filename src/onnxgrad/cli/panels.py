"""The headings under which the help lists flags: ``panels.run("--ema", help="…")`` is a flag under "Run".

Also the argument `Model`, which most commands have.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(help="The ONNX model.", metavar="MODEL.onnx")]
#: The forms of data.
FORMATS = (
    ".npz, a folder of .npy files, .csv, .tsv, .jsonl, .parquet, .arrow, or a folder of pictures in a folder per class"
)

data, loss, model, optimizer, output, run = (
    partial(typer.Option, rich_help_panel=title) for title in ("Data", "Loss", "Model", "Optimizer", "Output", "Run")
)
