"""Training steps on a GPU: this project through ONNX Runtime's CUDA provider, beside PyTorch.

``python -m benchmarks.cuda [--kinds mlp,resnet50,decoder,lstm] [--steps 20] [--rounds 5]`` (wants onnxruntime-gpu, a
PyTorch that sees the GPU, and onnxscript). Each competitor is a process of its own, one after the other on a GPU that
nothing else uses, and takes its batches from the host. The time is the median over all steps of all turns but the
first, memory is how much less the driver has free at the end, losses are compared after the same number of steps. The
last lines tell by ONNX Runtime's profile which part of a step its CPU provider ran.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.training.competitors import Workload as Read

#: The competitors: a function of this module and what it is given.
VARIANTS = {
    "torch": ("pytorch", ""),
    "torch, compiled": ("pytorch", "compiled"),
    "onnxgrad": ("ours", ""),
    "torch, bf16": ("pytorch", "bf16"),
    "torch, bf16, compiled": ("pytorch", "bf16 compiled"),
    "onnxgrad, bf16": ("ours", "bf16"),
}


def workloads() -> dict[str, Any]:
    """The models at the size of a GPU."""
    from benchmarks.training import further_models, models
    from benchmarks.training.workloads import Workload

    def decoder() -> Any:
        return further_models.Llama(vocab=8192, width=768, heads=12, groups=4, layers=12, length=512)

    kinds = (
        Workload("mlp", models.mlp, (4096, 784), 10, "adam", 1e-3),
        Workload("resnet50", models.resnet50, (32, 3, 224, 224), 1000, "momentum", 1e-2),
        Workload("decoder", decoder, (8, 512), 8192, "adamw", 1e-4, tokens=8192, labels=(8, 512)),
        Workload("lstm", models.lstm, (256, 50, 64), 10, "adam", 1e-3),
    )
    return {kind.name: kind for kind in kinds}


def free() -> int:
    """Bytes that the driver has free."""
    import torch

    return torch.cuda.mem_get_info()[0]


def pytorch(read: Read, how: str) -> Any:
    """A step of PyTorch; products of float32 use TF32, as in ONNX Runtime."""
    import torch

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    model = workloads()[read.name].model()
    weights = read.weights()
    model.load_state_dict({k: torch.from_numpy(weights[k]) for k in model.state_dict()})
    model = model.cuda().train()
    make = {
        "adam": lambda p: torch.optim.Adam(p, read.learning_rate, fused=True),
        "adamw": lambda p: torch.optim.AdamW(p, read.learning_rate, weight_decay=0.01, fused=True),
        "momentum": lambda p: torch.optim.SGD(p, read.learning_rate, momentum=0.9, fused=True),
    }
    optimizer = make[read.optimizer](model.parameters())
    run = torch.compile(model) if "compiled" in how else model
    xs, ys = read.x, read.y

    def step(i: int) -> float:
        x, y = (torch.from_numpy(a[i % len(ys)]).cuda() for a in (xs, ys))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled="bf16" in how):
            loss = torch.nn.functional.cross_entropy(run(x).float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(read: Read, how: str, profile: str = "") -> Any:
    """A step of a `Trainer` whose state is on the GPU."""
    from onnxgrad.runtime import Options
    from onnxgrad.training import Trainer

    cuda = "CUDAExecutionProvider:arena_extend_strategy=kSameAsRequested"
    trainer = Trainer(
        read.folder / "model.onnx", loss="cross_entropy", optimizer=read.optimizer, learning_rate=read.learning_rate,
        options=Options(providers=(cuda, "CPUExecutionProvider"), profile=profile),
        **({"precision": how} if how else {}), **({"momentum": 0.9} if read.optimizer == "momentum" else {}),
    )  # fmt: skip
    label = next(n for n in trainer.step.batch if n not in read.inputs)
    batches = [{**x, label: y} for x, y in zip(read.batches, read.y)]

    def step(i: int) -> float:
        return float(trainer.machine.step(batches[i % len(batches)])[trainer.step.loss])

    step.trainer = trainer  # type: ignore[attr-defined]
    return step


def worker(name: str, folder: str, variant: str) -> None:
    """Answer each line of stdin, a number of steps, with times, the last loss and the memory, as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    before, taken = free(), 0
    function, how = VARIANTS[variant]
    begin = time.perf_counter()
    try:
        step = globals()[function](Read.read(name, Path(folder)), how)
        for line in sys.stdin:
            times, loss = [], 0.0
            for _ in range(int(line)):
                now = time.perf_counter()
                loss = step(taken)
                times.append(time.perf_counter() - now)
                taken += 1
            start = time.perf_counter() - begin
            print(json.dumps({"times": times, "loss": loss, "mb": (before - free()) / 2**20, "start": start}),
                  file=answers, flush=True)  # fmt: skip
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {str(error)[:600]}"}), file=answers, flush=True)


def profiled(name: str, folder: str) -> None:
    """Print how many nodes, and what part of their time, each provider runs in a step."""
    prefix = f"{folder}/profile"
    step = ours(Read.read(name, Path(folder)), "", prefix)
    for i in range(4):
        step(i)
    events = json.loads(Path(step.trainer.machine.session.end_profiling()).read_text())
    nodes, time_of, slowest = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            provider = event["args"].get("provider", "?").removesuffix("ExecutionProvider")
            nodes[provider] += 1
            time_of[provider] += event["dur"]
            slowest[f"{provider} {event['args'].get('op_name')}"] += event["dur"]
    print(f"{name:10s} nodes of 4 steps {dict(nodes)}; µs at the host {dict(time_of)}; most {slowest.most_common(8)}")


def measure(name: str, rounds: int, steps: int, only: list[str]) -> None:
    """Print a line for each competitor on one model."""
    from benchmarks.training import workloads as module

    module.WORKLOADS = workloads()
    with tempfile.TemporaryDirectory() as folder:
        module.export(name, Path(folder), batches=4)
        base = None
        for variant in only:
            turns = _turns(name, folder, variant, rounds, steps)
            if "failed" in turns[-1]:
                print(f"{name:10s} {variant:24s} – {turns[-1]['failed']}", flush=True)
                continue
            median = statistics.median(t for turn in turns[1:] for t in turn["times"]) * 1e3
            base = base or median
            print(
                f"{name:10s} {variant:24s} {median:9.2f} ms × {median / base:.2f} {turns[-1]['mb']:7.0f} MB "
                f"start {turns[0]['start']:.1f} s loss {turns[0]['loss']:.5f} … {turns[-1]['loss']:.5f}",
                flush=True,
            )
        subprocess.run([sys.executable, "-m", "benchmarks.cuda", "--profile", name, folder], check=False)


def _turns(name: str, folder: str, variant: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cuda", "--worker", name, folder, variant]
    asked = f"{steps}\n" * (rounds + 1)
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines() or [json.dumps({"failed": ended.stderr[-600:]})]
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(("mlp", "resnet50", "decoder", "lstm")))
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by ;")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--profile", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(*given.worker)
    elif given.profile:
        profiled(*given.profile)
    else:
        for name in given.kinds.split(","):
            measure(name, given.rounds, given.steps, given.variants.split(";"))


if __name__ == "__main__":
    main()
