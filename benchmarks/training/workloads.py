"""The models that the benchmark trains: built and exported by PyTorch, with fixed weights and batches.

Each workload names its loss and its optimizer; every competitor starts from the same weights, sees the
same batches, and must report the same losses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(i, o, 3, stride, 1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(),
            nn.Conv2d(o, o, 3, 1, 1, bias=False),
            nn.BatchNorm2d(o),
        )
        self.skip = (
            nn.Identity()
            if (i, stride) == (o, 1)
            else nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Transformer(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)  # (N, classes, length), as cross entropy wants it


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        split = (n, length, self.heads, width // self.heads)
        q, k, v = (t.reshape(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        a = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, dim=-1)
        x = x + self.out((a @ v).transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class Recurrent(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Bottleneck(nn.Module):
    def __init__(self, i: int, width: int, stride: int) -> None:
        super().__init__()
        o = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(i, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, o, 1, bias=False), nn.BatchNorm2d(o),
        )  # fmt: skip
        self.skip = (
            nn.Identity()
            if (i, stride) == (o, 1)
            else nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    i = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(count):
            layers.append(Bottleneck(i, width, stride if k == 0 else 1))
            i = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 16, 10),
    )  # fmt: skip


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def depthwise() -> nn.Module:
    def block(i: int, o: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(i, i, 3, stride, 1, groups=i, bias=False), nn.BatchNorm2d(i), nn.ReLU(),
            nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(),
        ]  # fmt: skip

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        *block(32, 64, 1), *block(64, 128, 2), *block(128, 128, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    return Transformer(vocab=512, width=128, heads=4, layers=2, length=64)


def lstm() -> nn.Module:
    return Recurrent(width=64, hidden=128, layers=2, classes=10)


@dataclass(frozen=True)
class Workload:
    """A model, its data and its training set-up; without an optimizer it is only differentiated."""

    name: str
    model: Callable[[], nn.Module]
    input: tuple[int, ...]
    classes: int
    optimizer: str
    learning_rate: float
    tokens: bool = False

    def batches(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` batches of inputs and labels, always the same."""
        rng = np.random.default_rng(0)
        labels = (count, *self.input) if self.tokens else (count, self.input[0])
        y = rng.integers(0, self.classes, labels)
        if self.tokens:
            return rng.integers(0, self.classes, (count, *self.input)), y
        return rng.standard_normal((count, *self.input), np.float32), y


WORKLOADS = {
    w.name: w
    for w in (
        Workload("mlp", mlp, (128, 784), 10, "adam", 1e-3),
        Workload("cnn", cnn, (32, 3, 32, 32), 10, "momentum", 1e-2),
        Workload("transformer", transformer, (16, 64), 512, "adamw", 1e-3, tokens=True),
        Workload("residual", residual, (32, 3, 32, 32), 10, "momentum", 1e-2),
        Workload("lstm", lstm, (32, 50, 64), 10, "adam", 1e-3),
        Workload("resnet50", resnet50, (1, 3, 64, 64), 1000, "none", 0.0),
        Workload("depthwise", depthwise, (16, 3, 32, 32), 10, "momentum", 1e-2),
    )
}


def export(name: str, folder: Path, batches: int = 8) -> None:
    """Write a workload into `folder`: what every competitor reads.

    ``model.onnx`` (inference), ``training.onnx`` (the same in training mode), ``weights.npz``, ``batches.npz``
    and ``spec.json`` with the optimizer.
    """
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.model().eval()
    x, y = workload.batches(batches)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "weights.npz", **{k: v.numpy() for k, v in model.state_dict().items()})
    np.savez(folder / "batches.npz", x=x, y=y)
    parameters = [k for k, _ in model.named_parameters()]
    spec = {"optimizer": workload.optimizer, "learning_rate": workload.learning_rate, "parameters": parameters}
    (folder / "spec.json").write_text(json.dumps(spec))
    modes = {"model": torch.onnx.TrainingMode.PRESERVE, "training": torch.onnx.TrainingMode.TRAINING}
    for file, mode in modes.items():
        torch.onnx.export(
            model,
            (torch.from_numpy(x[0]),),
            str(folder / f"{file}.onnx"),
            dynamo=False,
            opset_version=20 if file == "model" else 17,  # what the oldest of the competitors knows
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
            do_constant_folding=False,
            training=mode,
        )


if __name__ == "__main__":
    import sys

    export(sys.argv[1], Path(sys.argv[2]))
