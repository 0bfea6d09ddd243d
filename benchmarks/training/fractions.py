"""The time of a step by kinds of operators, against the roofline of the machine.

``python -m benchmarks.training.fractions [--workload NAME …]`` runs steps of every workload on one thread and keeps the
shares as ``fractions.json`` beside the other results. The roofline of a step is the sum over its nodes of what each
takes at least, whichever is the most (Williams, Waterman, Patterson, "Roofline", 2009; Ilic, Pratas, Sousa,
"Cache-aware roofline model", 2014):

- its products, at the best rate of ONNX Runtime's (MLAS) here. A convolution counts the multiplications of its
  definition, of which the kernel for windows of 3 × 3 makes fewer (Winograd). The cotangents of attention count the
  scores twice, as they are not kept;
- its elementwise steps, each of which is an instruction of a vector, at half that rate: a multiply-add counts as two
  operations. An exponential, a logarithm, an error function, … counts as an Exp of ONNX Runtime. Quotients and square
  roots, of which a processor finishes few at a time, count as NumPy's in the cache; a sigmoid and a hyperbolic tangent
  are an exponential and a quotient;
- the bytes that it reads and writes, at the bandwidth of a copy of as many.

That is divided by the time of a step without the profiler, which adds some microseconds to each node. These are also
taken off the nodes, alike, before their shares are told. Operators inside of control flow count by themselves.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.rewrites import step_of
from benchmarks.training.__main__ import RESULTS, WORKLOADS, processor
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels.programs import CODES
from onnxgrad.runtime.kernels.programs import KINDS as KINDS_OF_VALUES

KINDS = {
    "products": "MatMul Gemm FusedMatMul FusedGemm TransposeMatMul Einsum Product",
    "convolutions": "Conv FusedConv Conv3x3 Depthwise ConvTranspose ConvWeightGrad",
    "attention": "Attention AttentionGrad",
    "recurrences": "Recurrence LSTM GRU RNN",
    "normalization": "BatchNorm BatchNormGrad GroupNorm GroupNormGrad LayerNormalization LayerNormGrad"
    " SimplifiedLayerNormalization BatchNormalization InstanceNormalization",
    "softmax": "Softmax LogSoftmax SoftmaxCrossEntropy",
    "elementwise": "Elementwise Add Sub Mul Div Neg Abs Sqrt Exp Log Erf Tanh Sigmoid Softplus Relu Pow Where"
    " Greater GreaterOrEqual Less LessOrEqual Equal And Or Not Cast Max Min Sum Reciprocal Sign Sin Cos Gelu BiasGelu"
    " Elu Selu LeakyRelu HardSigmoid HardSwish QuickGelu Clip Softsign Mish PRelu IsNaN Floor Ceil Round",
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


@dataclass(frozen=True)
class Machine:
    """What this machine does on one thread.

    Attributes:
        rate: operations of products per second.
        function: seconds for a number of an Exp.
        quotient: seconds for one of a division.
        root: seconds for one of a square root.
        bandwidths: as of `bandwidths`.
    """

    rate: float
    function: float
    quotient: float
    root: float
    bandwidths: dict[int, float]


def measured_machine() -> Machine:
    """The best of several runs of products of 512 and of 1024 rows, of functions in the cache, and of copies."""
    sides = (512, 1024)
    products = [_operator("MatMul", *[np.ones((side, side), np.float32)] * 2) for side in sides]
    rates = [2 * side**3 / min(_seconds(run) for _ in range(20)) for side, run in zip(sides, products)]
    function = _operator("Exp", np.ones(1 << 18, np.float32))
    x = np.ones(1 << 18, np.float32)
    each = [function, lambda: np.divide(x, x, out=x), lambda: np.sqrt(x, out=x)]
    return Machine(max(rates), *(min(_seconds(run) for _ in range(20)) / (1 << 18) for run in each), bandwidths())


def _operator(op_type: str, *operands: np.ndarray) -> Callable[[], Any]:
    """A run of one operator by ONNX Runtime on one thread, with its memory bound."""
    tensor = onnx.helper.make_tensor_value_info
    ends = [tensor(f"x{i}", onnx.TensorProto.FLOAT, a.shape) for i, a in enumerate(operands)]
    result = tensor("y", onnx.TensorProto.FLOAT, operands[0].shape)
    node = onnx.helper.make_node(op_type, [x.name for x in ends], ["y"])
    opset = onnx.helper.make_opsetid("", 20)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", ends, [result]), opset_imports=[opset])
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    for x, array in zip(ends, operands):
        bound.bind_cpu_input(x.name, array)
    bound.bind_ortvalue_output("y", onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(operands[0])))
    return lambda: session.run_with_iobinding(bound)


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
    if KIND.get(kind) == "optimizer":
        return 2 * _count(outputs[0]) * inputs[-2][0] if _are_factors(outputs[0], inputs[-2:]) else 0.0
    size, (a, b) = _count(outputs[0]), (_count(inputs[0]), _count(inputs[1]))
    if KIND.get(kind) == "products":
        is_batch = min(len(inputs[1]), len(outputs[0])) > 2
        three = inputs[0], inputs[1], outputs[0]
        batches = [_count(s[:-2]) if is_batch else 1.0 for s in three]  # an operand may be that of all
        return 2 * float(np.sqrt(a * b * size / np.prod(batches))) * batches[2]  # (mk · kn · mn)^½ = mnk
    if kind == "Conv3x3":  # its weights may be turned round
        return 2 * size * inputs[0][1] * 9
    if kind in ("Conv", "FusedConv") or (kind == "Depthwise" and not attributes.get("turned")):
        return 2 * size * _count(inputs[1][1:])
    if kind == "ConvTranspose" or (kind == "Depthwise" and attributes.get("turned")):
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


#: Operations by how often they are a function such as an exponential, a quotient, a square root, and another one.
STEPS = {
    **dict.fromkeys(("EXP", "LOG", "POW", "SIN", "COS", "TAN", "ASIN", "ACOS", "ATAN"), (1, 0, 0, 0)),
    **dict.fromkeys(("SINH", "COSH", "ASINH", "ACOSH", "ATANH", "ERF", "SOFTPLUS"), (1, 0, 0, 0)),
    **dict.fromkeys(("SIGMOID", "TANH"), (1, 1, 0, 0)),
    "DIV": (0, 1, 0, 0), "SQRT": (0, 0, 1, 0),
}  # fmt: skip
OTHER = (0, 0, 0, 1)
#: The same of operators, by numbers of the result, or of the scores.
ARITHMETIC = {
    **{name.title(): counts for name, counts in STEPS.items()},
    "Gelu": (1, 0, 0, 5), "BiasGelu": (1, 0, 0, 6), "QuickGelu": (1, 1, 0, 1), "Mish": (2, 1, 0, 1),
    "Elu": (1, 0, 0, 3), "Selu": (1, 0, 0, 4), "Reciprocal": (0, 1, 0, 0), "Softsign": (0, 1, 0, 2),
    "Softmax": (1, 0, 0, 3), "LogSoftmax": (1, 0, 0, 3), "SoftmaxCrossEntropy": (1, 0, 0, 4),
    "Adam": (0, 1, 1, 10), "NAdam": (0, 1, 1, 12), "Adagrad": (0, 1, 1, 4), "Momentum": (0, 0, 0, 4),
    "Sgd": (0, 0, 0, 2),
}  # fmt: skip


def arithmetic(
    op: str, inputs: list[list[int]], outputs: list[list[int]], attributes: Mapping[str, Any]
) -> tuple[float, ...]:
    """How often a node computes functions such as an exponential, quotients, square roots, and other operations."""
    if op in ("Elementwise", "ElementwiseDouble"):
        steps = list(_steps_of(inputs, attributes))
    elif op == "Recurrence":
        rows = max(_count(s[:-1]) for s in inputs if len(s) > 2)
        program = np.reshape(attributes["steps"], (-1, 10))
        steps = [(CODES[step[0]], rows * step[1]) for step in program if CODES[step[0]] != "PRODUCT"]
    elif op in ("Attention", "AttentionGrad"):
        pairs = operations("Attention", inputs[op == "AttentionGrad" :], outputs, attributes)
        columns = [[1] * (4 - len(s)) + s for s in inputs[op == "AttentionGrad" :][:3]]
        order = np.reshape(attributes["order"], (-1, 4))
        return pairs / 2 / (np.array(columns[0])[order[0]][3] + np.array(columns[2])[order[2]][3]), 0.0, 0.0, 0.0
    else:
        is_one = KIND.get(op) in ("elementwise", "normalization", "sums, pooling")
        counts = ARITHMETIC.get(op, OTHER if is_one else (0, 0, 0, 0))
        numbers = max(map(_count, (*outputs, *inputs)), default=0.0)
        return tuple(n * numbers for n in counts)
    return tuple(sum(n * STEPS.get(code, OTHER)[k] for code, n in steps) for k in range(4))


def _steps_of(inputs: list[list[int]], attributes: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The operations of a program of elements, and of how many numbers each is."""
    values = np.reshape(attributes["values"], (-1, 4)).tolist()
    fixed, whole = KINDS_OF_VALUES.index("FIXED"), list(np.broadcast_shapes(*map(tuple, inputs)))
    places = sorted({place for kind, _, place, _ in values if kind == fixed})  # those left out have no shape
    shapes: dict[int, Any] = {}
    for i, (kind, _, place, _) in enumerate(values):
        if kind == fixed:
            shapes[i] = tuple(inputs[places.index(place)]) if len(places) == len(inputs) else tuple(whole)
    for code, _, to, *operands in np.reshape(attributes["steps"], (-1, 10))[:, :6].tolist():
        read = operands[:1] if CODES[code] in ("SUM", "MEAN", "COPY") else [i for i in operands if i >= 0]
        shapes[to] = np.broadcast_shapes(*(shapes.get(i, ()) for i in read))
        if CODES[code] != "COPY":
            yield CODES[code], _count(shapes[to])


