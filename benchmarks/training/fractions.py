"""The time of a step by kinds of operators, against the roofline of the machine.

``python -m benchmarks.training.fractions [--workload NAME …]`` profiles steps of every workload on one thread and
keeps the shares as ``fractions.json`` beside the other results. The roofline of a step is the sum over its nodes of
what each takes at least: its multiplications and additions at the best rate of the BLAS of NumPy on this machine, or
the bytes that it reads and writes at the bandwidth of a copy of as many, whichever is more (Williams, Waterman,
Patterson, "Roofline", 2009; Ilic, Pratas, Sousa, "Cache-aware roofline model", 2014). A convolution counts the
multiplications of its definition, of which the kernel for windows of 3 × 3 makes fewer (Winograd). The cotangents of
attention count the scores twice, as they are not kept. Operators inside of control flow count by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.rewrites import step_of
from benchmarks.training.__main__ import RESULTS, WORKLOADS, processor
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels.programs import CODES

KINDS = {
    "products": "MatMul Gemm FusedMatMul FusedGemm TransposeMatMul Einsum Product",
    "convolutions": "Conv FusedConv Conv3x3 ConvTranspose ConvWeightGrad",
    "attention": "Attention AttentionGrad",
    "recurrences": "Recurrence LSTM GRU RNN",
    "normalization": "BatchNorm BatchNormGrad GroupNorm GroupNormGrad LayerNormalization LayerNormGrad"
    " SimplifiedLayerNormalization BatchNormalization InstanceNormalization",
    "softmax": "Softmax LogSoftmax SoftmaxCrossEntropy",
    "elementwise": "Elementwise Add Sub Mul Div Neg Abs Sqrt Exp Log Erf Tanh Sigmoid Softplus Relu Pow Where"
    " Greater GreaterOrEqual Less LessOrEqual Equal And Or Not Cast Max Min Sum Reciprocal Sign Sin Cos Gelu BiasGelu",
    "sums, pooling": "ReduceSum ReduceMean ReduceMax ReduceMin ReduceL2 ReduceSumSquare RunningSum RunningSumAdd CumSum"
    " MaxPool MaxPoolGrad AveragePool GlobalAveragePool",
    "optimizer": "Sgd Momentum Adam NAdam Adagrad",
    "moves": "Transpose Concat Split Slice Gather GatherGrad GatherElements GatherND ScatterElements"
    " ScatterND ReorderInput ReorderOutput Expand Tile Pad Resize ConstantOfShape"
    " Reshape Flatten Squeeze Unsqueeze Identity Shape",
}
KIND = {op: kind for kind, ops in KINDS.items() for op in ops.split()}
VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape")  #: of which nothing is read
CONTROL_FLOW = ("Scan", "Loop", "If")
NAMED = 0.02  #: an operator that is of no kind is one of its own from this share on
Tensors = list[tuple[str, list[int]]]  #: types and shapes
SIZES = {"float": 4, "double": 8, "int64": 8, "int32": 4, "bool": 1, "float16": 2, "uint8": 1}


def best_rate() -> float:
    """The most operations per second of a product of 1024 × 1024 in NumPy on one thread."""
    a = np.ones((1024, 1024), np.float32)
    return 2 * 1024**3 / min(_seconds(lambda: a @ a) for _ in range(10))


def bandwidths() -> dict[int, float]:
    """The most bytes per second that a copy reads and writes, by how many those are: 16 KiB, and by fours to 64 MiB."""
    found = {}
    for power in range(14, 27, 2):
        a, b = np.ones(1 << (power - 3), np.float32), np.empty(1 << (power - 3), np.float32)
        found[1 << power] = 2 * a.nbytes / min(_seconds(lambda a=a, b=b: np.copyto(b, a)) for _ in range(30))
    return found


def _seconds(do: Any) -> float:
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def _tensors(described: list[dict[str, list[int]]]) -> Tensors:
    return [(kind, shape) for one in described for kind, shape in one.items()]


def operations(kind: str, inputs: list[list[int]], outputs: list[list[int]], attributes: Mapping[str, Any]) -> float:
    """Multiplications and additions of the products in a node of these shapes; 0 where there are none."""
    if len(inputs) < 2 or not outputs or not outputs[0]:
        return 0.0
    size, (a, b) = _count(outputs[0]), (_count(inputs[0]), _count(inputs[1]))
    if KIND.get(kind) == "products":
        batch = _count(outputs[0][:-2]) if len(inputs[1]) > 2 else 1.0
        return 2 * float(np.sqrt(a / batch * b / batch * size / batch)) * batch  # (mk · kn · mn)^½ = mnk
    if kind == "Conv3x3":  # its weights may be turned round
        return 2 * size * inputs[0][1] * 9
    if kind in ("Conv", "FusedConv"):
        return 2 * size * _count(inputs[1][1:])
    if kind == "ConvTranspose":
        return 2 * a * _count(inputs[1][1:])
    if kind == "ConvWeightGrad":
        return 2 * b * _count(outputs[0][1:])
    if KIND.get(kind) == "attention":
        order = np.reshape(attributes["order"], (-1, 4))  # where (batch, head, place, column) are
        q, k, v = (np.array([1] * (4 - len(s)) + s)[o] for s, o in zip(inputs[kind == "AttentionGrad" :], order[:3]))
        products = (3, 2) if kind == "AttentionGrad" else (1, 1)  # as wide as queries, and as values
        return 2 * _count(q[:3]) * float(k[2]) * float(np.dot(products, (q[3], v[3])))
    if kind == "Recurrence":
        rows = max(_count(s[:-1]) for s in inputs if len(s) > 2)  # steps × rows
        steps = np.reshape(
            attributes["steps"], (-1, 10)
        )  # of each the operation, its columns, …, the depth of a product
        products = steps[steps[:, 0] == CODES.index("PRODUCT")]
        return 2 * rows * float(products[:, 1] @ products[:, 9])
    return 0.0


def _count(shape: Any) -> float:
    return float(np.prod(shape))


class _Kept(Options):
    """Options of a session that writes the graph it runs beside its profile: its nodes have attributes."""

    def native(self) -> Any:
        options = super().native()
        options.optimized_model_filepath = f"{self.profile}.onnx"
        return options


def shares(workload: str, rate: float, widths: dict[int, float]) -> dict[str, float]:
    """The share of each kind in the kernel time of a step, and the roofline as a share of that time."""
    step, batches = step_of(workload)
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder) / "step")
        runner = StepRunner(step, options=_Kept(threads=1, profile=profile))
        for batch in batches:
            runner.step(batch)
        events = json.loads(Path(runner.session.end_profiling()).read_text())
        nodes = onnx.load(f"{profile}.onnx").graph.node
    attributes = {n.name: {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in nodes}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    about: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            node = event["name"].removesuffix("_kernel_time"), event["args"]["node_index"]  # some have no name
            seconds[node].append(event["dur"] / 1e6)
            about[node] = event["args"]
    taken: dict[str, float] = defaultdict(float)
    least = 0.0
    for node, durations in seconds.items():
        op = about[node]["op_name"]
        if op in CONTROL_FLOW:
            continue
        taken[op] += float(np.median(durations)) * len(durations)  # the first step takes longer
        inputs, outputs = (_tensors(about[node][f"{end}_type_shape"]) for end in ("input", "output"))
        work = operations(op, [s for _, s in inputs], [s for _, s in outputs], attributes.get(node[0], {}))
        least += len(durations) * max(work / rate, _least_moving(op, inputs, outputs, widths))
    total = sum(taken.values())
    found = dict.fromkeys(KINDS, 0.0) | {"others": 0.0}
    for op, time_taken in taken.items():
        share = time_taken / total
        kind = KIND.get(op, op if share >= NAMED else "others")
        found[kind] = found.get(kind, 0.0) + share
    return found | {"roofline": float(least / total)}


def _least_moving(op: str, inputs: Tensors, outputs: Tensors, widths: dict[int, float]) -> float:
    """The seconds that reading and writing these takes at least; a move reads no more than it writes."""
    read, written = (sum(SIZES.get(t, 4) * _count(s) for t, s in some) for some in (inputs, outputs))
    if op in VIEWS:
        return 0.0
    moved = written + (min(read, written) if KIND.get(op) == "moves" else read)
    return moved / next((width for size, width in widths.items() if size >= moved), widths[max(widths)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the folders of JSON files")
    args = parser.parse_args()
    file = args.results / re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-") / "fractions.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    rate, widths = best_rate(), bandwidths()
    print(f"{rate / 1e9:.0f} GFLOP/s, GB/s of copies: {[round(width / 1e9, 1) for width in widths.values()]}")
    for workload in args.workload or [w for w in WORKLOADS if w != "resnet50"]:
        rate = max(rate, best_rate())
        kept[workload] = shares(workload, rate, widths)
        print(workload, {k: round(v, 2) for k, v in kept[workload].items()}, flush=True)
        file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):  # the BLAS of NumPy takes as many threads as it may use cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    main()
