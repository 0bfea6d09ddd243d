"""``onnxgrad export-step``: what a host on a device needs to train, with nothing but an ONNX runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import onnx
import onnx_ir as ir
import typer

from onnxgrad.cli import recipe
from onnxgrad.cli.console import console
from onnxgrad.cli.paths import MODEL, OUTPUT, check_paths
from onnxgrad.door import files_of, load_model
from onnxgrad.errors import BadInput
from onnxgrad.training import export_step as export
from onnxgrad.training.export import files_in


def export_step(
    model: Annotated[Path, typer.Argument(help="The ONNX model.", metavar="MODEL.onnx")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the models, the state and the contract.")],
    loss: recipe.Losses = None,
    optimizer: recipe.Optimizer = None,
    prediction: recipe.Prediction = None,
    labels: recipe.Labels = None,
    lr: recipe.Rate = None,
    weight_decay: recipe.Decay = None,
    momentum: recipe.Momentum = None,
    schedule: recipe.Plan = "constant",
    group: recipe.Groups = None,
    clip_norm: recipe.ClipNorm = None,
    clip_value: recipe.ClipValue = None,
    ema: recipe.Ema = None,
    train: recipe.Trainable = None,
    freeze: recipe.Freeze = None,
    freeze_bn: recipe.FreezeBn = False,
    dropout: recipe.Dropout = None,
    head: recipe.Head = None,
) -> None:
    """Write a training step, its halves, evaluation and inference as models, with the first state and a contract.

    A host needs an ONNX runtime and a loop; host.py, which is written beside them, is one in Python. The schedule is a
    part of the step.
    """
    flags = recipe.chosen(locals())
    source: ir.Model | onnx.ModelProto = load_model(model)
    check_paths(
        {MODEL: files_of(source, model), "--loss": recipe.files(loss or ())}, {}, {OUTPUT: (output, files_in(output))}
    )
    if head is not None:
        source, where = recipe.headed(source, head)
        console(sys.stderr).print(where, highlight=False, soft_wrap=True)
    assert isinstance(source, ir.Model)
    rates = None if schedule == "constant" else schedule
    try:
        training = recipe.with_training(source, model, flags, 2, rates)
    except BadInput:  # a loss that compares the examples of a batch cannot be had in parts
        training = recipe.with_training(source, model, flags, 1, rates)
    contract = export(training, output)
    out = console()
    for name, about in contract["models"].items():
        out.print(f"{name:<14} {output / about['file']}", markup=False, highlight=False, soft_wrap=True)
    for name in ("state.npz", "contract.json", "host.py"):
        out.print(f"{name.partition('.')[0]:<14} {output / name}", markup=False, highlight=False, soft_wrap=True)
