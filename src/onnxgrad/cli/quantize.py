"""``onnxgrad quantize``: a model in integers, and trained to make up for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onnxgrad.cli import panels, train_callbacks, train_options
from onnxgrad.cli.console import console
from onnxgrad.cli.path_clashes import GOING, MODEL, OUTPUT, Force, check_paths, checkpoint_files
from onnxgrad.cli.train_run import Job
from onnxgrad.errors import BadInput
from onnxgrad.model_io import files_of, load_model, save_model
from onnxgrad.training.data import Images
from onnxgrad.training.loop.quantize import ROWS, quantized
from onnxgrad.training.loop.train import balanced
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.quantization.place import ACTIVATIONS, CALIBRATIONS, ROUNDINGS, WEIGHTS, Scheme
from onnxgrad.training.spec.training_info import told

#: Flags that mean something without --qat.
_ALWAYS = {
    *("model", "data", "output", "weights", "activations", "per_tensor", "block_size", "calibration", "rounding"),
    "rows",
    *("operators", "exclude", "inputs", "image_mean", "image_std", "force", "qat"),
}


def quantize(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="The ONNX model, in floats.", metavar="MODEL.onnx")],
    data: Annotated[
        Path,
        panels.data(
            help="What the model reads, and labels with --qat: .npz, a folder of .npy files, .csv, .tsv, .jsonl, "
            ".parquet, .arrow, or a folder of pictures in a folder per class."
        ),
    ],
    output: Annotated[Path, panels.output("-o", "--output", help="Where to write the quantized model.")],
    weights: Annotated[str, panels.model(help=f"{', '.join(WEIGHTS)}.")] = "int8",
    activations: Annotated[str, panels.model(help=f"{', '.join(ACTIVATIONS)}.")] = "uint8",
    per_tensor: Annotated[
        bool, panels.model("--per-tensor", help="One scale for each weight, instead of one per output channel.")
    ] = False,
    block_size: Annotated[
        int | None,
        panels.model(help="Quantize only the weights of MatMul, to 4 bits, in blocks of so many rows: 32."),
    ] = None,
    calibration: Annotated[
        str, panels.model(help=f"How a range follows from what an activation is: {', '.join(CALIBRATIONS)}.")
    ] = "minmax",
    rounding: Annotated[
        str, panels.model(help=f"Of weights: {', '.join(ROUNDINGS)} (by what the layer gives over the rows).")
    ] = "nearest",
    rows: Annotated[int, panels.data(min=1, help="So many rows, the first, decide the ranges of activations.")] = ROWS,
    operators: Annotated[
        list[str] | None,
        panels.model("--operator", help="Quantize nodes of this type: Conv. Repeatable. Default: all that can be."),
    ] = None,
    exclude: Annotated[
        list[str] | None, panels.model(help="Not this node: a name, or a glob. Repeatable.", metavar="NODE")
    ] = None,
    inputs: train_options.Inputs = None,
    image_mean: train_options.ImageMean = None,
    image_std: train_options.ImageStd = None,
    force: Force = False,
    qat: Annotated[
        bool,
        panels.run("--qat", help="Train the quantized model: straight through the rounding, with learned scales."),
    ] = False,
    validation: train_options.Validation = None,
    validation_split: train_options.ValidationSplit = None,
    loss: train_options.Losses = None,
    optimizer: train_options.Optimizer = None,
    prediction: train_options.Prediction = None,
    labels: train_options.Labels = None,
    lr: train_options.Rate = None,
    weight_decay: train_options.Decay = None,
    momentum: train_options.Momentum = None,
    schedule: train_options.Plan = "cosine",
    group: train_options.Groups = None,
    clip_norm: train_options.ClipNorm = None,
    train: train_options.Trainable = None,
    freeze: train_options.Freeze = None,
    epochs: train_options.Epochs = 10,
    batch_size: train_options.BatchSize = 32,
    seed: train_options.Seed = 0,
    threads: train_options.Threads = None,
    checkpoint: train_options.CheckpointFolder = None,
    resume: train_options.Resume = False,
    restart: train_options.Restart = False,
    save_training: Annotated[
        Path | None, panels.output(help="Where to write the training model as it stands at the end.")
    ] = None,
    history: train_callbacks.HistoryFile = None,
    quiet: train_options.Quiet = False,
) -> None:
    """Quantize MODEL as ONNX Runtime does, and train the quantized model if asked to.

    The result has QuantizeLinear and DequantizeLinear nodes, which ONNX Runtime runs with kernels for integers. A model
    that is quantized already is trained by `train`, as it is.
    """
    flags = train_options.chosen(locals())
    if not qat:
        _refuse_training(context)
    scheme = Scheme(
        weights, activations, not per_tensor, block_size, calibration, rounding, operators or (), exclude or ()
    )
    source = load_model(model)
    checkpoint = checkpoint or output.parent / f"{output.stem}.checkpoint"
    check_paths(
        {
            MODEL: files_of(source, model),
            "--data": data,
            "--validation": validation,
            "--loss": train_options.files(loss or ()),
        },
        {OUTPUT: output, GOING: save_training, "--history": history},
        {"--checkpoint": (checkpoint, checkpoint_files(checkpoint))} if qat else {},
        force=force,
    )
    images = Images(*train_options.normalization(image_mean, image_std))
    columns = train_options.inputs_of(inputs or ())
    arrays, held_out = train_options.opened(data, validation, validation_split, images, columns, labels)
    for flag in ("--loss", "--optimizer") if qat else ():
        if not flags[flag]:
            raise BadInput(f"--qat trains the quantized model; say which {flag[2:]} to use with {flag}")
    ready = quantized(source, arrays, scheme, rows=rows, name=str(data))
    if not qat:
        save_model(folded(ready), output)
        line = f"{'quantized':<14} {output}  {_size(output)}, {_size(model)} before"
        console().print(line, markup=False, highlight=False, soft_wrap=True)
        return
    flags["--loss"] = balanced(flags["--loss"], source, arrays, labels)
    training = train_options.with_training(ready, model, flags, 1)
    Job(
        model=training,
        notes=told(training),
        before=model,
        after=output,
        checkpoint=checkpoint,
        save_training=save_training,
        history=history,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        validation_split=validation_split,
        schedule=schedule,
        resume=resume,
        restart=restart,
        threads=threads,
        quiet=quiet,
        between="quantized",
    ).run((arrays, str(data)), held_out)


def _refuse_training(context: typer.Context) -> None:
    """Raise BadInput for a flag that says how to train, where nothing is."""
    for param in context.command.params:
        source: Any = context.get_parameter_source(param.name or "")
        if param.name not in _ALWAYS and source is not None and source.name == "COMMANDLINE":
            raise BadInput(f"{param.opts[0]} says how to train, which --qat asks for")


def _size(path: Path) -> str:
    beside = path.with_name(f"{path.name}.data")
    size = path.stat().st_size + (beside.stat().st_size if beside.exists() else 0)
    return f"{size / 1e6:.3g} MB"
