"""A search for the learning rate and the width of a network by Optuna, which gives up runs that fall behind."""

from __future__ import annotations

import optuna
from sklearn.datasets import load_digits

import onnxgrad
from onnxgrad.callbacks import Pruning
from onnxgrad.sklearn import perceptron

images, labels = load_digits(return_X_y=True)
training = {"x": (images[:1200] / 16).astype("float32"), "labels": labels[:1200]}
validation = {"x": (images[1200:] / 16).astype("float32"), "labels": labels[1200:]}


def objective(trial: optuna.Trial) -> float:
    """The validation loss of one run."""
    model = perceptron(64, 10, hidden=[trial.suggest_int("hidden", 8, 64, log=True)])
    rate = trial.suggest_float("learning_rate", 1e-5, 0.1, log=True)
    pruning = Pruning(lambda loss, epoch: trial.report(loss, epoch) or trial.should_prune())
    settings = {"epochs": 6, "learning_rate": rate, "validation": validation, "callbacks": [pruning]}
    run = onnxgrad.train(model, training, loss="cross_entropy", progress=False, **settings)
    if pruning.pruned:
        raise optuna.TrialPruned
    return run.history.epochs[-1]["validation_loss"]


def main(trials: int = 20) -> optuna.Study:
    """Search, and print the best settings."""
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=trials)
    print(f"best loss {study.best_value:.3f} with {study.best_params}")
    return study


if __name__ == "__main__":
    main()
