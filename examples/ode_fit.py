"""Fit a differential equation to data, by differentiating the solver: an ordinary loop of Python.

    pip install onnxgrad[scipy,train]
    python examples/ode_fit.py [picture.png]

Lynx and hares in Canada, 1900-1920 (pelts, in thousands, from the Hudson's Bay Company), as predators and prey of Lotka
and Volterra. The solver is Runge's and Kutta's, written out; reverse mode goes back through all of its steps.
"""

import sys

import numpy as onp
from scipy.optimize import minimize

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np

HARES = onp.fromstring(
    "30 47.2 70.2 77.4 36.3 20.6 18.1 21.4 22 25.4 27.1 40.3 57 76.6 52.3 19.5 11.2 7.6 14.6 16.2 24.7", sep=" "
)
LYNX = onp.fromstring(
    "4 6.1 9.8 35.2 59.4 41.7 19 13 8.3 9.1 7.4 8 12.3 19.5 45.7 51.1 29.7 15.8 9.7 10.1 8.6", sep=" "
)
DATA = onp.log(onp.stack([HARES, LYNX], 1))
MIXES = onp.array([[0.0, -1.0], [1.0, 0.0]])  # hares suffer from lynx, lynx gain from hares
SIGNS = onp.array([1.0, -1.0])


def rates(logs, p):
    """The growth rates of the populations' logarithms: births - kills · lynx, gains · hares - deaths."""
    return SIGNS * np.exp(p[:2]) + MIXES @ np.exp(logs) * np.exp(p[2:4])


def solution(p, per_year=8):
    """The logarithms of hares and lynx in every year, for the logarithms of four rates, and the first two."""
    logs, h, years = p[4:], 1 / per_year, [p[4:]]
    for _ in range(len(DATA) - 1):
        for _ in range(per_year):
            a = rates(logs, p)
            b = rates(logs + h / 2 * a, p)
            c = rates(logs + h / 2 * b, p)
            d = rates(logs + h * c, p)
            logs = logs + h / 6 * (a + 2 * b + 2 * c + d)
        years.append(logs)
    return np.stack(years)


def loss(p):
    """Half the sum of the squared errors."""
    return 0.5 * np.sum((solution(p) - DATA) ** 2)


def main(picture: str | None = "ode_fit.png") -> tuple[onp.ndarray, float, float]:
    """The rates and the start, and the root mean square errors before and after the fit."""
    start = onp.log([0.6, 0.8, 0.03, 0.03, 30.0, 4.0])

    def value_and_slope(p):
        value, slope = og.value_and_grad(loss)(p)
        return float(value), onp.asarray(slope)

    found = minimize(value_and_slope, start, jac=True, method="BFGS", options={"gtol": 1e-5})
    before, after = (float(onp.sqrt(2 * float(loss(p)) / DATA.size)) for p in (start, found.x))
    print("births, deaths, kills, gains, hares and lynx in 1900:", onp.exp(found.x).round(4).tolist())
    print(f"error (log of pelts): {before:.2f} before, {after:.2f} after {found.nfev} evaluations")
    if picture:
        import matplotlib.pyplot as plt

        years, fitted = onp.arange(1900, 1921), onp.exp(onp.asarray(solution(found.x)))
        figure, axis = plt.subplots(figsize=(7, 3))
        for i, (name, data, color) in enumerate((("hares", HARES, "tab:blue"), ("lynx", LYNX, "tab:red"))):
            axis.plot(years, data, "o", color=color, label=f"{name}: data")
            axis.plot(years, fitted[:, i], color=color, label=f"{name}: equation, fitted")
        axis.set_ylabel("pelts, thousands")
        axis.legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return found.x, before, after


if __name__ == "__main__":
    main(*sys.argv[1:])
