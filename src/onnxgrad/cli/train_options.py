"""What ``onnxgrad train`` is told about how to train: flags, and the training information that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnxgrad.cli import panels
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.model_io import files_of, load_model, training_info
from onnxgrad.training import LoRA, VeRA, attach
from onnxgrad.training.adapters.config import ATTENTION
from onnxgrad.training.build.heads import placed_head
from onnxgrad.training.data import Images, open_data
from onnxgrad.training.data.columns import Column
from onnxgrad.training.loss.config import Loss
from onnxgrad.training.loss.losses import LOSSES
from onnxgrad.training.optim.optimizers import OPTIMIZERS, SECOND_ORDER
from onnxgrad.training.optim.schedules import SCHEDULES

Losses = Annotated[
    list[str] | None,
    panels.loss(
        "--loss",
        help=f"{', '.join(LOSSES)}, or LOSS.onnx. Options: huber:delta=0.5. Given several times they are added: "
        "--loss mse --loss 0.1*l1.",
    ),
]
Optimizer = Annotated[
    str | None,
    panels.optimizer(
        "--optimizer",
        help=f"{', '.join([*SECOND_ORDER, *OPTIMIZERS])}. Settings: adamw:betas=0.9,0.95,eps=1e-6.",
    ),
]
Prediction = Annotated[
    str | None, panels.loss("--prediction", help="The output that meets the labels. Default: the only float output.")
]
Labels = Annotated[
    str | None, panels.loss("--labels", help="The array (or model input) that holds the labels. Default: 'labels'.")
]
Validation = Annotated[
    Path | None,
    panels.data("--validation", help="Held-out data: measured after every epoch, and before and after."),
]
ValidationSplit = Annotated[
    float | None,
    panels.data(
        "--validation-split",
        help="Hold this share of the rows of --data out instead of training on them: 0.2; of each class its share.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    panels.data(
        "--input", help="Which columns feed an input: X=f0..f63, X=age,height, X='pixel*', X=images. Repeatable."
    ),
]
Augmentation = Annotated[
    str | None,
    panels.data(
        "--augment",
        help="Train on random variants of pictures: flip, vflip, crop=4, jitter=0.2, erase, with commas between them.",
    ),
]
Sample = Annotated[
    str,
    panels.data("--sample", help="each row once in an epoch, or balanced: each class as often as the others."),
]
Rate = Annotated[float | None, panels.optimizer("--lr", help="Learning rate. Default: that of the optimizer.")]
Decay = Annotated[float | None, panels.optimizer("--weight-decay", help="Default: that of the optimizer.")]
Momentum = Annotated[float | None, panels.optimizer("--momentum", help="Default: that of the optimizer.")]
Plan = Annotated[
    str,
    panels.optimizer(
        "--schedule",
        help=f"{', '.join(SCHEDULES)} or plateau. Options: cosine:warmup=100; total is the whole run if not given.",
    ),
]
Groups = Annotated[
    list[str] | None,
    panels.optimizer(
        "--group", help="Weights with settings of their own: '*.bias:decay=0', 'type:Conv:rate=1e-4'. Repeatable."
    ),
]
ClipNorm = Annotated[float | None, panels.optimizer("--clip-norm", help="The largest norm of all gradients together.")]
ClipValue = Annotated[float | None, panels.optimizer("--clip-value", help="The largest element of a gradient.")]
Ema = Annotated[
    float | None,
    panels.optimizer("--ema", help="Save running averages of the weights, of which a step keeps this share: 0.999."),
]
Accumulate = Annotated[
    int,
    panels.run("--accumulate", help="Cut every batch into so many parts, one after the other, to need less memory."),
]
Memory = Annotated[
    str | None,
    panels.run(
        "--memory", help="What a step computes may take so much at a time (200MB): what does not fit is computed anew."
    ),
]
Trainable = Annotated[
    list[str] | None,
    panels.model(
        "--train",
        "--trainable",
        help="Only these weights: a name, 'head.*', type:Conv, last:2, all (also constants). Repeatable.",
    ),
]
Freeze = Annotated[list[str] | None, panels.model("--freeze", help="Not these weights; as --train. Repeatable.")]
Lora = Annotated[
    int | None,
    panels.model(
        "--lora",
        metavar="RANK",
        help="Train adapters of this rank (LoRA) beside frozen weights, merged into them at the end; --train then says "
        "what trains as a whole, too.",
    ),
]
Dora = Annotated[bool, panels.model("--dora", help="Adapters of --lora also train the length of each output (DoRA).")]
Rslora = Annotated[bool, panels.model("--rslora", help="Adapters of --lora count alpha/√rank times.")]
Vera = Annotated[
    int | None,
    panels.model(
        "--vera", metavar="RANK", help="Train two vectors per weight between random matrices that all share (VeRA)."
    ),
]
LoraAlpha = Annotated[
    float | None, panels.model("--lora-alpha", help="Adapters count alpha/rank times. Default: twice the rank.")
]
LoraTargets = Annotated[
    list[str] | None,
    panels.model(
        "--lora-targets",
        metavar="PATTERN",
        help="What is adapted: attention (default), q_proj, 'c_attn[q,v]' (a part), "
        "'*.mlp.*', type:MatMul,Gemm,Conv, all; '!head*': not these. Repeatable.",
    ),
]
LoraDropout = Annotated[
    float | None, panels.model("--lora-dropout", help="Share of the input that adapters drop, in training.")
]
SaveAdapter = Annotated[
    Path | None,
    panels.output(
        "--save-adapter",
        metavar="DIR",
        help="Folder for the adapter alone: adapter.onnx_adapter, a model.onnx that takes it, and the files of PEFT.",
    ),
]
FreezeBn = Annotated[bool, panels.model("--freeze-bn", help="Keep BatchNormalization in inference mode.")]
Dropout = Annotated[
    list[str] | None,
    panels.model("--dropout", help="Drop a share behind nodes of a type or name: Relu=0.1. Repeatable."),
]

Head = Annotated[
    str | None,
    panels.model(
        "--head",
        help="Put a new linear head on the model: 10 (its outputs), in the place of the last linear layer, or "
        "10:pooled (on the value pooled).",
    ),
]
ImageMean = Annotated[
    str | None, panels.data("--image-mean", help="Subtracted from pictures (0 to 1): 0.5, or one per channel.")
]
ImageStd = Annotated[str | None, panels.data("--image-std", help="Pictures are divided by it, likewise.")]


Precision = Annotated[
    str | None,
    panels.run(
        "--precision", help="fp16 or bf16: products in 16 bits beside float32 weights, on a provider with them."
    ),
]
AttentionRows = Annotated[
    int | None,
    panels.run("--attention-rows", help="How many queries attention takes at a time; 0: all. Default: by the length."),
]
Provider = Annotated[
    list[str] | None,
    panels.run("--provider", help="Execution provider of ONNX Runtime: cpu, cuda, coreml, … Repeatable, best first."),
]
Epochs = Annotated[int, panels.run("--epochs", help="How often every row is seen.")]
BatchSize = Annotated[int, panels.run("--batch-size", help="Rows per step.")]
Seed = Annotated[int, panels.run("--seed", help="Decides the order of the rows.")]
Threads = Annotated[int | None, panels.run("--threads", help="Default: one per physical core.")]
CheckpointFolder = Annotated[
    Path | None,
    panels.run("--checkpoint", help="Folder for the checkpoint. Default: OUTPUT with the suffix .checkpoint."),
]
Resume = Annotated[bool, panels.run("--resume", help="Go on from the checkpoint, exactly.")]
Restart = Annotated[bool, panels.run("--restart", help="Discard the checkpoint of an unfinished run.")]
Quiet = Annotated[bool, panels.run("--quiet", "-q", help="No progress, only results and errors.")]


def providers(names: Sequence[str] | None) -> tuple[str, ...]:
    """Execution providers by their short or full names; those of the CPU take what others lack.

    Raises:
        BadInput: this ONNX Runtime does not have one of them.
    """
    there = {p.removesuffix("ExecutionProvider").lower(): p for p in onnxruntime.get_available_providers()}
    found = []
    for name in names or ("cpu",):
        short = name.removesuffix("ExecutionProvider").lower()
        if short not in there:
            raise BadInput(
                f"--provider {name}: this onnxruntime has {', '.join(sorted(there))}\n"
                "  hint: another package of it has others, such as onnxruntime-gpu"
            )
        found.append(there[short])
    return tuple(dict.fromkeys([*found, "CPUExecutionProvider"]))


def files(losses: Iterable[str]) -> list[Path]:
    """The files that losses spelled like this read: losses that are graphs, and teachers."""
    terms = [Loss.of(text) for text in losses]
    named = [p for t in terms for p in (t.loss if t.loss.endswith(".onnx") else None, t.teacher) if p]
    return [file for p in named for file in files_of(load_model(p), Path(p))]


def headed(source: ir.Model, text: str) -> tuple[ir.Model, str]:
    """`source` with the head that `text` asks for, as ``10`` or ``10:pooled``, and in words where it went."""
    count, _, of = text.partition(":")
    try:
        outputs = int(count)
    except ValueError as error:
        raise BadInput(f"--head takes a number of outputs, and perhaps :VALUE, not {text!r}") from error
    return placed_head(source, outputs, of=of or None)


def inputs_of(texts: Iterable[str]) -> dict[str, str]:
    """``X=f0..f63`` as which columns feed which input."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, columns = text.partition("=")
        if not equals or not name or not columns:
            raise BadInput(f"--input {text} is not written as X=f0..f63")
        if name in found:
            raise BadInput(f"--input feeds {name!r} twice: from {found[name]} and from {columns}")
        found[name] = columns
    return found


