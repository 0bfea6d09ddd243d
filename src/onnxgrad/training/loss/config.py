"""Configuration of the objective: one `Loss`, or several, which are added."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.ir import identifier
from onnxgrad.training.graph.inline_graphs import is_graph
from onnxgrad.training.loss.loss_function import LossFunction
from onnxgrad.training.loss.losses import LOSSES, loss_named
from onnxgrad.training.option_strings import spelled, weighted


@dataclass(frozen=True, init=False)
class Loss:
    """One term of the objective.

    Args:
        loss: a name (see `losses.LOSSES`), or a graph that computes a scalar (an ONNX model or its path, a
            FunctionProto, an onnxscript function): its first input takes the prediction unless it has the name of a
            value of the model; inputs with such names take those values; the others become inputs for data.
        factor: what it is multiplied by.
        output: the value of the model that is the prediction; default: the model's only float output.
        labels: name of the label input; default: ``labels``. Terms that give the same name share it.
        teacher: a model with the inputs of the model, whose output takes the place of the labels.
        options: of a loss by name: ``reduction`` ("mean" or "sum"), ``axis`` of the classes (default: found out, see
            `class_axis`), ``ignore_index``, ``weight`` per class, ``delta``, …
    """

    loss: Any
    factor: float
    output: str | None
    labels: str | None
    teacher: Any
    options: Mapping[str, Any]

    def __init__(
        self,
        loss: Any = "cross_entropy",
        /,
        *,
        factor: float = 1.0,
        output: str | None = None,
        labels: str | None = None,
        teacher: Any = None,
        **options: Any,
    ) -> None:
        vars(self).update(loss=loss, factor=factor, output=output, labels=labels, teacher=teacher, options=options)

    @classmethod
    def of(cls, text: str) -> Loss:
        """The term spelled ``factor*name:option=…,output=…,labels=…,teacher=…``; ``….onnx`` is a loss of one's own."""
        factor, rest = weighted(text)
        if rest.endswith(".onnx") and rest.partition(":")[0] not in LOSSES:
            return cls(rest, factor=factor)
        name, options = spelled(rest)
        own = {key: str(options.pop(key)) for key in ("output", "labels", "teacher") if key in options}
        if "factor" in options:
            raise BadInput(f"{text!r}: write the factor in front, as in 0.5*{name}")
        return cls(name, factor=factor, **own, **options)

    @property
    def name(self) -> str:
        """The name of the term."""
        if isinstance(self.loss, str) and not self.loss.endswith(".onnx"):
            return self.loss
        if isinstance(self.loss, (str, os.PathLike)):
            return identifier(os.path.splitext(os.path.basename(self.loss))[0])
        return identifier(getattr(self.loss, "name", None) or "custom")

    def with_names(self, output: str | None, labels: str | None) -> Loss:
        """The same with these names, where it has none of its own."""
        names = {"output": self.output or output, "labels": self.labels or labels}
        return Loss(self.loss, factor=self.factor, teacher=self.teacher, **names, **self.options)

    def function(self) -> tuple[LossFunction, dict[str, Any]] | None:
        """The function of that name with all of its options; None for a graph. Raises BadInput for invalid options."""
        if not np.isfinite(self.factor):
            raise BadInput(f"the factor of a loss must be finite, not {self.factor}")
        if not isinstance(self.loss, str) or self.loss.endswith(".onnx"):
            if callable(self.loss) and not is_graph(self.loss):
                raise BadInput(
                    "a loss is a name or a graph, and a Python function is recorded as a graph first\n"
                    "  hint: loss=onnxgrad.eager.export(function, scores, labels, dynamic={'scores': {0: 'N'}, "
                    "'labels': {0: 'N'}}), with a function of arrays and example arrays; or an onnxscript function"
                )
            if not isinstance(self.loss, str) and not is_graph(self.loss):
                raise BadInput(f"a loss is a name, a model or a function, not a {type(self.loss).__name__}")
            if self.options or self.teacher is not None:
                raise BadInput(f"the loss {self.name!r} is a graph, which takes no options and no teacher")
            return None
        if isinstance(self.options.get("weight"), str):
            raise BadInput(
                f"the weights of classes are numbers, not {self.options['weight']!r}\n  hint: weight=balanced is "
                "computed from the data, by `onnxgrad train` and `onnxgrad.train`"
            )
        return loss_named(self.loss, self.options)


def terms_of(loss: Any, output: str | None = None, labels: str | None = None) -> list[Loss]:
    """A loss, or several, each a `Loss`, spelled or a graph; `output` and `labels` are defaults for them.

    Raises:
        BadInput: there is none, or an option does not fit.
    """
    listed = list(loss) if isinstance(loss, Sequence) and not isinstance(loss, str) else [loss]
    if not listed:
        raise BadInput("there is no loss to minimize")
    terms = [t if isinstance(t, Loss) else Loss.of(t) if isinstance(t, str) else Loss(t) for t in listed]
    for term in terms:
        term.function()
    return [t.with_names(output, labels) for t in terms]
