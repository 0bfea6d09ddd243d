"""``python -m tests.runtime.kernels.foreign``: kernels of another architecture, under an emulator.

ONNX Runtime does not run under qemu-user, kernels do: `driver.c` stands for it. Calls of kernels are recorded on this
machine while steps of random networks run in ONNX Runtime, and are run again by the kernels as GCC compiles them for
AArch64. Results may differ by rounding. Needs the Debian packages qemu-user and gcc-aarch64-linux-gnu; without them
nothing is run.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from tools import build_kernels

from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels.substitute import DOMAIN
from onnxgrad.runtime.passes import OPTIMIZATION
from onnxgrad.training import attach, compile_step
from onnxgrad.training.step.step import Step
from tests.fuzz.random_graphs import Unfit
from tests.fuzz.training import case
from tests.runtime.passes import passed

DRIVER = Path(__file__).with_name("driver.c")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
#: Differences as a share of the largest number of a tensor; those of float64.
TOLERANCE, OF_DOUBLES = 2e-5, 1e-13
Arrays = Mapping[str, np.ndarray]


def step_of(seed: int) -> tuple[Step, dict[str, np.ndarray]]:
    """The step of a random network, and what it is fed: a batch, its state and its rates. Raises Unfit."""
    drawn = case(seed)
    step = compile_step(attach(drawn.model, **drawn.settings))
    rows = {n: a[: drawn.rows] for n, a in drawn.data.items()}
    state = {t.input: t.initial.numpy() for t in step.state.values()}
    rates = {n: t.numpy() for n, t in step.rates.items()}
    names = {v.name for v in step.model.graph.inputs}
    return step, {n: a for n, a in {**rows, **state, **rates}.items() if n in names}


#: A network whose step calls kernels that few random networks are large enough for.
PICTURES = """<ir_version: 10, opset_import: ["": 21]> m (float[N, 32, 16, 16] x) => (float[N, 10] y)
    <int64[2] flat = {0, -1}> {
    c = Conv <pads = [1, 1, 1, 1]> (x, W1)
    n, mean, variance = BatchNormalization <training_mode = 1> (c, s1, b1, m1, v1)
    r = Relu (n)
    d = Conv <pads = [1, 1, 1, 1], strides = [2, 2], group = 32> (r, W2)
    g = GroupNormalization <num_groups = 4> (d, s1, b1)
    o = Relu (g)
    e = Conv (o, W3)
    i = InstanceNormalization (e, s1, b1)
    q = Relu (i)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (q)
    f = Reshape (p, flat)
    h = Gemm (f, W4, b4)
    a = Relu (h)
    l = LayerNormalization (a, s4, b4)
    y = Gemm (l, W5)
}"""
SHAPES = {"W1": (32, 32, 3, 3), "W2": (32, 1, 3, 3), "W3": (32, 32, 1, 1), "W4": (512, 96), "W5": (96, 10)}
SHAPES |= dict.fromkeys(("s1", "b1", "m1", "v1"), (32,)) | {"s4": (96,), "b4": (96,)}


def pictures() -> tuple[Step, dict[str, np.ndarray]]:
    """The step of a convolutional network, and what it is fed."""
    rng = np.random.default_rng(0)
    text = PICTURES.replace("<int64", "<" + ", ".join(f"float{list(s)} {n}" for n, s in SHAPES.items()) + ", int64")
    model = onnx.parser.parse_model(text)
    made = {n: rng.standard_normal(s) / np.sqrt(max(1, np.prod(s[1:]))) for n, s in SHAPES.items()}
    made |= {n: np.ones(SHAPES[n]) for n in ("s1", "s4", "v1")}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in made.items())
    step = compile_step(attach(model, loss="cross_entropy", optimizer="adamw"))
    state = {t.input: t.initial.numpy() for t in step.state.values()} | {n: t.numpy() for n, t in step.rates.items()}
    return step, {"x": rng.standard_normal((48, 32, 16, 16), np.float32), "labels": rng.integers(0, 10, 48), **state}


def doubles() -> tuple[ir.Model, dict[str, np.ndarray]]:
    """Functions of float64 and their sums."""
    names = "Sin Cos Tan Atan Sinh Exp Log Tanh Erf Sigmoid Softplus Sqrt Abs Floor Sign".split()  # noqa: SIM905
    text = " ".join(
        f"a{i} = {name} (x) b{i} = Mul (a{i}, r) s{i} = ReduceSum (b{i}, axes)" for i, name in enumerate(names)
    )
    ends = ", ".join(f"double[M, N] a{i}, double[K, N] s{i}" for i in range(len(names)))
    head = '<ir_version: 10, opset_import: ["": 21]> m (double[M, N] x, double[N] r)'
    model = onnx.parser.parse_model(f"{head} => ({ends}) <int64[1] axes = {{0}}> {{ {text} }}")
    rng = np.random.default_rng(0)
    return ir.from_proto(model), {"x": rng.uniform(0, 20, (300, 101)), "r": rng.standard_normal(101)}


def models(seeds: Iterable[int]) -> Iterator[tuple[ir.Model, dict[str, np.ndarray]]]:
    """All models whose calls are recorded."""
    yield doubles()
    step, feeds = pictures()
    yield step.model, feeds
    for seed in seeds:
        with suppress(Unfit):
            step, feeds = step_of(seed)
            yield step.model, feeds


def calls(model: ir.Model, feeds: Arrays) -> Iterator[tuple[ir.Node, list, list]]:
    """Each call of a kernel in the main graph of `model`, with its operands and results as arrays."""
    model = passed([p.name for p in OPTIMIZATION if p.phase != "memory"], model)
    graph, nodes = model.graph, [n for n in model.graph if n.domain == DOMAIN]
    for node in nodes:
        for i, value in enumerate(node.inputs):
            if value is not None:  # a kernel may overwrite its operand: it gets a copy, and the original is read
                copy = ir.node("Identity", [value])
                graph.insert_before(node, copy)
                node.replace_input_with(i, copy.outputs[0])
                copy.outputs[0].name = f"{node.outputs[0].name}/{i}"
    ends = [v for n in nodes for v in (*(c.producer().inputs[0] for c in n.inputs if c is not None), *n.outputs)]
    read = {v.name: v for v in ends if v.name}
    own = {v.name for v in graph.inputs} | set(graph.initializers)
    graph.outputs.clear()
    graph.outputs.extend(v for name, v in read.items() if name not in own)
    for value in graph.outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    options = Options(threads=1, target="native", level="none").native()
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    names = [v.name for v in graph.outputs]
    fed = {v.name for v in session.get_inputs()}
    found = dict(zip(names, session.run(names, {n: a for n, a in feeds.items() if n in fed}), strict=True))
    found |= dict(feeds) | {
        n: v.const_value.numpy() for n, v in graph.initializers.items() if v.const_value is not None
    }
    for node in nodes:
        operands = [None if v is None else found[v.producer().inputs[0].name] for v in node.inputs]
        yield node, operands, [found[v.name] if v.name else None for v in node.outputs]


def _number(*values: int) -> bytes:
    return struct.pack(f"{len(values)}q", *values)


def _text(name: str) -> bytes:
    return _number(len(name.encode())) + name.encode()


def _tensor(array: np.ndarray | None) -> bytes:
    if array is None:
        return _number(0)
    kind = ir.DataType.from_numpy(array.dtype)
    return _number(int(kind), array.ndim, *array.shape) + np.ascontiguousarray(array).tobytes()


def record(node: ir.Node, operands: list, results: list) -> bytes:
    """A call as the driver reads it."""
    said = _text(node.op_type) + _number(len(node.attributes))
    for name, attribute in node.attributes.items():
        said += _text(name)
        if attribute.type == ir.AttributeType.FLOAT:
            said += _number(ord("f")) + struct.pack("f", attribute.as_float())
        else:
            numbers = attribute.as_ints() if attribute.type == ir.AttributeType.INTS else [attribute.as_int()]
            said += _number(ord("i"), len(numbers), *numbers)
    for arrays in (operands, results):
        said += _number(len(arrays)) + b"".join(map(_tensor, arrays))
    return said


def compile_driver(place: Path, compiler: str, flags: Iterable[str] = ()) -> None:
    """Build the kernels and the driver as one program. Raises CalledProcessError."""
    sources = [*sorted(build_kernels.SOURCES.glob("*.c")), DRIVER]
    kernels = [f for f in build_kernels.FLAGS if f not in ("-shared", "-fPIC")]
    words = [compiler, *kernels, "-ffp-contract=fast", *flags, "-static", f"-I{build_kernels.SOURCES}"]
    subprocess.run([*words, *map(str, sources), "-lm", "-o", str(place)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="kernels of AArch64 under an emulator")
    parser.add_argument("--count", type=int, default=60, help="random networks whose calls of kernels are run")
    parser.add_argument("--seed", type=int, default=0, help="the first network")
    parser.add_argument("--here", action="store_true", help="compile for this machine, and run without an emulator")
    asked = parser.parse_args()
    compiler, emulator = ("gcc", []) if asked.here else (COMPILER, [EMULATOR])
    if missing := [p for p in (compiler, *emulator) if shutil.which(p) is None]:
        print(f"skipped: no {missing[0]} (Debian: qemu-user, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place, ran = Path(folder), Counter[str]()
        compile_driver(place / "driver", compiler)
        with (place / "calls").open("wb") as file:
            for model, feeds in models(range(asked.seed, asked.seed + asked.count)):
                for call in calls(model, feeds):
                    file.write(record(*call))
                    ran[call[0].op_type] += 1
        done = subprocess.run([*emulator, place / "driver", place / "calls"], capture_output=True, text=True)
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    within = {"ElementwiseDouble": OF_DOUBLES}
    wrong = [line for line in lines if len(line) > 2 or not float(line[1]) <= within.get(line[0], TOLERANCE)]
    print(f"{len(lines)} calls of {len(ran)} kernels: {', '.join(f'{n} {c}' for n, c in ran.most_common())}")
    print(f"{len(wrong)} differ by more than {TOLERANCE:g}; the program ended with {done.returncode}")
    for line in wrong[:20]:
        print("  ", *line)
    return 0 if not wrong and done.returncode == 0 and len(lines) == ran.total() > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
