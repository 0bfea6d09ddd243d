"""The models of the benchmark, exported by PyTorch, with fixed weights and batches.

Each workload names its loss and its optimizer; every competitor starts from the same weights, sees the
same batches, and must report the same losses.
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.training import further_models, models


@dataclass(frozen=True)
class Workload:
    """A model, its data and its training set-up; without an optimizer it is only differentiated.

    Attributes:
        model: builds it.
        input: the shape of a batch of x.
        classes: of the labels.
        tokens: how many different integers x holds; 0 if it holds floats.
        labels: the shape of a batch of labels; one for each row if it is not given.
        second: the shape of a batch of a second input, of floats.
        dynamo: whether PyTorch's newer exporter writes it.
    """

    name: str
    model: Callable[[], nn.Module]
    input: tuple[int, ...]
    classes: int
    optimizer: str
    learning_rate: float
    tokens: int = 0
    labels: tuple[int, ...] | None = None
    second: tuple[int, ...] | None = None
    dynamo: bool = False

    def batches(self, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """`count` batches of inputs by name, and of labels: always the same."""
        rng = np.random.default_rng(0)
        y = rng.integers(0, self.classes, (count, *(self.labels or self.input[:1])))
        shape = (count, *self.input)
        inputs = {"x": rng.integers(0, self.tokens, shape) if self.tokens else rng.standard_normal(shape, np.float32)}
        if self.second:
            inputs["second"] = rng.standard_normal((count, *self.second), np.float32)
        return inputs, y


#: Models that onnxgrad was tuned on.
TUNED = (
    Workload("mlp", models.mlp, (128, 784), 10, "adam", 1e-3),
    Workload("cnn", models.cnn, (32, 3, 32, 32), 10, "momentum", 1e-2),
    Workload("transformer", models.transformer, (16, 64), 512, "adamw", 1e-3, tokens=512, labels=(16, 64)),
    Workload("residual", models.residual, (32, 3, 32, 32), 10, "momentum", 1e-2),
    Workload("lstm", models.lstm, (32, 50, 64), 10, "adam", 1e-3),
    Workload("depthwise", models.depthwise, (16, 3, 32, 32), 10, "momentum", 1e-2),
)
#: The usual kinds at other sizes.
OTHERS = (
    Workload("vit", models.vit, (32, 3, 64, 64), 10, "adamw", 1e-3),
    Workload("unet", models.unet, (4, 3, 96, 96), 4, "adam", 1e-3, labels=(4, 96, 96)),
    Workload("convnext", models.convnext, (16, 3, 96, 96), 10, "adamw", 1e-3),
    Workload("conv_gru", models.conv_gru, (32, 16, 200), 10, "adam", 1e-3),
    Workload("dlrm", models.dlrm, (512, 20), 2, "adam", 1e-3, tokens=2000, second=(512, 13)),
    Workload("bert", models.bert, (8, 128), 8000, "adamw", 1e-3, tokens=8000, labels=(8, 128)),
    Workload("efficientnet", models.efficientnet, (32, 3, 64, 64), 10, "momentum", 1e-2),
)
#: Kinds of which nobody has looked at any part.
UNSEEN = (
    Workload("diffusion", models.diffusion, (4, 3, 32, 32), 4, "adam", 1e-3, labels=(4, 32, 32), second=(4,)),
    Workload("wavenet", models.wavenet, (4, 256), 256, "adam", 1e-3, tokens=256, labels=(4, 256)),
    Workload("graph_net", models.graph_net, (8, 200, 16), 10, "adam", 1e-3),
    Workload("mamba", models.mamba, (8, 64), 256, "adamw", 1e-3, tokens=256, labels=(8, 64)),
    Workload("swin", models.swin, (16, 3, 64, 64), 10, "adamw", 1e-3),
)
#: Kinds that users bring.
FURTHER = (
    Workload("llama", further_models.llama, (4, 128), 1024, "adamw", 1e-3, tokens=1024, labels=(4, 128)),
    Workload("resnet26", further_models.resnet26, (16, 3, 32, 32), 10, "momentum", 1e-2),
    Workload("pointnet", further_models.pointnet, (16, 3, 512), 10, "adam", 1e-3),
    Workload("cnn3d", further_models.cnn3d, (4, 1, 24, 32, 32), 10, "adam", 1e-3),
    Workload("mixer", further_models.mixer, (16, 3, 64, 64), 10, "adamw", 1e-3),
    Workload("conformer", further_models.conformer, (8, 40, 200), 20, "adamw", 1e-3),
    Workload("experts", further_models.experts, (8, 64), 512, "adamw", 1e-3, tokens=512, labels=(8, 64)),
    Workload("generator", further_models.generator, (8, 64, 8, 8), 8, "adam", 1e-3, labels=(8, 64, 64)),
    Workload("graph_attention", further_models.graph_attention, (1000, 64), 7, "adam", 1e-3),
)
#: Forward and backward alone.
DIFFERENTIATED = (Workload("resnet50", models.resnet50, (1, 3, 64, 64), 1000, "none", 0.0),)

#: Kinds of `benchmarks.rewrites` alone: many channels of few pixels, means of neighbours, spectra, sums
#: of products, and rows and columns.
REWRITTEN = (
    Workload("resnet18", models.resnet18, (4, 3, 160, 160), 10, "momentum", 1e-2),
    Workload("pool_mixer", models.pool_mixer, (4, 3, 96, 96), 10, "adamw", 1e-3),
    Workload("global_filter", further_models.global_filter, (8, 3, 64, 64), 10, "adamw", 1e-3, dynamo=True),
    Workload("traffic_graph", further_models.traffic_graph, (16, 3, 12, 60), 4, "adam", 1e-3, labels=(16, 60)),
    Workload("axial_attention", further_models.axial_attention, (8, 3, 48, 48), 10, "adamw", 1e-3),
)


def more() -> tuple[Workload, ...]:
    """The kinds of the file that ``--kinds`` names: its `WORKLOADS`."""
    file = os.environ.get("ONNXGRAD_BENCHMARK_KINDS")
    return tuple(runpy.run_path(file)["WORKLOADS"]) if file else ()


WORKLOADS = {w.name: w for w in (*TUNED, *OTHERS, *UNSEEN, *FURTHER, *DIFFERENTIATED, *REWRITTEN)}


def find(name: str) -> Workload:
    """The workload of that name, of here or of the file that ``--kinds`` names."""
    return WORKLOADS.get(name) or {w.name: w for w in more()}[name]


def export(name: str, folder: Path, batches: int = 8) -> None:
    """Write a workload into `folder`: what every competitor reads.

    ``model.onnx`` (inference), ``training.onnx`` (the same in training mode), ``weights.npz``, ``batches.npz``
    and ``spec.json`` with the optimizer.
    """
    workload = find(name)
    torch.manual_seed(0)
    model = workload.model().eval()
    inputs, y = workload.batches(batches)
    folder.mkdir(parents=True, exist_ok=True)
    held = model.state_dict() | dict(model.named_buffers())  # also those that PyTorch does not save
    np.savez(folder / "weights.npz", **{k: v.numpy() for k, v in held.items()})
    np.savez(folder / "batches.npz", y=y, **inputs)
    parameters = [k for k, _ in model.named_parameters()]
    spec = {"optimizer": workload.optimizer, "learning_rate": workload.learning_rate, "parameters": parameters}
    (folder / "spec.json").write_text(json.dumps(spec))
    modes = {"model": torch.onnx.TrainingMode.PRESERVE, "training": torch.onnx.TrainingMode.TRAINING}
    if workload.dynamo:
        batch = torch.export.Dim("N", min=1)
        program = torch.onnx.export(
            model,
            tuple(torch.from_numpy(x[0]) for x in inputs.values()),
            dynamo=True,
            opset_version=20,
            input_names=list(inputs),
            output_names=["y"],
            dynamic_shapes=tuple({0: batch} for _ in inputs),
        )
        for file in modes:
            program.save(str(folder / f"{file}.onnx"))
        return
    for file, mode in modes.items():
        torch.onnx.export(
            model,
            tuple(torch.from_numpy(x[0]) for x in inputs.values()),
            str(folder / f"{file}.onnx"),
            dynamo=False,
            opset_version=20 if file == "model" else 17,  # what the oldest of the competitors knows
            input_names=list(inputs),
            output_names=["y"],
            dynamic_axes={name: {0: "N"} for name in (*inputs, "y")},
            do_constant_folding=False,
            training=mode,
        )


if __name__ == "__main__":
    import sys

    export(sys.argv[1], Path(sys.argv[2]))
