"""Where the time of a step goes, by kinds of operators, against the roofline of the machine.

``python -m benchmarks.training.fractions [--workload NAME …]`` profiles one step of every workload on one thread and
keeps the shares as ``fractions.json`` beside the other results. The roofline of a step is the sum over its nodes of
what each takes at least: the operations of a product or convolution at the best rate of the BLAS of NumPy on this
machine, or the bytes that it reads and writes at the bandwidth of a large copy, whichever is more (Williams, Waterman,
Patterson, "Roofline", 2009).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rewrites import step_of
from benchmarks.training.__main__ import RESULTS, WORKLOADS, processor
from onnxgrad.runtime import Options, StepRunner

KINDS = {
    "products": ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "TransposeMatMul", "Einsum"),
    "convolutions": ("Conv", "FusedConv", "ConvTranspose", "ConvWeightGrad", "ConvInputGrad"),
    "moves": ("Transpose", "Reshape", "Concat", "Slice", "Gather", "ReorderInput", "ReorderOutput", "Expand", "Pad"),
    "control flow": ("Scan", "Loop", "If"),
}
SIZES = {"float": 4, "double": 8, "int64": 8, "int32": 4, "bool": 1, "float16": 2, "uint8": 1}


def best_rate() -> float:
    """The most operations per second of a product of 1024 × 1024 in NumPy on one thread."""
    a = np.ones((1024, 1024), np.float32)
    return 2 * 1024**3 / min(_seconds(lambda: a @ a) for _ in range(10))


def bandwidth() -> float:
    """The most bytes per second that a copy of 64 MB reads and writes."""
    a, b = np.ones(1 << 24, np.float32), np.empty(1 << 24, np.float32)
    return 2 * a.nbytes / min(_seconds(lambda: np.copyto(b, a)) for _ in range(10))


def _seconds(do: Any) -> float:
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def _tensors(described: list[dict[str, list[int]]]) -> list[tuple[str, list[int]]]:
    return [(kind, shape) for one in described for kind, shape in one.items()]


def operations(kind: str, inputs: list[list[int]], outputs: list[list[int]]) -> float:
    """Multiplications and additions of a node that is a product or a convolution of these shapes; 0 for others."""
    if not inputs or not outputs or not outputs[0]:
        return 0.0
    if kind in KINDS["products"] and len(inputs) > 1:
        size, (a, b) = float(np.prod(outputs[0])), (float(np.prod(inputs[0])), float(np.prod(inputs[1])))
        batch = float(np.prod(outputs[0][:-2])) if len(inputs[1]) > 2 else 1.0
        return 2 * float(np.sqrt(a / batch * b / batch * size / batch)) * batch  # (mk · kn · mn)^½ = mnk
    if kind in ("Conv", "FusedConv", "ConvTranspose"):
        image = inputs[0] if kind == "ConvTranspose" else outputs[0]
        return 2 * float(np.prod(image)) * float(np.prod(inputs[1][1:]))
    return 0.0


def shares(workload: str, rate: float, width: float) -> dict[str, float]:
    """The share of each kind in the kernel time of a step, and the roofline as a share of that time."""
    step, batches = step_of(workload)
    with tempfile.TemporaryDirectory() as folder:
        options = Options(threads=1, profile=str(Path(folder) / "step"))
        runner = StepRunner(step, options=options)
        for batch in batches[:4]:
            runner.step(batch)
        events = json.loads(Path(runner.session.end_profiling()).read_text())
    taken: dict[str, float] = defaultdict(float)
    least = 0.0
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        about = event["args"]
        inputs, outputs = _tensors(about["input_type_shape"]), _tensors(about["output_type_shape"])
        kind = about["op_name"]
        taken[next((k for k, ops in KINDS.items() if kind in ops), "elementwise and others")] += event["dur"] / 1e6
        moved = sum(SIZES.get(t, 4) * float(np.prod(s)) for t, s in (*inputs, *outputs))
        work = operations(kind, [s for _, s in inputs], [s for _, s in outputs])
        if kind not in KINDS["control flow"]:
            least += max(work / rate, moved / width if kind not in ("Reshape", "Shape") else 0.0)
    total = sum(taken.values())
    return {k: taken[k] / total for k in (*KINDS, "elementwise and others")} | {"roofline": least / total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only these")
    args = parser.parse_args()
    file = RESULTS / re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-") / "fractions.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    rate, width = best_rate(), bandwidth()
    print(f"{rate / 1e9:.0f} GFLOP/s, {width / 1e9:.1f} GB/s")
    for workload in args.workload or [w for w in WORKLOADS if w != "resnet50"]:
        kept[workload] = shares(workload, rate, width)
        print(workload, {k: round(v, 2) for k, v in kept[workload].items()}, flush=True)
        file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):  # the BLAS of NumPy takes as many threads as it may use cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    main()
