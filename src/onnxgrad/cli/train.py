"""``onnxgrad train``: train a model file on data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnxgrad.cli import data_options, panels, train_callbacks, train_config, train_options, train_ranks
from onnxgrad.cli.grad import Dims, dims_of
from onnxgrad.cli.path_clashes import GOING, MODEL, OUTPUT, Force, check_paths, checkpoint_files
from onnxgrad.cli.train_run import Job
from onnxgrad.errors import BadInput
from onnxgrad.model_io import files_of, load_model
from onnxgrad.training.adapters.folder import check_adapter
from onnxgrad.training.adapters.folder import files_in as adapter_files
from onnxgrad.training.data import Augment, Images, Text
from onnxgrad.training.loop.listeners import loggers, watchers
from onnxgrad.training.loop.train import balanced
from onnxgrad.training.measure.metrics import names_of
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.spec.training_info import told


def train(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="The ONNX model.", metavar="MODEL.onnx")],
    data: Annotated[
        Path,
        panels.data(
            help="Training data, arrays by name: .npz, a folder of .npy files, .csv, .tsv, .jsonl, .parquet, .arrow, "
            "or a folder of pictures in a folder per class."
        ),
    ],
    output: Annotated[Path, panels.output("-o", "--output", help="Where to write the trained model.")],
    validation: train_options.Validation = None,
    validation_split: train_options.ValidationSplit = None,
    inputs: train_options.Inputs = None,
    sample: train_options.Sample = "each",
    augment: train_options.Augmentation = None,
    loss: train_options.Losses = None,
    optimizer: train_options.Optimizer = None,
    prediction: train_options.Prediction = None,
    labels: train_options.Labels = None,
    lr: train_options.Rate = None,
    weight_decay: train_options.Decay = None,
    momentum: train_options.Momentum = None,
    schedule: train_options.Plan = "constant",
    group: train_options.Groups = None,
    clip_norm: train_options.ClipNorm = None,
    clip_value: train_options.ClipValue = None,
    ema: train_options.Ema = None,
    accumulate: train_options.Accumulate = 1,
    sync_every: train_ranks.SyncEvery = 1,
    outer_rate: train_ranks.OuterRate = None,
    outer_momentum: train_ranks.OuterMomentum = None,
    compress: train_ranks.Compress = None,
    shard_optimizer: train_ranks.ShardOptimizer = False,
    sync_batch_norm: train_ranks.SyncBatchNorm = False,
    memory: train_options.Memory = None,
    precision: train_options.Precision = None,
    attention_rows: train_options.AttentionRows = None,
    dim: Dims = None,
    train: train_options.Trainable = None,
    freeze: train_options.Freeze = None,
    freeze_bn: train_options.FreezeBn = False,
    dropout: train_options.Dropout = None,
    lora: train_options.Lora = None,
    dora: train_options.Dora = False,
    rslora: train_options.Rslora = False,
    vera: train_options.Vera = None,
    lora_alpha: train_options.LoraAlpha = None,
    lora_targets: train_options.LoraTargets = None,
    lora_dropout: train_options.LoraDropout = None,
    epochs: train_options.Epochs = 10,
    batch_size: train_options.BatchSize = 32,
    seed: train_options.Seed = 0,
    threads: train_options.Threads = None,
    target: Annotated[
        str,
        panels.run(
            help="portable: standard operators alone; native: with kernels in C, refused where they cannot be built; "
            "auto: with kernels where possible."
        ),
    ] = "auto",
    checkpoint: train_options.CheckpointFolder = None,
    checkpoint_seconds: Annotated[
        float, panels.run(min=0, help="Seconds between checkpoints within an epoch; 0: after every step.")
    ] = 60.0,
    save_training: Annotated[
        Path | None,
        panels.output(
            help="Where to write the training model as it stands at the end: `train` goes on with it, and needs no "
            "--loss and no --optimizer."
        ),
    ] = None,
    save_adapter: train_options.SaveAdapter = None,
    resume: train_options.Resume = False,
    accept_changes: Annotated[
        bool, panels.run("--accept-changes", help="Resume with other data or flags than those of the checkpoint.")
    ] = False,
    restart: train_options.Restart = False,
    force: Force = False,
    head: train_options.Head = None,
    image_mean: train_options.ImageMean = None,
    image_std: train_options.ImageStd = None,
    tokenizer: data_options.TokenizerFile = None,
    max_length: data_options.MaxLength = None,
    history: train_callbacks.HistoryFile = None,
    plot: train_callbacks.PlotFile = None,
    report: train_callbacks.ReportFile = None,
    log: train_callbacks.LogFile = None,
    tensorboard: train_callbacks.TensorBoardFolder = None,
    mlflow: train_callbacks.MLflowExperiment = None,
    patience: train_callbacks.Patience = None,
    keep_best: train_callbacks.KeepBestFlag = False,
    keep: train_callbacks.Keep = None,
    monitor: train_callbacks.Monitored = "validation_loss",
    metrics: train_callbacks.MetricNames = None,
    evaluate_every: train_callbacks.EvaluateEvery = None,
    find_lr: Annotated[
        bool,
        panels.optimizer(
            "--find-lr", help="Only look for a learning rate: raise it until the loss grows; --plot draws that."
        ),
    ] = False,
    provider: train_options.Provider = None,
    distributed: train_ranks.Distributed = None,
    quiet: train_options.Quiet = False,
    config: train_config.Config = None,
) -> None:
    """Train MODEL with a loss and an optimizer, or as the training information that it carries says.

    Beside the trained model, which is plain ONNX, it leaves a checkpoint to go on from.
    """
    flags = train_options.chosen(locals())
    ranks = train_ranks.joined(distributed)
    source = load_model(model)
    checkpoint = checkpoint or output.parent / f"{output.stem}.checkpoint"
    folders = {"--checkpoint": (checkpoint, checkpoint_files(checkpoint))}
    if save_adapter is not None:
        folders["--save-adapter"] = (save_adapter, adapter_files(save_adapter))
    check_paths(
        {
            MODEL: files_of(source, model),
            "--data": data,
            "--validation": validation,
            "--tokenizer": tokenizer,
            "--loss": train_options.files(loss or ()),
        },
        {OUTPUT: output, GOING: save_training, "--history": history, "--plot": plot, "--report": report, "--log": log},
        folders if tensorboard is None else {**folders, "--tensorboard": (tensorboard, ())},
        force=force or (ranks is not None and not ranks.is_first),  # which write nothing
    )
    if accumulate < 1:
        raise BadInput(f"--accumulate must be at least 1, not {accumulate}")
    if sync_every < 1:
        raise BadInput(f"--sync-every must be at least 1, not {sync_every}")
    names = names_of(metrics)
    if augment is not None:
        Augment.of(augment)
    held = validation is not None or validation_split is not None
    watching = watchers(monitor, patience, keep_best, keep, held)
    images = Images(*train_options.normalization(image_mean, image_std))
    columns = train_options.inputs_of(inputs or ())
    text = Text.of(tokenizer, max_length)
    arrays, held_out = train_options.opened(data, validation, validation_split, images, columns, labels)
    notes: list[str] = []
    if head is not None:
        source, where = train_options.headed(source, head)
        notes.append(where)
    flags["--loss"] = balanced(flags["--loss"], source, arrays, labels)
    training = train_options.with_training(source, model, flags, accumulate * (1 if ranks is None else ranks.size))
    if save_adapter is not None:
        check_adapter(training)
    job = Job(
        model=training,
        notes=[*notes, *told(training)],
        before=model,
        after=output,
        checkpoint=checkpoint,
        save_training=save_training,
        save_adapter=save_adapter,
        history=history,
        metrics=names,
        evaluate_every=evaluate_every,
        plot=plot,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        validation_split=validation_split,
        inputs=columns,
        text=text,
        sample=sample,
        augment=augment,
        schedule=schedule,
        accumulate=accumulate,
        exchange=Exchanges(sync_every, outer_rate, outer_momentum, compress, shard_optimizer, sync_batch_norm),
        memory=memory,
        precision=precision,
        attention_rows=attention_rows,
        dims=dims_of(dim),
        resume=resume,
        accept_changes=accept_changes,
        checkpoint_seconds=checkpoint_seconds,
        restart=restart,
        threads=threads,
        target=target,
        provider=provider,
        quiet=quiet,
        find_lr=find_lr,
        replay=train_config.written(context),
        listeners=[*watching, *loggers(log, tensorboard, mlflow)],
        report=report,
        log=log,
        ranks=ranks,
    )
    job.run((arrays, str(data)), held_out)
