"""onnxruntime-training 1.19.2, the last release of ONNX Runtime's own training: its artifacts and its Module.

Its package imports parts for PyTorch that nothing here needs; empty modules take their place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

from benchmarks.training.competitors import Prepared, Unable, Workload


def without_torch() -> None:
    """Have the package import without its parts for PyTorch."""
    for part in ("amp", "optim", "ortmodule"):
        sys.modules[f"onnxruntime.training.{part}"] = types.ModuleType(part)


def prepare(workload: Workload, threads: int, variant: str) -> Prepared:
    """The loss and the optimizer are those that its artifacts offer; its SGD knows no momentum."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        args = [sys.executable, "-m", __name__, str(workload.folder), scratch, json.dumps(workload.parameters)]
        done = subprocess.run([*args, workload.optimizer], capture_output=True, text=True)
        if done.returncode:
            raise Unable(f"its artifacts: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        parts = {"derive": time.perf_counter() - begin}
        begin = time.perf_counter()
        from onnxruntime import SessionOptions

        without_torch()
        from onnxruntime.training.api import CheckpointState, Module, Optimizer

        options = SessionOptions()
        options.intra_op_num_threads = threads
        at = Path(scratch)
        state = CheckpointState.load_checkpoint(str(at / "checkpoint"))
        model = Module(str(at / "training_model.onnx"), state, None, "cpu", session_options=options)
        optimizer = Optimizer(str(at / "optimizer_model.onnx"), model)
        optimizer.set_learning_rate(workload.learning_rate)
        parts["session"] = time.perf_counter() - begin
    xs, ys = list(workload.x), list(workload.y)

    def step(i: int) -> float:
        model.train()
        loss = model(xs[i % len(xs)], ys[i % len(ys)])
        optimizer.step()
        model.lazy_reset_grad()
        return float(loss)

    notes = ["its SGD has no momentum"] if workload.optimizer == "momentum" else []
    return Prepared(step, None, parts, notes)


def main() -> None:
    folder, scratch, parameters, optimizer = sys.argv[1:5]
    without_torch()
    import onnx
    from onnxruntime.training import artifacts, onnxblock

    model = onnx.load(Path(folder) / "training.onnx")
    for node in model.graph.node:  # its gradient reads the mean and the deviation, which the exporter leaves out
        if node.op_type == "LayerNormalization":
            node.output.extend([f"{node.output[0]}_{what}" for what in ("mean", "deviation")][len(node.output) - 1 :])
    known = {t.name for t in model.graph.initializer}
    train = [n for n in json.loads(parameters) if n in known]
    rule = onnxblock.optim.SGD()
    if optimizer != "momentum":
        rule = onnxblock.optim.AdamW(eps=1e-8, weight_decay=0.01 if optimizer == "adamw" else 0.0)
    artifacts.generate_artifacts(
        model,
        requires_grad=train,
        frozen_params=sorted(known - set(train)),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=rule,
        artifact_directory=scratch,
    )
    made = Path(scratch, "training_model.onnx")
    model = onnx.load(made)
    for value in model.graph.input:  # it takes the classes of (N, classes, …) for the last axis
        if value.name == "labels":
            for i, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_param = f"labels_{i}"
    onnx.save(model, made)


if __name__ == "__main__":
    main()
