"""One competitor in a process of its own: reads ``steps K`` from stdin, answers with times and losses as JSON.

``python -m benchmarks.training.worker COMPETITOR WORKLOAD FOLDER THREADS``
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

StepFunction = Callable[[int], float]


def torch_steps(workload: str, folder: Path, threads: int, best: bool) -> StepFunction:
    """PyTorch: eager with its defaults, or with the options that are fastest on a CPU."""
    import torch

    from benchmarks.training.workloads import WORKLOADS

    torch.set_num_threads(threads)
    w = WORKLOADS[workload]
    model = w.model()
    model.load_state_dict(torch.load(folder / "weights.pt"))
    model.train()
    data = np.load(folder / "batches.npz")
    xs, ys = [torch.from_numpy(b) for b in data["x"]], [torch.from_numpy(b) for b in data["y"]]
    if best and xs[0].ndim == 4:
        model = model.to(memory_format=torch.channels_last)
        xs = [x.to(memory_format=torch.channels_last) for x in xs]
    options = {"fused": True} if best else {}
    lr = w.learning_rate
    optimizer = {
        "adam": lambda p: torch.optim.Adam(p, lr, **options),
        "adamw": lambda p: torch.optim.AdamW(p, lr, weight_decay=0.01, **options),
        "momentum": lambda p: torch.optim.SGD(p, lr, momentum=0.9, **options),
    }[w.optimizer](model.parameters())

    def step(i: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(xs[i % len(xs)]), ys[i % len(ys)])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def onnxgrad_steps(workload: str, folder: Path, threads: int) -> StepFunction:
    """This project: the exported model, one step graph, state resident in ONNX Runtime."""
    from onnxgrad.runtime import StepRunner
    from onnxgrad.training import attach, compile_step

    optimizer, lr = {
        "mlp": ("adam", 1e-3),
        "transformer": ("adamw", 1e-3),
    }.get(workload, ("momentum", 1e-2))
    options = {"momentum": 0.9} if optimizer == "momentum" else {}
    training = attach(folder / "model.onnx", loss="cross_entropy", optimizer=optimizer, learning_rate=lr, **options)
    step_graph = compile_step(training)
    runner = StepRunner(step_graph, threads=threads)
    data = np.load(folder / "batches.npz")
    label = next(n for n in step_graph.batch if n != "x")
    batches = [{"x": x, label: y} for x, y in zip(data["x"], data["y"])]

    def step(i: int) -> float:
        return float(runner.step(batches[i % len(batches)])[step_graph.loss])

    return step


COMPETITORS: dict[str, Callable[[str, Path, int], StepFunction]] = {
    "onnxgrad": onnxgrad_steps,
    "torch": lambda w, f, t: torch_steps(w, f, t, best=False),
    "torch-best": lambda w, f, t: torch_steps(w, f, t, best=True),
}


def main() -> None:
    competitor, workload, folder, threads = sys.argv[1:5]
    start = time.perf_counter()
    step = COMPETITORS[competitor](workload, Path(folder), int(threads))
    print(json.dumps({"start_up": time.perf_counter() - start}), flush=True)
    done = 0
    for line in sys.stdin:
        times, losses = [], []
        for _ in range(int(line.split()[1])):
            begin = time.perf_counter()
            losses.append(step(done))
            times.append(time.perf_counter() - begin)
            done += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"times": times, "losses": losses, "peak_mb": peak}), flush=True)


if __name__ == "__main__":
    main()
