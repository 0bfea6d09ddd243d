"""The cost of denormal moments in a step of Adam on an embedding with two touched rows, and the gain of flushing.

    python -m benchmarks.denormals

CPU time on one thread, sessions taking turns, as a ratio to a step whose moments are zeros. By processor:
Intel's take ten times as long and more, AMD's 1.2 to 1.5 times.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad.runtime import Options, StepRunner
from onnxgrad.training import attach, compile_step

ROWS, WIDTH, ROUNDS = 200_000, 32, 15
DENORMAL = 6e-45  # where moments that decay by 0.9 end


def machine(target: str, start: float, denormals: bool) -> StepRunner:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        lookup (int64[N] ids) => (float[N, {WIDTH}] y) {{ y = Gather (table, ids) }}"""
    model = onnx.parser.parse_model(text)
    table = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    step = compile_step(attach(model, loss="mse", labels="labels", optimizer="adam"))
    found = StepRunner(step, options=Options(threads=1, target=target, denormals=denormals))
    state = found.state()
    moments = [n for n, a in state.items() if a.shape == table.shape and n != "table"]
    found.load_state(state | {n: np.full_like(table, start) for n in moments})
    return found


def main() -> None:
    batch = {"ids": np.array([0, 1]), "labels": np.ones((2, WIDTH), np.float32)}
    for target in ("portable", "native"):
        cases = {"zeros": (0.0, False), "denormal, flushed": (DENORMAL, False), "denormal, kept": (DENORMAL, True)}
        machines = {name: machine(target, *case) for name, case in cases.items()}
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(ROUNDS):
            for name, one in machines.items():
                begin = time.process_time()
                one.step(batch)
                seconds[name].append(time.process_time() - begin)
        for name, taken in seconds.items():
            ratios = [a / b for a, b in zip(taken, seconds["zeros"])]
            print(f"{target:9} {name:18} {median(taken) * 1e3:7.1f} ms  {median(ratios):5.2f}")


if __name__ == "__main__":
    main()
