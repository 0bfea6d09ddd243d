"""A model trained on data in one call."""

from __future__ import annotations

import inspect
import os
from typing import Any

from onnxgrad.training.loop.trainer import AnyData, Trainer


def train(model: Any, data: AnyData, *, output: str | os.PathLike | None = None, **settings: Any) -> Trainer:
    """Train `model` on `data`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` (see `Trainer`).
        data: arrays by name, rows that are dicts, or a path (see `Trainer.fit`).
        output: where to save the trained model, a plain ``.onnx`` file. Default: nowhere; `Trainer.save` does it later.
        settings: arguments of `Trainer` (``loss="cross_entropy"``, ``optimizer="adam"``, ``learning_rate=1e-3``, …)
            and of `Trainer.fit` (``epochs=10``, ``batch_size=32``, ``validation_split=0.2``, …).

    Returns:
        The trainer, at the end of its run: ``.history``, ``.predict(…)``, ``.evaluate(…)``, ``.save(…)``.

    Raises:
        BadInput: as `Trainer` and `Trainer.fit`; or an argument that neither of them has.
    """
    fitting = set(inspect.signature(Trainer.fit).parameters) - {"self", "data"}
    making = {k: v for k, v in settings.items() if k not in fitting}
    if "memory" in settings and "batch_size" in settings:  # the memory is that of such a batch
        making["batch_size"] = settings["batch_size"]
    trainer = Trainer(model, **making)
    trainer.fit(data, **{k: v for k, v in settings.items() if k in fitting})
    if output is not None:
        trainer.save(output)
    return trainer
