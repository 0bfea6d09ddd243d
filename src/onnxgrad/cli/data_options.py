"""Flags of the commands that run a model over data: where the data are, and how they feed it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataPath = Annotated[
    Path,
    typer.Option(
        help="Data, arrays by name: .npz, a folder of .npy files, .csv, .tsv, .jsonl, .parquet, .arrow, or a folder "
        "of pictures in a folder per class.",
        rich_help_panel="Data",
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="tokenizer.json: a column of text becomes input_ids, attention_mask and token_type_ids, as the model has "
        "them. --input input_ids=review says which column.",
        rich_help_panel="Data",
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        help="The most tokens of a row. Default: what the model fixes, or else the tokenizer.",
        rich_help_panel="Data",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows that run at once.", rich_help_panel="Run")]
Threads = Annotated[int | None, typer.Option(help="Default: one per physical core.", rich_help_panel="Run")]
