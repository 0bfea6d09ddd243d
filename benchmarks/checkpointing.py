"""Memory and time of reverse mode through T steps, for each policy of `checkpointing`.

    python -m benchmarks.checkpointing            # writes docs/checkpointing-loops.md

Each point is a process of its own: the growth of its peak resident memory over the first run, on one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import onnxgrad
from benchmarks.memory import resident

BATCH, WIDTH = 64, 128
HEAD = f'<ir_version: 10, opset_import: ["": 21]> agraph (float[{BATCH},{WIDTH}] s0, float[{WIDTH},{WIDTH}] W,'
STEP = "k = MatMul(a, W) b = Tanh(k)"
STATE = f"float[{BATCH},{WIDTH}]"
MODELS = {
    "loop": f"""{HEAD} int64 n) => (float loss) {{
        s = Loop <body = step (int64 i, bool p, {STATE} a) => (bool q, {STATE} b) {{
            q = Identity(p) {STEP} }}> (n, , s0)
        loss = ReduceSum <keepdims = 0> (s) }}""",
    "while": f"""{HEAD} int64 n) => (float loss) <int64 zero = {{0}}, int64 one = {{1}}> {{
        any = Less(zero, n)
        s, m = Loop <body = step (int64 i, bool p, {STATE} a, int64 c) => (bool q, {STATE} b, int64 d) {{
            {STEP} d = Add(c, one) q = Less(d, n) }}> (, any, s0, zero)
        loss = ReduceSum <keepdims = 0> (s) }}""",
}
KINDS = {"loop": "a Loop that is told its number of steps", "while": "a Loop that ends by its condition"}
STEPS = (100, 1000, 10_000)
POLICIES = {"None": "by default", "1": "`1`", "100": "`100`", "sqrt": '`"sqrt"`'}


def measure(kind: str, steps: int, every: str) -> dict[str, float]:
    """One run in this process: growth of the peak in MiB, seconds, and a number to compare."""
    with onnxgrad.checkpointing(None if every == "None" else int(every) if every.isdecimal() else every):
        derived = onnxgrad.grad(onnx.parser.parse_model(MODELS[kind]), wrt=["W", "s0"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(derived.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {
        "s0": rng.standard_normal((BATCH, WIDTH)).astype(np.float32),
        "W": (rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32),
        "n": np.array(steps),
    }
    session.run(None, feeds | {"n": np.array(3)})
    before = resident()
    start = time.thread_time()
    gradient = session.run(None, feeds)[0]
    seconds = time.thread_time() - start
    return {"mib": (resident() - before) / 2**20, "seconds": seconds, "norm": float(np.linalg.norm(gradient))}


def table(kind: str) -> str:
    """The measurements of one model as Markdown."""
    lines = ["| steps | " + " | ".join(POLICIES.values()) + " |", "|---" * (len(POLICIES) + 1) + "|"]
    for steps in STEPS:
        cells, norms = [], []
        for every in POLICIES:
            command = [sys.executable, "-m", "benchmarks.checkpointing", "--measure", kind, str(steps), every]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            cells.append(f"{found['mib']:.1f} MiB, {found['seconds']:.2f} s")
            norms.append(found["norm"])
        assert max(norms) <= min(norms) * 1.001, norms  # every policy gives the same gradient
        lines.append(f"| {steps:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure one point, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "STEPS", "EVERY"))
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/checkpointing-loops.md"))
    arguments = parser.parse_args()
    if arguments.measure:
        kind, steps, every = arguments.measure
        print(json.dumps(measure(kind, int(steps), every)))
        return
    state = BATCH * WIDTH * 4 / 2**20
    parts = [
        "# Memory of loops, measured",
        "",
        "Written by `python -m benchmarks.checkpointing`. Reverse mode through s ↦ tanh(s·W), with respect to W and "
        f"the first state of {BATCH} × {WIDTH} numbers ({state:.3f} MiB): growth of the peak resident memory of a "
        f"process in its run, and CPU time, on one thread of ONNX Runtime {onnxruntime.__version__}. "
        "[Checkpointing](checkpointing.md) says what the policies are.",
    ]
    for kind, title in KINDS.items():
        parts += ["", f"## {title[0].upper()}{title[1:]}", "", table(kind)]
    parts[2] = textwrap.fill(parts[2], 120, break_long_words=False, break_on_hyphens=False)
    arguments.output.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
