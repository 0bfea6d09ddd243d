"""``onnxgrad transplant``: the weights of one file put into another export of the same network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.path_clashes import OUTPUT, check_paths
from onnxgrad.errors import BadInput
from onnxgrad.ir.match import not_none
from onnxgrad.model_io import files_of, load_model
from onnxgrad.training.adapters.folder import files_in
from onnxgrad.training.data.sources import load_npz
from onnxgrad.transplants.transplant import transplant as put


def transplant(
    source: Annotated[
        Path, typer.Argument(help="The trained model, or the folder of an adapter.", metavar="TRAINED.onnx")
    ],
    into: Annotated[
        Path | None, typer.Option("--into", help="Another export of the same network, whose weights are replaced.")
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option("--encoder", help="The encoder, if --into is the decoder of two files; -o is a folder for both."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="In place of --into and -o: write a .safetensors file, for `load_state_dict`."),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option("--like", help="With --to: a .safetensors file before training, whose names and types stay."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the result of --into.")] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="TRAINED.onnx before training: weights are found by their content in there."),
    ] = None,
    probes: Annotated[
        Path | None,
        typer.Option("--probes", help="An .npz file with inputs on which outputs are compared. Default: random ones."),
    ] = None,
) -> None:
    """Put the weights of TRAINED.onnx into another export of the same network, and compare the outputs of both.

    Weights may be transposed, fused, split, shared, folded, cast or quantized there. Nothing is written if a trained
    weight has no place, or if the outputs differ by more than rounding.
    """
    if to is not None and (into is not None or output is not None or encoder is not None):
        raise BadInput("--to writes a safetensors file in place of --into FILE.onnx -o RESULT.onnx")
    if to is None and (into is None or output is None or like is not None):
        raise BadInput("say which file gets the weights: --into FILE.onnx -o RESULT.onnx, or --to FILE.safetensors")
    models = {"TRAINED": source, "--into": into, "--encoder": encoder, "--base": base}
    read = {
        flag: files_in(path) if path.is_dir() else files_of(load_model(path), path)
        for flag, path in models.items()
        if path is not None
    }
    place = not_none(to or output)
    results = {OUTPUT if to is None else "--to": place}
    if encoder is not None and into is not None:
        results = {f"the result {path.name}": place / path.name for path in (into, encoder)}
    check_paths({**read, "--probes": probes, "--like": like}, results)
    given = None if probes is None else load_npz(probes)
    made = put(source, into or like, base=base, encoder=encoder, output=place, probes=given)
    unchanged = f"; {len(made.kept)} were not changed by training" if into or like else ""
    lines = [("transplanted", f"{len(made.changed)} weights{unchanged}")]
    if made.difference is not None:
        scheme = "" if made.scheme is None else f"; those of base and --into by {made.scheme:.2g}"
        apart = f"differ by {made.difference:.2g} of their spread, before by {made.before:.2g}{scheme}"
        lines.append(("outputs", apart))
    lines.append(("written", ", ".join(map(str, made.files))))
    print_lines(*(entry(*line) for line in lines))
