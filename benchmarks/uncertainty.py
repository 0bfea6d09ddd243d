"""Coverage and calibration of `onnxgrad.uncertainty` on rows that nothing was trained or calibrated on.

``python -m benchmarks.uncertainty`` (wants scikit-learn and tokenizers, and downloads the encoder of the demo of
reviews). Data: handwritten digits; film reviews as embeddings of that encoder; the regression of Friedman 1991. A
network of one hidden layer is trained on each, and each method is measured on the same test rows: coverage of 90 %
intervals or sets, their width or size, and the calibration error and log loss of probabilities.
"""

from __future__ import annotations

import numpy as np
import onnx

import onnxgrad
from onnxgrad import uncertainty
from onnxgrad.demo import reviews
from onnxgrad.training import evaluate
from onnxgrad.training.loop.evaluation import plain_session

Rows = dict[str, np.ndarray]


def network(inputs: int, outputs: int, hidden: int = 32) -> onnx.ModelProto:
    """A network of one hidden layer with random weights."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, {inputs}] x) => (float[N, {outputs}] y) {{
            a = Gemm (x, w1, b1)
            h = Tanh (a)
            y = Gemm (h, w2, b2)
        }}""")
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, outputs), "b2": (outputs,)}.items():
        array = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def parts(x: np.ndarray, labels: np.ndarray) -> list[Rows]:
    """Training rows (half), held-out rows (a quarter) and test rows, standardized by the first."""
    order = np.random.default_rng(0).permutation(len(x))
    cuts = np.split(order, [len(x) // 2, 3 * len(x) // 4])
    mean, deviation = x[cuts[0]].mean(0), x[cuts[0]].std(0) + 1e-6
    return [{"x": ((x[rows] - mean) / deviation).astype(np.float32), "labels": labels[rows]} for rows in cuts]


def digits() -> tuple[list[Rows], int]:
    """Pictures of 8 × 8 pixels of ten digits."""
    from sklearn.datasets import load_digits

    return parts(*load_digits(return_X_y=True)), 10


def sentences() -> tuple[list[Rows], int]:
    """Embeddings of sentences, and 1 where they praise."""
    found = reviews.reviews()
    session = plain_session(reviews.MODEL.path())
    x = np.concatenate([reviews.features(session, part) for part in found])
    return parts(x, np.concatenate([part["labels"] for part in found])), 2


def friedman() -> tuple[list[Rows], int]:
    """Ten features, of which five decide a number, with noise of deviation 1."""
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(4000, noise=1.0, random_state=0)
    return parts(x, y[:, None].astype(np.float32)), 1


def measure(name: str, rows: list[Rows], outputs: int) -> None:
    """Print a line for each method."""
    training, held_out, test = rows
    numbers = outputs == 1
    settings = {"loss": "mse" if numbers else "cross_entropy", "learning_rate": 0.005, "epochs": 40 if numbers else 15}
    model = onnxgrad.train(network(training["x"].shape[1], outputs), training, **settings).inference_model()
    kind = "numbers" if numbers else "classes"
    members = uncertainty.train_members(network(training["x"].shape[1], outputs), training, samples=5, redraw=True,
                                        **settings)  # fmt: skip
    made = {
        "the model itself": model,
        "temperature": None if numbers else uncertainty.scaled(model, held_out),
        "laplace": uncertainty.laplace(model, training),
        "dropout": uncertainty.dropout(model, samples=32, dropout={"Tanh": 0.1}, kind=kind),
        "ensemble": uncertainty.ensemble(members, kind=kind),
        "conformal": uncertainty.conformal(model, held_out, coverage=0.9),
    }
    for method, found in made.items():
        if found is None:
            continue
        if method == "conformal":
            asked = "coverage,width" if numbers else "coverage,set_size"
        elif numbers:
            asked = "rmse" if found is model else "rmse,nll,coverage,width"
        else:
            asked = "accuracy,ece,log_loss"
        values = evaluate(found, test, metrics=asked).metrics
        print(f"{name:<9} {method:<17}", "  ".join(f"{k} {v:.3f}" for k, v in values.items()), flush=True)


if __name__ == "__main__":
    for dataset in (digits, friedman, sentences):
        measure(dataset.__name__, *dataset())
