"""The loss over a large vocabulary, all rows of logits at once against blocks of them.

    python -m benchmarks.vocabularies [--words 131072] [--width 128] [--tokens 4096]

A language model of two products: embedded tokens, a layer, and scores by the transposed embedding. Processes in turns,
one of each kind: the CPU time of a step on one thread (median), the largest memory of the process as the one that has
started it is told by the system, and by how much it grows in the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.memory import resident

KINDS = {"plain": 0, "blocks": None}


def model(words: int, width: int) -> onnx.ModelProto:
    """ids [rows, time] → logits [rows, time, words]."""
    rng = np.random.default_rng(0)
    embedding = (rng.standard_normal((words, width)) / width**0.5).astype(np.float32)
    layer = (rng.standard_normal((width, width)) / width**0.5).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["embedding", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "layer"], ["z"]),
        helper.make_node("Tanh", ["z"], ["h"]),
        helper.make_node("Transpose", ["embedding"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["h", "turned"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["rows", "time"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", "time", words])],
        [numpy_helper.from_array(embedding, "embedding"), numpy_helper.from_array(layer, "layer")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def peak() -> float:
    """The largest memory of this process so far, in MB."""
    return resident() / 1e6


def measure(kind: str, words: int, width: int, tokens: int, steps: int, target: str) -> dict[str, float]:
    """The time of a few steps, in this process."""
    from onnxgrad import Loss, Options, Trainer

    loss = Loss("cross_entropy", axis=-1, block_rows=KINDS[kind])
    trainer = Trainer(
        model(words, width), loss=loss, optimizer="sgd", learning_rate=0.1, metrics=["accuracy"],
        options=Options(threads=1, target=target),
    )  # fmt: skip
    ids = np.random.default_rng(1).integers(0, words, (8, tokens // 8 + 1))
    batch = {"ids": np.ascontiguousarray(ids[:, :-1]), "labels": np.ascontiguousarray(ids[:, 1:])}
    before, seconds = peak(), []
    for _ in range(steps):
        start = time.process_time()
        result = trainer.machine.step(batch)
        seconds.append(time.process_time() - start)
    loss = float(result[trainer.step.loss])
    return {"step s": statistics.median(seconds), "grown MB": peak() - before, "loss": loss}


def from_outside(command: Sequence[str]) -> dict[str, float]:
    """The output of a process on one thread, and its peak memory."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {**json.loads(told), "peak MB": usage.ru_maxrss / 1e3}


def main() -> None:
    """Measure in turns, and print one line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("words", 131072), ("width", 128), ("tokens", 4096), ("steps", 2), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--target", default="portable", choices=("portable", "native"))
    parser.add_argument("--of", choices=list(KINDS), help="measure one kind in this process")
    asked = parser.parse_args()
    sizes = (asked.words, asked.width, asked.tokens, asked.steps, asked.target)
    if asked.of:
        print(json.dumps(measure(asked.of, *sizes)))
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    command = [sys.executable, "-m", "benchmarks.vocabularies", *(f"--{n}={getattr(asked, n)}" for n in
               ("words", "width", "tokens", "steps", "target"))]  # fmt: skip
    for _ in range(asked.turns):
        for kind, held in found.items():
            held.append(from_outside([*command, f"--of={kind}"]))
    medians = {k: {what: statistics.median(r[what] for r in held) for what in held[0]} for k, held in found.items()}
    for kind, row in medians.items():
        print(f"{kind:8}", "  ".join(f"{what} {value:.4g}" for what, value in row.items()))
    plain, blocks = medians["plain"], medians["blocks"]
    ratios = {what: plain[what] / blocks[what] for what in ("step s", "grown MB", "peak MB")}
    print("plain / blocks:", "  ".join(f"{what} {value:.2f}" for what, value in ratios.items()))


if __name__ == "__main__":
    main()
