"""``onnxgrad demo``: from a bare .onnx file to a trained one, on real handwritten digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnxgrad.cli.job import Job
from onnxgrad.demo import MODEL, digits, shifted
from onnxgrad.door import load_model, save_model
from onnxgrad.errors import BadInput
from onnxgrad.training import attach


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for what the demo leaves.")] = Path(
        "out/digits"
    ),
    epochs: Annotated[int, typer.Option(help="How often every image is seen.")] = 8,
    seed: Annotated[int, typer.Option(help="Decides the order of the images.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a demo that was interrupted.")] = False,
    threads: Annotated[int | None, typer.Option(help="Default: one per physical core.")] = None,
) -> None:
    """Train a small convolutional classifier of handwritten digits, given as a bare .onnx file.

    It runs on stock ONNX Runtime, and leaves the model before and after, a checkpoint, the metrics and a
    plot of the curves. The accuracies are those of the saved files on images that training never sees.
    """
    train, test = digits()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot write to {output}: {e.strerror or e}") from e
    bare = load_model(MODEL)
    before = output / "digits-before.onnx"
    save_model(bare, before)
    job = Job(
        model=attach(bare, loss="cross_entropy", optimizer="adamw", learning_rate=3e-3, weight_decay=0.5),
        before=before,
        after=output / "digits-trained.onnx",
        checkpoint=output / "checkpoint",
        metrics=output / "metrics.json",
        plot=output / "curves.png",
        epochs=epochs,
        batch_size=64,
        seed=seed,
        schedule="cosine",
        resume=resume,
        restart=True,
        threads=threads,
    )
    job.run((shifted(train), "the training digits"), (test, "the test digits"))
