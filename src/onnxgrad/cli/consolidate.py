"""``onnxgrad consolidate``: a checkpoint in parts, one for each rank, turned into an ordinary one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.path_clashes import check_paths
from onnxgrad.training.loop import checkpoint_parts


def consolidate(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of the checkpoint, or its file in there.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to write the ordinary checkpoint. Default: in place of its parts."),
    ] = None,
) -> None:
    """Turn a checkpoint in parts, as `train --shard-optimizer` writes it, into an ordinary one."""
    check_paths({"CHECKPOINT": checkpoint_parts.files_of(checkpoint)}, {"-o": output})
    written = checkpoint_parts.consolidate(checkpoint, output)
    print_lines(entry("checkpoint", written))
