"""``onnxgrad combine``: several adapters of one model, combined to one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.path_clashes import check_paths
from onnxgrad.training.adapters.combine import METHODS, combine_adapters
from onnxgrad.training.adapters.folder import files_in


def combine(
    adapters: Annotated[list[Path], typer.Argument(help="The folders of the adapters.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder of the combination.")],
    weight: Annotated[
        list[float] | None, typer.Option(help="How much an adapter counts, one for each. Default: 1 each.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}, as PEFT names them.")] = "linear",
    density: Annotated[float | None, typer.Option(help="The share of elements that TIES and DARE keep.")] = None,
    seed: Annotated[int, typer.Option(help="Decides the elements that DARE drops.")] = 0,
    model: Annotated[Path | None, typer.Option(help="The model that was adapted, for folders that PEFT wrote.")] = None,
) -> None:
    """Combine LoRA adapters of one model: a sum of their factors, TIES, DARE, or all side by side (cat)."""
    inputs = {f"ADAPTERS {i}": files_in(folder) for i, folder in enumerate(adapters, 1)}
    check_paths({**inputs, "--model": model}, {}, folders={"-o": (output, files_in(output))})
    combine_adapters(adapters, output, weights=weight, method=method, density=density, seed=seed, model=model)
    print_lines(entry("adapter", output))
