"""Fit a slow simulation to data through a fast surrogate: least squares in a trust region, with exact derivatives.

    pip install onnxgrad[demo,scipy]
    python examples/trust_region.py [picture.png]

Lynx and hares in Canada, 1900-1920 (pelts, in thousands, from the Hudson's Bay Company), as predators and prey of Lotka
and Volterra. A network learns what the simulation gives for six parameters, on a thousand simulations; SciPy's
trust-region solver then fits the parameters through it, with the Jacobian as a linear operator on ONNX Runtime.
"""

import sys
import warnings

import numpy as np
from from_sklearn import as_onnx
from scipy.integrate import odeint
from scipy.optimize import least_squares
from scipy.stats import qmc
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler

from onnxgrad import Function, linear_operator

HARES = np.fromstring(
    "30 47.2 70.2 77.4 36.3 20.6 18.1 21.4 22 25.4 27.1 40.3 57 76.6 52.3 19.5 11.2 7.6 14.6 16.2 24.7", sep=" "
)
LYNX = np.fromstring("4 6.1 9.8 35.2 59.4 41.7 19 13 8.3 9.1 7.4 8 12.3 19.5 45.7 51.1 29.7 15.8 9.7 10.1 8.6", sep=" ")
DATA = np.log([HARES, LYNX]).T.ravel()
LOW = np.array([0.4, 0.018, 0.6, 0.017, 25, 4])  # births, kills; deaths, gains; hares and lynx in 1900
HIGH = np.array([0.7, 0.036, 1.05, 0.033, 42, 8])


def simulation(p: np.ndarray) -> np.ndarray:
    """The logarithms of both populations in every year."""

    def rates(state, _):
        hares, lynx = state
        return (p[0] - p[1] * lynx) * hares, (p[3] * hares - p[2]) * lynx

    return np.log(odeint(rates, p[4:], np.arange(len(HARES)))).ravel()


def surrogate(runs: int) -> Function:
    """A network that was taught by `runs` simulations."""
    points = LOW + (HIGH - LOW) * qmc.Sobol(6, seed=0).random(runs)
    scaler = StandardScaler().fit(points)
    network = MLPRegressor(
        hidden_layer_sizes=(64, 64), activation="tanh", learning_rate_init=3e-3, max_iter=100, random_state=0, alpha=0
    )
    warnings.simplefilter("ignore")  # a network that could still learn more is good enough
    network.fit(scaler.transform(points), np.array([simulation(p) for p in points]))
    return Function(as_onnx(network, scaler))


def main(picture: str | None = "trust_region.png", runs: int = 1024) -> tuple[np.ndarray, float, float]:
    """The parameters, and the error before and after the fit, as the simulation itself sees it."""
    f, start = surrogate(runs), LOW + 0.2 * (HIGH - LOW)
    found = least_squares(
        lambda p: f(p[None])[0] - DATA,
        start,
        jac=lambda p: linear_operator(f, {"x": p[None]}, wrt="x"),
        bounds=(LOW, HIGH),
        x_scale=HIGH - LOW,
        method="trf",
    )
    before, after = (float(np.sqrt(np.mean((simulation(p) - DATA) ** 2))) for p in (start, found.x))
    print("parameters", found.x.round(4).tolist(), f"after {found.nfev} evaluations of the surrogate")
    print(f"error of the simulation (log of pelts): {before:.2f} before, {after:.2f} after the fit")
    if picture:
        import matplotlib.pyplot as plt

        years, fitted = np.arange(1900, 1921), np.exp(simulation(found.x)).reshape(-1, 2)
        figure, axis = plt.subplots(figsize=(7, 3))
        for i, (name, data, color) in enumerate((("hares", HARES, "tab:blue"), ("lynx", LYNX, "tab:red"))):
            axis.plot(years, data, "o", color=color, label=f"{name}: data")
            axis.plot(years, fitted[:, i], color=color, label=f"{name}: simulation, fitted")
        axis.set_ylabel("pelts, thousands")
        axis.legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return found.x, before, after


if __name__ == "__main__":
    main(*sys.argv[1:])
