"""Logistic regression as one writes it down: a Python function of arrays, and its gradient.

    pip install onnxgrad[demo,scipy]
    python examples/logistic.py

The loss is ordinary Python over a dict of parameters; `value_and_grad` differentiates it, SciPy minimizes it. The
result must be that of scikit-learn, which minimizes the same loss.
"""

import numpy as onp
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np

DATA = load_breast_cancer()
X = StandardScaler().fit_transform(DATA.data)
SIGNS = 2.0 * DATA.target - 1


def loss(parameters):
    """The negative log-likelihood, and half the squared length of the weights."""
    margins = SIGNS * (X @ parameters["weights"] + parameters["bias"])
    return np.sum(np.logaddexp(0.0, -margins)) + 0.5 * np.sum(parameters["weights"] ** 2)


def main() -> tuple[dict, float]:
    """The parameters, and how far they are from scikit-learn's."""

    def unpacked(flat):
        return {"weights": flat[:-1], "bias": flat[-1]}

    def value_and_slope(flat):
        value, slope = og.value_and_grad(loss)(unpacked(flat))
        return float(value), onp.concatenate([onp.asarray(slope["weights"]), [float(slope["bias"])]])

    found = minimize(value_and_slope, onp.zeros(X.shape[1] + 1), jac=True, method="L-BFGS-B", tol=1e-10)
    ours = unpacked(found.x)
    theirs = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(X, DATA.target)
    apart = float(onp.abs(ours["weights"] - theirs.coef_[0]).max())
    right = ((X @ ours["weights"] + ours["bias"] > 0) == DATA.target).mean()
    print(f"loss {found.fun:.4f} after {found.nfev} evaluations; {right:.1%} of {len(X)} patients right")
    print(f"largest difference from scikit-learn's weights: {apart:.1e}")
    return ours, apart


if __name__ == "__main__":
    main()
