"""``python -m benchmarks.detection_step``: time and memory of a training step of YOLOv8n, here and by PyTorch.

Both train the same network with random weights, the same pictures and boxes, and the loss of Ultralytics, with AdamW on
one thread. Each runs in a process of its own; their steps alternate. Memory is the peak of resident memory beyond that
of the process with its imports. Needs ultralytics, torch and scikit-learn; with ``--folded``, the file has its
BatchNormalization folded, as exporters do by default, and PyTorch's network has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

from benchmarks.detection import SHAPES, draw_shapes
from benchmarks.memory import resident

RUNNERS = ("onnxgrad", "PyTorch")
#: Steps before those that are measured.
WARMUP = 3


def prepare(folder: Path, side: int, rows: int, folded: bool) -> None:
    """Write the file, the weights of the same network, and one batch into `folder`."""
    import torch
    from ultralytics.nn.tasks import DetectionModel

    network = DetectionModel("yolov8n.yaml", nc=len(SHAPES), verbose=False)
    torch.save(network.state_dict(), folder / "weights.pt")
    network.eval()
    if folded:
        network.fuse(verbose=False)
    network.model[-1].export, network.model[-1].format = True, "onnx"
    kept = {} if folded else {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
    torch.onnx.export(
        network, (torch.rand(1, 3, side, side),), folder / "yolov8n.onnx", opset_version=17, dynamo=False, **kept
    )
    model = onnx.load(folder / "yolov8n.onnx")
    names = str(dict(enumerate(SHAPES)))
    onnx.helper.set_model_props(model, {"names": names})  # classes of these names keep their weights
    onnx.save(model, folder / "yolov8n.onnx")
    draw_shapes(folder / "boxes", rows, side)


def onnxgrad_step(folder: Path) -> Callable[[], float]:
    """A step of onnxgrad, which returns its loss."""
    from onnxgrad.training import Trainer
    from onnxgrad.training.data.annotations.reading import read_detection
    from onnxgrad.training.data.recipe import PreparationRecipe
    from onnxgrad.training.detection.feeds import DetectionFeed
    from onnxgrad.training.detection.recipe import DetectionRecipe
    from onnxgrad.training.detection.task import DetectionTask

    data = read_detection(folder / "boxes" / "boxes.json")
    task = DetectionTask.of(folder / "yolov8n.onnx", data, DetectionRecipe(), PreparationRecipe())
    images, labels = DetectionFeed(data, task.letterbox)(np.arange(len(data))).values()
    np.savez(folder / "batch.npz", images=images, labels=labels)
    trainer = Trainer(task.model, loss=task.loss, optimizer="adamw", learning_rate=1e-3, weight_decay=0.0, threads=1)
    feeds = dict(zip(task.columns(data), (images, labels)))
    return lambda: float(next(iter(trainer.machine.step(feeds).values())))


def pytorch_step(folder: Path) -> Callable[[], float]:
    """A step of PyTorch with the loss of Ultralytics, which returns its loss."""
    import torch
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils import DEFAULT_CFG

    torch.set_num_threads(1)
    network = DetectionModel("yolov8n.yaml", nc=len(SHAPES), verbose=False)
    network.load_state_dict(torch.load(folder / "weights.pt"))
    network.args = DEFAULT_CFG
    batch = np.load(folder / "batch.npz")
    images, labels = batch["images"], batch["labels"]
    there = np.argwhere(labels[..., 0] >= 0)
    boxes = np.array([labels[k, j] for k, j in there])
    corners = boxes[:, 1:] / images.shape[-1]
    centres = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)
    given = {
        "img": torch.tensor(images), "batch_idx": torch.tensor(there[:, 0]), "cls": torch.tensor(boxes[:, :1]),
        "bboxes": torch.tensor(centres),
    }  # fmt: skip
    optimizer = torch.optim.AdamW(network.train().parameters(), 1e-3, weight_decay=0.0)

    def step() -> float:
        optimizer.zero_grad()
        loss = network.loss(given)[0].sum()
        loss.backward()
        optimizer.step()
        return loss.item() / len(images)  # Ultralytics multiplies its loss by the rows of the batch

    return step


def serve(runner: str, folder: Path) -> None:
    """Take one step for each line of standard input; print its loss, milliseconds, and the peak of memory in MB."""
    if runner == "PyTorch":
        import ultralytics.nn.tasks  # noqa: F401
    else:
        import onnxgrad.training.detection.task  # noqa: F401
    before = resident("VmRSS")
    step = (onnxgrad_step if runner == "onnxgrad" else pytorch_step)(folder)
    losses = [step() for _ in range(WARMUP)]
    print(f"ready {losses[0]:.4f}", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        loss = step()
        print(json.dumps([loss, 1000 * (time.perf_counter() - begun), (resident() - before) / 2**20]), flush=True)


def main() -> None:
    """Print the medians of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--folded", action="store_true", help="fold BatchNormalization into the file")
    parser.add_argument("--serve", nargs=2, metavar=("RUNNER", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve[0], Path(asked.serve[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), asked.side, asked.rows, asked.folded)
        command = [sys.executable, "-m", "benchmarks.detection_step", "--serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        servers, first, found = {}, {}, {runner: [] for runner in RUNNERS}
        for runner in RUNNERS:
            servers[runner] = subprocess.Popen([*command, runner, folder], **pipes)
            while not (line := servers[runner].stdout.readline()).startswith("ready"):
                if not line:
                    raise SystemExit(f"{runner} failed")
            first[runner] = line.split()[1]
        for _ in range(asked.steps):
            for runner, server in servers.items():
                server.stdin.write("\n")
                server.stdin.flush()
                found[runner].append(json.loads(server.stdout.readline()))
        for server in servers.values():
            server.communicate()
    for runner, rows in found.items():
        losses, times, memory = np.array(rows).T
        print(f"{runner}: {np.median(times):.0f} ms, {memory.max():.0f} MB, losses {first[runner]} … {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
