"""Influence functions: the rows of the training data that decided a prediction, by the inverse Hessian.

    pip install onnxgrad[demo,scipy]
    python examples/influence.py [rows]

A logistic regression of tumours (the Wisconsin data). To leave row i out moves the weights by H⁻¹·gᵢ/n, to first order
(Koh & Liang 2017): H is the Hessian of the loss, gᵢ the gradient of that row. So its influence on a score s is
∇s·H⁻¹·gᵢ/n. One system is solved, with products of H alone; the gradients of all rows are one run. The rows with most
influence are then left out for real.
"""

import sys

import numpy as np
import onnx
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

from onnxgrad import Function

MODEL = """<ir_version: 10, opset_import: ["": 21]>
logistic (double[N, D] x, double[N, 1] sign, double[D, 1] w) => (double loss)
    <double half = {0.005}, double minus = {-1}, double one = {1}> {
    score = MatMul (x, w)
    margin = Mul (score, sign)
    away = Mul (minus, margin)
    grown = Exp (away)
    below = Add (one, grown)
    rows = Log (below)
    fit = ReduceMean <keepdims = 0> (rows)
    ww = ReduceSumSquare <keepdims = 0> (w)
    penalty = Mul (half, ww)
    loss = Add (fit, penalty)
}"""


def main(rows: int | str = 5) -> tuple[np.ndarray, np.ndarray]:
    """Compare the predicted and the actual effect of leaving out each of the most influential rows."""
    x, y = load_breast_cancer(return_X_y=True)
    x = np.c_[StandardScaler().fit_transform(x), np.ones(len(x))]
    sign = np.where(y, 1.0, -1.0)[:, None]
    test, x, sign = x[-1:], x[:-1], sign[:-1]
    f = Function(onnx.parser.parse_model(MODEL))
    score = Function(f.model, outputs="score")
    gradient, product = f.grad(wrt="w"), f.hvp(wrt="w")

    def trained(x: np.ndarray, sign: np.ndarray) -> np.ndarray:
        n = x.shape[1]
        found = minimize(
            lambda w: float(f(x, sign, w[:, None])),
            np.zeros(n),
            jac=lambda w: gradient(x, sign, w[:, None])[:, 0],
            hessp=lambda w, v: product(x, sign, w[:, None], v[:, None])[:, 0],
            method="Newton-CG",
            options={"xtol": 1e-9},
        )
        return found.x[:, None]

    w = trained(x, sign)
    hessian = LinearOperator((len(w), len(w)), lambda v: product(x, sign, w, v.reshape(-1, 1))[:, 0], dtype=float)
    slope = score.grad(wrt="w")(test, [[1]], w)[:, 0]
    solved, _ = cg(hessian, slope, rtol=1e-10)
    each = f.per_example_grad(wrt="w", shared="w", of="fit")(x, sign, w)[..., 0]
    influence = each @ solved / len(x)
    most = np.argsort(-abs(influence))[: int(rows)]
    predicted, real = influence[most], []
    before = float(score(test, [[1]], w)[0, 0])
    for i in most:
        kept = np.arange(len(x)) != i
        real.append(float(score(test, [[1]], trained(x[kept], sign[kept]))[0, 0]) - before)
    print(f"score of the last tumour: {before:.3f}")
    for i, p, r in zip(most, predicted, real):
        print(f"  without row {i}: {p:+.4f} predicted, {r:+.4f} when trained without it")
    return predicted, np.array(real)


if __name__ == "__main__":
    main(*sys.argv[1:])
