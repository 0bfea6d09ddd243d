"""Flags of the commands that run a model over data: where the data are, and how they feed it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from onnxgrad.cli import panels

DataPath = Annotated[
    Path,
    panels.data(
        help="Data, arrays by name: .npz, a folder of .npy files, .csv, .tsv, .jsonl, .parquet, .arrow, or a folder "
        "of pictures in a folder per class."
    ),
]
TokenizerFile = Annotated[
    Path | None,
    panels.data(
        "--tokenizer",
        help="tokenizer.json: a column of text becomes input_ids, attention_mask and token_type_ids, as the model has "
        "them. --input input_ids=review says which column.",
    ),
]
MaxLength = Annotated[
    int | None,
    panels.data("--max-length", help="The most tokens of a row. Default: what the model fixes, or else the tokenizer."),
]
BatchSize = Annotated[int, panels.run(min=1, help="Rows that run at once.")]
Threads = Annotated[int | None, panels.run(help="Default: one per physical core.")]
