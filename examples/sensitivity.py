"""Sensitivity report of a tabular model: the measurements that a diagnosis depends on.

    pip install onnxgrad[demo]
    python examples/sensitivity.py [picture.png]

A network diagnoses breast tumours from 30 measurements of cell nuclei (the Wisconsin data that scikit-learn ships). One
Jacobian, with a batch axis, gives the slope of every patient's result with respect to every measurement; times the
spread of that measurement it says what matters. Permutation importance, which shuffles columns and counts
errors, sees a model from outside: both should agree on what matters most.
"""

import sys

import numpy as np
from from_sklearn import as_onnx
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from onnxgrad import Function


def main(picture: str | None = "sensitivity.png", top: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """The sensitivity and the permutation importance of every measurement."""
    data = load_breast_cancer()
    x, x_test, y, y_test = train_test_split(data.data, data.target, test_size=0.3, random_state=0)
    scaler = StandardScaler().fit(x)
    network = MLPClassifier((16,), activation="tanh", alpha=1.0, max_iter=500, random_state=0, solver="lbfgs")
    network.fit(scaler.transform(x), y)
    model = Function(as_onnx(network, scaler, last="identity"))  # log-odds, which do not saturate
    print(f"accuracy on {len(y_test)} patients: {((model(x_test)[:, 0] > 0) == y_test).mean():.1%}")

    slopes = model.jacobian(wrt="x", batch=0)(x_test)[:, 0]  # patients × measurements
    effects = slopes * x.std(0)
    sensitivity = np.abs(effects).mean(0)

    rng, base = np.random.default_rng(0), model(x_test)[:, 0]
    importance = np.zeros(x.shape[1])
    for column in range(x.shape[1]):
        for _ in range(10):
            shuffled = x_test.copy()
            shuffled[:, column] = rng.permutation(shuffled[:, column])
            importance[column] += np.abs(model(shuffled)[:, 0] - base).mean() / 10

    order = np.argsort(-sensitivity)[:top]
    print(f"{'measurement':24} {'sensitivity':>12} {'from … to (90 % of the patients)':>34} {'permutation':>12}")
    for i in order:
        low, high = np.percentile(effects[:, i], [5, 95])
        print(f"{data.feature_names[i]:24} {sensitivity[i]:12.2f} {low:+24.2f} … {high:+.2f} {importance[i]:12.2f}")
    if picture:
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(7, 3.2))
        axis.boxplot(effects[:, order[::-1]], orientation="horizontal", whis=(5, 95), showfliers=False)
        axis.set_yticklabels(data.feature_names[order[::-1]])
        axis.axvline(0, color="gray", linewidth=0.5)
        axis.set_xlabel("change of the log-odds of “benign” per standard deviation")
        figure.tight_layout()
        figure.savefig(picture, dpi=80)
    return sensitivity, importance


if __name__ == "__main__":
    main(*sys.argv[1:])