def _count(shape: Any) -> float:
    return float(np.prod(shape))


class _Kept(Options):
    """Options of a session that writes the graph it runs beside its profile: its nodes have attributes."""

    def native(self) -> Any:
        options = super().native()
        options.optimized_model_filepath = f"{self.profile}.onnx"
        return options


def shares(workload: str, machine: Machine) -> dict[str, float]:
    """The share of each kind in the kernel time of a step, and the roofline as a share of the time of a step."""
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
    seconds = {node: taken for node, taken in seconds.items() if about[node]["op_name"] not in CONTROL_FLOW}
    each = {node: float(np.median(taken)) * len(taken) / len(batches) for node, taken in seconds.items()}
    whole = seconds_of_step(StepRunner(step, options=Options(threads=1)), batches)
    calls = {node: len(taken) / len(batches) for node, taken in seconds.items()}
    added = max(0.0, sum(each.values()) - whole) / sum(calls.values())  # by the profiler
    taken: dict[str, float] = defaultdict(float)
    least = 0.0
    for node, duration in each.items():
        op = about[node]["op_name"]
        taken[op] += max(0.0, duration - added * calls[node])
        inputs, outputs = (_tensors(about[node][f"{end}_type_shape"]) for end in ("input", "output"))
        least += calls[node] * least_time(op, inputs, outputs, attributes.get(node[0], {}), machine)
    total = sum(taken.values())
    found = dict.fromkeys(KINDS, 0.0) | {"others": 0.0}
    for op, time_taken in taken.items():
        share = time_taken / total
        kind = KIND.get(op, op if share >= NAMED else "others")
        found[kind] = found.get(kind, 0.0) + share
    return found | {"roofline": float(least / whole)}


