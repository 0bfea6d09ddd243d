"""Levenberg-Marquardt and L-BFGS against Adam: the time that training takes to a loss.

    python -m benchmarks.second_order [--seconds 10]

The network of examples/pinn.py, whose loss is of its own Laplacian, and a regression of a function of four variables by
a network of 332 weights. Every step sees all points. Adam gets the best of three rates. Wall time of the steps alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad import Trainer, laplacian

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import pinn


def regression() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 4] x) => (float[N, 1] y) {
            h0 = MatMul (x, w0) a0 = Add (h0, b0) t0 = Tanh (a0) h1 = MatMul (t0, w1) a1 = Add (h1, b1) t1 = Tanh (a1)
            y = MatMul (t1, w2)
        }""")
    for name, shape in {"w0": (4, 16), "b0": (16,), "w1": (16, 14), "b1": (14,), "w2": (14, 1)}.items():
        held = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(held, name))
    x = rng.uniform(-1, 1, (1000, 4)).astype(np.float32)
    y = np.sin(3 * x[:, :1] + x[:, 1:2]) * x[:, 2:3] + x[:, 3:] ** 2
    return model, {"x": x, "labels": y}


def physics() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    x = np.random.default_rng(1).uniform(0, 1, (512, 2)).astype(np.float32)
    f = (-2 * np.pi**2 * pinn.solution(x)).astype(np.float32)
    return laplacian(pinn.network(), wrt="x", of="u", batch=0), {"x": x, "labels": f}


def curve(make: Callable[[], Trainer], data: dict[str, np.ndarray], seconds: float) -> list[tuple[float, float]]:
    """The lowest loss so far, at times since the start."""
    trainer, found, best = make(), [], float("inf")
    rows = len(data["x"])
    trainer.fit(data, epochs=1, batch_size=rows)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        losses = [e["loss"] for e in trainer.fit(data, epochs=10, batch_size=rows).epochs]
        best = min(best, *losses)
        found.append((time.perf_counter() - start, best))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    seconds = parser.parse_args().seconds
    for name, (model, data) in {"physics": physics(), "regression": regression()}.items():
        how = {"output": "u_laplacian"} if name == "physics" else {}

        def trainer(optimizer: str, model=model, how=how, **settings) -> Callable[[], Trainer]:
            return lambda: Trainer(model, loss="mse", optimizer=optimizer, **how, **settings)

        adams = [curve(trainer("adam", learning_rate=rate), data, seconds) for rate in (1e-3, 3e-3, 1e-2)]
        adam = min(adams, key=lambda c: c[-1][1])
        goal = adam[-1][1]
        print(f"{name}: Adam, at the best of three rates, is at {goal:.1e} after {adam[-1][0]:.1f} s")
        for optimizer in ("lm", "lbfgs"):
            found = curve(trainer(optimizer), data, seconds)
            reached = next((t for t, loss in found if loss <= goal), None)
            said = "not reached" if reached is None else f"reached after {reached:.2f} s"
            print(f"  {optimizer:6} {said}; at {found[-1][1]:.1e} after {found[-1][0]:.1f} s")


if __name__ == "__main__":
    main()
