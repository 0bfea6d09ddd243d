"""The time that kernels of target "native" save in a training step and in an optimizer alone.

    python -m benchmarks.kernels [--rounds 40]     # measures
    python -m benchmarks.kernels --page            # and writes the tables of docs/internals/kernels-measured.md
    python -m benchmarks.kernels --worth MaxPoolGrad attention --workload cnn transformer

The last form measures steps without the kernels of some named parts, or without a pass, over the same with all: the
least CPU times of all turns. ``ONNXGRAD_LIBRARY`` names the library of another instruction set.

The ratio is CPU time on one thread with kernels over that without: sessions of both kinds in one process, which take
turns; the median of the ratios of all turns, and between what the middle half of them lies. CPU time of one thread
hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from benchmarks.pages import write_table
from benchmarks.rewrites import WORKLOADS, seconds_of, seconds_of_each, step_of
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.kernels import substitute
from onnxgrad.runtime.kernels.substitute import kernels
from onnxgrad.training import attach, compile_step
from onnxgrad.training.step.compile import Step

PAGE = Path(__file__).parent.parent / "docs" / "internals" / "kernels-measured.md"
SIDE = 1000
OPTIMIZERS = {
    "Adam": ("adam", {}),
    "Momentum": ("momentum", {}),
    "Momentum, nesterov, with decay": ("nesterov", {"weight_decay": 0.01}),
    "Adagrad": ("adagrad", {}),
}


def optimizer_alone(name: str, settings: dict[str, float]) -> tuple[Step, list[dict[str, np.ndarray]]]:
    """A step that is little but the update of a tensor of a million: y = x·w of one row."""
    rng = np.random.default_rng(0)
    w = numpy_helper.from_array(rng.standard_normal((SIDE, SIDE)).astype(np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, SIDE])], [w],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    step = compile_step(attach(model, loss="mse", optimizer=name, learning_rate=1e-6, **settings))
    label = next(n for n in step.batch if n != "x")
    x = rng.standard_normal((1, SIDE)).astype(np.float32) * 1e-3
    return step, [{"x": x, label: np.zeros((1, SIDE), np.float32)}]


def measure(step: Step, batches: Sequence[dict[str, np.ndarray]], rounds: int) -> np.ndarray:
    """Seconds of a step, [turn, (operators, kernels)]."""
    runners = [StepRunner(step, options=Options(threads=1, target=target)) for target in ("portable", "native")]
    found = []
    for turn in range(-2, rounds):
        order = (0, 1) if turn % 2 else (1, 0)
        taken = {i: seconds_of(runners[i], list(batches)) for i in order}
        if turn >= 0:
            found.append([taken[0], taken[1]])
    return np.array(found)


def worth(workload: str, names: Sequence[str], rounds: int) -> dict[str, float]:
    """The least time of a step without each of `names`, kernels of named parts or passes, over that with all."""
    step, batches = step_of(workload)
    known = dict(kernels())
    runners = {}
    for name in ("", *names):
        without = (name,) if name and name not in known else ()
        with patch.dict(substitute._KERNELS):
            substitute._KERNELS.pop(name, None)
            runners[name] = StepRunner(step, options=Options(threads=1, target="native", without=without))
    least = dict.fromkeys(runners, np.inf)
    for turn in range(rounds):
        for name in list(runners)[:: 1 if turn % 2 else -1]:
            least[name] = min(least[name], *seconds_of_each(runners[name], list(batches)))
    return {name: least[name] / least[""] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--page", action="store_true", help="write the tables of docs/internals/kernels-measured.md")
    parser.add_argument("--worth", nargs="+", metavar="NAME", help="kernels of named parts, and passes")
    parser.add_argument("--workload", nargs="+", default=WORKLOADS)
    given = parser.parse_args()
    for workload in given.workload if given.worth else ():
        print(workload, {n: f"{w:.3f}" for n, w in worth(workload, given.worth, given.rounds).items()}, flush=True)
    if given.worth:
        return
    steps = ["| model | native / portable | quartiles |", "|---|---|---|"]
    for workload in WORKLOADS:
        low, mid, high = _quartiles(measure(*step_of(workload), given.rounds))
        steps.append(f"| {workload} | {mid:.2f} | {low:.2f}–{high:.2f} |")
        print(steps[-1], flush=True)
    alone = ["| step of | operators, ms | kernels, ms | ratio | quartiles |", "|---|---|---|---|---|"]
    for title, (name, settings) in OPTIMIZERS.items():
        found = measure(*optimizer_alone(name, settings), given.rounds)
        low, mid, high = _quartiles(found)
        operators, kernels = 1e3 * np.median(found, axis=0)
        alone.append(f"| {title} | {operators:.1f} | {kernels:.1f} | {mid:.2f} | {low:.2f}–{high:.2f} |")
        print(alone[-1], flush=True)
    if given.page:
        write_table(PAGE, "steps", "\n".join(steps))
        write_table(PAGE, "optimizers", "\n".join(alone))


def _quartiles(found: np.ndarray) -> Sequence[float]:
    return [float(q) for q in np.quantile(found[:, 1] / found[:, 0], (0.25, 0.5, 0.75))]


if __name__ == "__main__":
    main()
