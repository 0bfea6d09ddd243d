"""Forces and vibrations of a molecule from nothing but its energy: F = -dE/dx, and the normal modes of the Hessian.

    pip install onnxgrad[scipy,train]
    python examples/forces.py [picture.png]

The energy of water near its minimum, with the force constants of Hoy, Mills and Strey (Mol. Phys. 24, 1265, 1972): two
stretches, a bend, and how they couple. Its geometry is found by following the forces; the frequencies must then be the
harmonic ones of real water, 3832, 1649 and 3943 cm⁻¹, beside six that are zero because space looks the same everywhere.
"""

import sys

import numpy as np
import onnx
from scipy import optimize

from onnxgrad import Function

ENERGY = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21]>
    water (double[3, 3] x) => (double energy)
    <int64[1] oxygen = {0}, int64[2] hydrogens = {1, 2}, int64[1] last = {1}, int64[1] first = {0},
     double r0 = {0.9572}, double cosine0 = {-0.2507179}, double sine0 = {0.9680602}, double half = {0.5},
     double k_stretch = {8.454}, double k_bend = {0.697}, double k_pair = {-0.101}, double k_mixed = {0.219}> {
        o = Gather (x, oxygen)
        h = Gather (x, hydrogens)
        bonds = Sub (h, o)
        lengths = ReduceL2 <keepdims = 0> (bonds, last)
        products = ReduceProd <keepdims = 0> (bonds, first)
        dot = ReduceSum <keepdims = 0> (products)
        area = ReduceProd <keepdims = 0> (lengths)
        cosine = Div (dot, area)
        fall = Sub (cosine0, cosine)
        bend = Div (fall, sine0)
        stretches = Sub (lengths, r0)
        squares = ReduceSumSquare <keepdims = 0> (stretches)
        pair = ReduceProd <keepdims = 0> (stretches)
        sum = ReduceSum <keepdims = 0> (stretches)
        mixed = Mul (sum, bend)
        bend2 = Mul (bend, bend)
        e1 = Mul (k_stretch, squares)
        e2 = Mul (k_bend, bend2)
        e12 = Add (e1, e2)
        halves = Mul (half, e12)
        e3 = Mul (k_pair, pair)
        e4 = Mul (k_mixed, mixed)
        energy = Sum (halves, e3, e4)
    }""")  # in mdyn·Å, of positions in Å; the bend is measured by its cosine, which is the same near the minimum

MASSES = np.array([15.9949146, 1.00782503, 1.00782503])
PER_CM = 1302.7914  # √(mdyn/Å per atomic mass unit), as a wave number


def main(picture: str | None = "forces.png") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The relaxed positions, the wave numbers of the normal modes, and the modes."""
    energy = Function(ENERGY)
    slope, hessian = energy.grad(wrt="x"), energy.hessian(wrt="x")
    start = np.array([[0.0, 0.0, 0.0], [1.1, 0.1, 0.2], [-0.4, 0.7, 0.1]])
    print("forces at the start (mdyn):", *(-slope(start)).round(2).tolist(), sep="\n  ")
    found = optimize.minimize(
        lambda p: float(energy(p.reshape(3, 3))), start.ravel(), jac=lambda p: slope(p.reshape(3, 3)).ravel(), tol=1e-9
    )
    x = found.x.reshape(3, 3)
    print(f"relaxed in {found.nit} steps; bonds {np.linalg.norm(x[1:] - x[0], axis=1).round(4)} Å")

    roots = np.repeat(np.sqrt(MASSES), 3)
    squares, modes = np.linalg.eigh(hessian(x).reshape(9, 9) / np.outer(roots, roots))
    waves = PER_CM * np.sign(squares) * np.sqrt(np.abs(squares))
    print("wave numbers (cm⁻¹):", *(f"{w:.1f}" for w in waves))
    if picture:
        import matplotlib.pyplot as plt

        plane = np.linalg.svd(x - x.mean(0))[2][:2]  # the plane of the molecule
        flat = (x - x.mean(0)) @ plane.T
        figure, axes = plt.subplots(1, 3, figsize=(8, 2.8))
        for axis, wave, mode in zip(axes, waves[6:], modes.T[6:]):
            arrows = (mode / roots).reshape(3, 3) @ plane.T
            axis.scatter(*flat.T, s=[900, 300, 300], c=["crimson", "silver", "silver"], edgecolors="black")
            axis.quiver(*flat.T, *arrows.T, scale=3, width=0.015, zorder=3)
            axis.set(xticks=[], yticks=[], title=f"{wave:.0f} cm⁻¹", aspect="equal", xlim=(-1.4, 1.4), ylim=(-1.1, 1.1))
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return x, waves, modes


if __name__ == "__main__":
    main(*sys.argv[1:])
