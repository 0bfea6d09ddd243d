"""PyTorch: eager, with the options that are fastest on a CPU, and compiled."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.training.competitors import Prepared, Workload


def prepare(workload: Workload, threads: int, variant: str) -> Prepared:
    """`variant`: "eager"; "best" adds the fused optimizer and channels_last; "compiled" adds torch.compile."""
    begin = time.perf_counter()
    import torch

    from benchmarks.training.workloads import find

    parts = {"import": time.perf_counter() - begin}
    begin = time.perf_counter()
    torch.set_num_threads(threads)
    model = find(workload.name).model()
    weights = workload.weights()
    model.load_state_dict({k: torch.from_numpy(weights[k]) for k in model.state_dict()})
    model.train()
    xs = [[torch.from_numpy(x) for x in batch.values()] for batch in workload.batches]
    ys = [torch.from_numpy(b) for b in workload.y]
    best = variant != "eager"
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    if best and xs[0][0].ndim in layouts:
        layout = layouts[xs[0][0].ndim]
        model = model.to(memory_format=layout)
        xs = [[x.to(memory_format=layout), *others] for x, *others in xs]
    options = {"fused": True} if best else {}
    lr = workload.learning_rate
    if workload.optimizer == "none":
        return _gradients(torch, model.eval(), xs[0][0], compiled=variant == "compiled")
    optimizer = {
        "adam": lambda p: torch.optim.Adam(p, lr, **options),
        "adamw": lambda p: torch.optim.AdamW(p, lr, weight_decay=0.01, **options),
        "momentum": lambda p: torch.optim.SGD(p, lr, momentum=0.9, **options),
    }[workload.optimizer](model.parameters())
    run = torch.compile(model) if variant == "compiled" else model
    parts["model"] = time.perf_counter() - begin

    def step(i: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(run(*xs[i % len(xs)]), ys[i % len(ys)])
        loss.backward()
        optimizer.step()
        return loss.item()

    def forward() -> None:
        model.eval()
        with torch.no_grad():
            run(*xs[0])

    return Prepared(step, forward, parts)


def _gradients(torch: Any, model: Any, x: Any, compiled: bool) -> Prepared:
    """The model in inference mode, and the gradients of the sum of what it gives with respect to all parameters."""
    run = torch.compile(model) if compiled else model

    def step(i: int) -> float:
        model.zero_grad(set_to_none=True)
        total = run(x).sum()
        total.backward()
        return total.item()

    return Prepared(step)
