"""This project: the exported model, a `Trainer`, whose state is resident in ONNX Runtime."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.training.competitors import Prepared, Workload

#: How ONNX Runtime runs the step.
VARIANTS: dict[str, dict[str, Any]] = {"": {}, "portable": {"target": "portable"}}


def prepare(workload: Workload, threads: int, variant: str) -> Prepared:
    """`variant`: "" is what users get by default, "portable" standard operators alone, without kernels in C."""
    begin = time.perf_counter()
    from onnxgrad.runtime import Options, Session
    from onnxgrad.training import Trainer

    options = Options(threads=threads, **VARIANTS[variant])
    parts = {"import": time.perf_counter() - begin}
    if workload.optimizer == "none":
        return _gradients(workload, options)
    extra = {"momentum": 0.9} if workload.optimizer == "momentum" else {}
    model = workload.folder / "model.onnx"
    begin = time.perf_counter()
    trainer = Trainer(
        model, loss="cross_entropy", optimizer=workload.optimizer, learning_rate=workload.learning_rate,
        options=options, **extra,
    )  # fmt: skip
    parts["trainer"] = time.perf_counter() - begin
    runner, graph = trainer.machine, trainer.step
    label, loss = next(n for n in graph.batch if n not in workload.inputs), graph.loss
    batches = [{**x, label: y} for x, y in zip(workload.batches, workload.y)]
    held: list[Session] = []

    def step(i: int) -> float:
        return float(runner.step(batches[i % len(batches)])[loss])

    def forward() -> None:
        if not held:
            held.append(Session(model, options))
        held[0].run(workload.batches[0])

    return Prepared(step, forward, parts)


def _gradients(workload: Workload, options: Any) -> Prepared:
    """The model in inference mode, and the gradients of the sum of what it gives with respect to all parameters."""
    begin = time.perf_counter()
    import onnx_ir as ir

    from onnxgrad import signature, vjp
    from onnxgrad.runtime import Session

    model = ir.load(workload.folder / "model.onnx")
    derived = vjp(model, wrt=[n for n in workload.parameters if n in model.graph.initializers])
    parts = {"derive": time.perf_counter() - begin}
    begin = time.perf_counter()
    names = signature(derived)
    session = Session(derived, options)
    del model
    parts["session"] = time.perf_counter() - begin
    feeds = {"x": workload.x[0], names.cotangents["y"]: np.ones((len(workload.x[0]), 1000), np.float32)}
    outputs = ["y", *names.gradients.values()]

    def step(i: int) -> float:
        return float(session.run(feeds, outputs)["y"].sum())

    return Prepared(step, None, parts)