def seconds_of_step(runner: StepRunner, batches: list[dict[str, np.ndarray]]) -> float:
    """The median CPU time of a step, of several rounds the quickest."""
    rounds = []
    for _ in range(8):
        taken = []
        for batch in batches:
            begin = time.thread_time()
            runner.step(batch)
            taken.append(time.thread_time() - begin)
        rounds.append(float(np.median(taken)))
    return min(rounds)


def least_time(op: str, inputs: Tensors, outputs: Tensors, attributes: Mapping[str, Any], machine: Machine) -> float:
    """The seconds that a node takes at least."""
    if op in VIEWS:
        return 0.0
    if KIND.get(op) == "optimizer":
        inputs = _read_by_optimizer(inputs, outputs)
    shapes = [s for _, s in inputs], [s for _, s in outputs]
    computing = operations(op, *shapes, attributes) / machine.rate
    each = machine.function, machine.quotient, machine.root, 2 / machine.rate
    steps = sum(n * seconds for n, seconds in zip(arithmetic(op, *shapes, attributes), each))
    return max(computing, steps, _least_moving(op, inputs, outputs, machine.bandwidths))


def _read_by_optimizer(inputs: Tensors, outputs: Tensors) -> Tensors:
    """The operands up to the constants, picked rows and factors of the gradient: others are only waited for."""
    constants = next(i for i, (_, s) in enumerate(inputs) if i > len(outputs) and len(s) == 1)
    more = inputs[constants + 1 :]
    picked = [t for t in more[:1] if t[0] == "int64"]
    factors = more[:2] if _are_factors(outputs[0][1], [s for _, s in more[:2]]) else []
    return [*inputs[: constants + 1], *picked, *factors]


def _are_factors(x: list[int], pair: list[list[int]]) -> bool:
    """True for A and B whose product AᵀB has the shape of `x`."""
    return [len(s) for s in pair] == [2, 2] and pair[0][0] == pair[1][0] and [pair[0][1], pair[1][1]] == x


def _least_moving(op: str, inputs: Tensors, outputs: Tensors, widths: dict[int, float]) -> float:
    """The seconds that reading and writing these takes at least; a move reads no more than it writes."""
    sizes = [[SIZES.get(t, 4) * _count(s) for t, s in some] for some in (inputs, outputs)]
    if op == "GatherGrad":  # of a tensor of the same shape, rows, and their places
        rows, *index = sizes[0][1:]
        if len(inputs) > 3:  # rows that are gathered
            rows = min(rows, _count(inputs[-1][1]) * rows / max(1, inputs[1][1][0]))
        moved = rows + sum(index) + sum(sizes[1])
    else:
        read, written = map(sum, sizes)
        is_sum = op.startswith("Scatter")
        moved = written + (min(read, written) if KIND.get(op) == "moves" and not is_sum else read)
    return moved / next((width for size, width in widths.items() if size >= moved), widths[max(widths)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the folders of JSON files")
    args = parser.parse_args()
    file = args.results / re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-") / "fractions.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    machine = measured_machine()
    copies = [round(width / 1e9, 1) for width in machine.bandwidths.values()]
    print(f"{machine.rate / 1e9:.0f} GFLOP/s, {machine.function * 1e9:.3f} ns for an Exp, GB/s of copies: {copies}")
    for workload in args.workload or [w for w in WORKLOADS if w != "resnet50"]:
        kept[workload] = shares(workload, machine)
        print(workload, {k: round(v, 2) for k, v in kept[workload].items()}, flush=True)
        file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
