"""Solve a partial differential equation by Newton's method, with its sparse Jacobian.

    pip install onnxgrad[scipy]
    python examples/sparse_newton.py [points]

Bratu's problem: Δu + 5·exp(u) = 0 on the unit square, u = 0 on its border. The residual on a grid is an ONNX graph; its
Jacobian has five entries in a row, which are found from the graph and take a few directions, whatever the grid.
"""

import sys

import numpy as np
import onnx
from scipy.sparse.linalg import spsolve

from onnxgrad import Function

RESIDUAL = """<ir_version: 10, opset_import: ["": 21]>
bratu (double[N, N] u, double hh) => (double[N, N] r)
    <int64[4] ring = {1, 1, 1, 1}, int64[1] x = {0}, int64[1] y = {1}, int64[1] o = {0}, int64[1] one = {1},
     int64[1] two = {2}, int64[1] m1 = {-1}, int64[1] m2 = {-2}, int64[1] end = {1000000},
     double four = {4}, double rate = {5}> {
    wide = Pad (u, ring)
    rows = Slice (wide, one, m1, x)
    columns = Slice (wide, one, m1, y)
    north = Slice (columns, o, m2, x)
    south = Slice (columns, two, end, x)
    west = Slice (rows, o, m2, y)
    east = Slice (rows, two, end, y)
    around = Sum (north, south, west, east)
    here = Mul (four, u)
    laplacian = Sub (around, here)
    heat = Exp (u)
    source = Mul (rate, heat)
    scaled = Mul (hh, source)
    r = Add (laplacian, scaled)
}"""


def main(points: int | str = 100) -> tuple[np.ndarray, list[float]]:
    """The solution, and the largest residual before each step and after the last."""
    n = int(points)
    residual = Function(onnx.parser.parse_model(RESIDUAL))
    jacobian = residual.sparse_jacobian(wrt="u")
    u, hh, sizes = np.zeros((n, n)), 1 / (n + 1) ** 2, []
    for _ in range(20):
        r = residual(u, hh)
        sizes.append(float(abs(r).max()))
        if sizes[-1] < 1e-14:
            break
        matrix = jacobian(u, hh)
        u -= spsolve(matrix.tocsc(), r.ravel()).reshape(n, n)
    print(f"{n * n} unknowns, {matrix.nnz} entries; residuals", " ".join(f"{s:.0e}" for s in sizes))
    print(f"u in the middle: {u[n // 2, n // 2]:.4f}")
    return u, sizes


if __name__ == "__main__":
    main(*sys.argv[1:])
