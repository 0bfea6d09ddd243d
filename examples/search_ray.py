"""A search for the learning rate of a network by Ray Tune, which ends runs that fall behind (ASHA)."""

from __future__ import annotations

import sys
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits

import onnxgrad
from onnxgrad.callbacks import Pruning
from onnxgrad.sklearn import perceptron


def run(config: dict[str, Any]) -> None:
    """One run; Ray Tune ends it where it falls behind."""
    images, labels = load_digits(return_X_y=True)
    rows = {"x": (images / 16).astype("float32"), "labels": labels}
    report = Pruning(lambda loss, epoch: tune.report({"loss": loss, "epoch": epoch}))
    settings = {"epochs": 6, "learning_rate": config["learning_rate"], "validation_split": 0.3, "callbacks": [report]}
    onnxgrad.train(perceptron(64, 10), rows, loss="cross_entropy", progress=False, **settings)


def main(trials: int = 10) -> tune.ResultGrid:
    """Search, and print the best settings."""
    search = tune.TuneConfig(metric="loss", mode="min", num_samples=trials, scheduler=ASHAScheduler(grace_period=2))
    results = tune.Tuner(run, param_space={"learning_rate": tune.loguniform(1e-5, 0.1)}, tune_config=search).fit()
    best = results.get_best_result()
    print(f"best loss {best.metrics['loss']:.3f} with {best.config}")
    return results


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
