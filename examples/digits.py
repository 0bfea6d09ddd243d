"""Shared code of several examples: a classifier of handwritten digits, trained in a few seconds."""

import numpy as np

from onnxgrad import Function
from onnxgrad.demo import MODEL, digits
from onnxgrad.training import Trainer, attach


def classifier(epochs: int = 4) -> tuple[Function, np.ndarray, np.ndarray]:
    """The trained model as a function of images, and scikit-learn's digits that it has not seen, with labels."""
    train, test = digits()
    trainer = Trainer(attach(MODEL, loss="cross_entropy", optimizer="adam", learning_rate=3e-3))
    trainer.fit(train, epochs=epochs, batch_size=64)
    return Function(trainer.inference_model()), test["images"], test["labels"]