def opened(
    data: Path,
    validation: Path | None,
    validation_split: float | None,
    images: Images,
    inputs: Mapping[str, str],
    labels: str | None,
) -> tuple[dict[str, Column], tuple[dict[str, Column], str] | None]:
    """The arrays of `data`, which hold `labels`, and those of `validation` with what to call them.

    Raises:
        BadInput: there are validation data and a share to hold out, or a file cannot be read.
        UnknownName: `data` have no such labels.
    """
    if validation is not None and validation_split is not None:
        raise BadInput("--validation and --validation-split exclude each other")
    arrays = open_data(data, images, inputs)
    held_out = None if validation is None else (open_data(validation, images, inputs), str(validation))
    if labels is not None and labels not in arrays:
        raise UnknownName(labels, arrays, f"array in {data}")
    return arrays, held_out


def normalization(mean: str | None, std: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What the flags for pictures say, per channel."""

    def numbers(flag: str, text: str) -> tuple[float, ...]:
        try:
            found = tuple(float(n) for n in text.split(","))
        except ValueError as error:
            raise BadInput(f"{flag} takes a number, or one per channel (0.5,0.5,0.5), not {text!r}") from error
        if len(found) not in (1, 3) or not np.isfinite(found).all() or (flag == "--image-std" and 0 in found):
            raise BadInput(f"{flag} takes a number, or one per channel (0.5,0.5,0.5), not {text!r}")
        return found

    return numbers("--image-mean", mean or "0"), numbers("--image-std", std or "1")


#: Parameters of commands that say how to train; each has a flag of the same name.
_FLAGS = (
    *("loss", "optimizer", "prediction", "labels", "lr", "weight_decay", "momentum", "group", "clip_norm"),
    *("clip_value", "ema", "train", "freeze", "freeze_bn", "dropout"),
    *("lora", "dora", "rslora", "vera", "lora_alpha", "lora_targets", "lora_dropout"),
)


def chosen(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the parameters of a command say of how to train, by flag; None for a flag that it does not have."""
    return {f"--{name.replace('_', '-')}": parameters.get(name) for name in _FLAGS}


def with_training(
    source: ir.Model, path: Path, flags: Mapping[str, Any], parts: int, schedule: str | None = None
) -> onnx.ModelProto | ir.Model:
    """`source` as it is if it carries training information, else with what the `flags` say attached.

    Args:
        source: the model.
        path: where it came from.
        flags: by their names on the command line.
        parts: into how many a batch is cut.
        schedule: to be a part of the graph.
    """
    given = [flag for flag, value in flags.items() if value is not None and value is not False]
    adapter = _adapter(flags)
    if training_info(source):
        if given:
            raise BadInput(f"{path} carries training information, which is used as it is; drop {', '.join(given)}")
        return source
    for flag in ("--loss", "--optimizer"):
        if flag not in given:
            raise BadInput(f"{path} carries no training information; say which {flag[2:]} to use with {flag}")
    return attach(
        source,
        loss=flags["--loss"],
        optimizer=flags["--optimizer"],
        output=flags["--prediction"],
        labels=flags["--labels"],
        learning_rate=flags["--lr"],
        weight_decay=flags["--weight-decay"],
        momentum=flags["--momentum"],
        groups=flags["--group"] or (),
        clip_norm=flags["--clip-norm"],
        clip_value=flags["--clip-value"],
        ema=flags["--ema"],
        trainable=flags["--train"],
        freeze=flags["--freeze"] or (),
        freeze_bn=flags["--freeze-bn"],
        dropout=_dropout(flags["--dropout"] or ()),
        accumulate=parts > 1,
        schedule=schedule,
        adapter=adapter,
    )


def _adapter(flags: Mapping[str, Any]) -> LoRA | VeRA | None:
    """What the flags say of adapters."""
    lora, vera = flags["--lora"], flags["--vera"]
    if lora is None:
        of_both = ("--lora-targets", "--lora-dropout")
        for flag in ("--lora-alpha", "--dora", "--rslora", *(of_both if vera is None else ())):
            if flags[flag] not in (None, False):
                raise BadInput(f"{flag} says more about adapters, which --lora RANK asks for")
    elif vera is not None:
        raise BadInput("--lora and --vera are two kinds of adapters; give one of them")
    targets, dropout = flags["--lora-targets"] or ATTENTION, flags["--lora-dropout"] or 0.0
    if vera is not None:
        return VeRA(vera, targets, dropout)
    if lora is None:
        return None
    rslora, dora = bool(flags["--rslora"]), bool(flags["--dora"])
    return LoRA(lora, flags["--lora-alpha"], targets, dropout, rslora=rslora, dora=dora)


def _dropout(texts: Sequence[str]) -> dict[str, float]:
    """``Relu=0.1`` as what to drop behind what."""
    found = {}
    for text in texts:
        behind, equals, share = text.rpartition("=")
        try:
            found[behind] = float(share)
        except ValueError:
            equals = ""
        if not equals or not behind:
            raise BadInput(f"--dropout {text} is not written as Relu=0.1")
    return found
