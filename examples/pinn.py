"""Solve a partial differential equation with a network that is trained on its own derivatives.

    pip install onnxgrad[train]
    python examples/pinn.py [epochs]

Poisson's equation Δu = f on the unit square, u = 0 on its border. The network gives u(x, y) = x(1-x)·y(1-y)·N(x, y),
which is 0 on the border. `laplacian` adds Δu to the graph; the loss is the mean square of Δu - f, and the gradient of
that is taken by the weights, through the Laplacian. All of it is ONNX: the trained file gives u and Δu.
"""

import sys

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad import Function, Trainer, laplacian

WIDTH = 24


def network(seed: int = 0) -> onnx.ModelProto:
    """u at the rows of x."""
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        pinn (float[N, 2] x) => (float[N, 1] u) <float one = {1}, int64[1] last = {1}> {
            h0 = MatMul (x, w0)
            a0 = Add (h0, b0)
            t0 = Tanh (a0)
            h1 = MatMul (t0, w1)
            a1 = Add (h1, b1)
            t1 = Tanh (a1)
            n = MatMul (t1, w2)
            rest = Sub (one, x)
            inside = Mul (x, rest)
            bx, by = Split <axis = 1, num_outputs = 2> (inside)
            bubble = Mul (bx, by)
            u = Mul (bubble, n)
        }""")
    shapes = {"w0": (2, WIDTH), "b0": (WIDTH,), "w1": (WIDTH, WIDTH), "b1": (WIDTH,), "w2": (WIDTH, 1)}
    for name, shape in shapes.items():
        scale = 1 / np.sqrt(shape[0]) if len(shape) == 2 else 0.5
        held = (scale * rng.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(held, name))
    return model


def solution(x: np.ndarray) -> np.ndarray:
    """u = sin(πx)·sin(πy), for f = -2π²u."""
    return np.sin(np.pi * x).prod(axis=1, keepdims=True)


def train(epochs: int, points: int = 512, **settings) -> Trainer:
    """A trainer that has gone through all points so many times."""
    x = np.random.default_rng(1).uniform(0, 1, (points, 2)).astype(np.float32)
    f = (-2 * np.pi**2 * solution(x)).astype(np.float32)
    model = laplacian(network(), wrt="x", of="u", batch=0)
    trainer = Trainer(model, loss="mse", output="u_laplacian", **settings)
    trainer.fit({"x": x, "labels": f}, epochs=epochs, batch_size=points)
    return trainer


def main(epochs: int | str = 1000) -> float:
    """The largest error of the solution on a grid."""
    trainer = train(int(epochs), optimizer="adam", learning_rate=5e-3)
    side = np.linspace(0, 1, 41)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2).astype(np.float32)
    u = Function(trainer.inference_model(), outputs="u")(grid)
    error = float(abs(u - solution(grid)).max())
    print(f"largest error of u after {epochs} steps: {error:.4f}")
    return error


if __name__ == "__main__":
    main(*sys.argv[1:])
