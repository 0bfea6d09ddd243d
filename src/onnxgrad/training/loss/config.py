"""Configuration of the objective: one `Loss`, or several, which are added."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import identifier
from onnxgrad.training.graph.inline_graphs import is_graph
from onnxgrad.training.loss.expression import Expression, is_expression
from onnxgrad.training.loss.loss_function import LossFunction
from onnxgrad.training.loss.losses import LOSSES, loss_named
from onnxgrad.training.loss.recorded import is_function, name_of, parameters
from onnxgrad.training.option_strings import spelled, weighted


@dataclass(frozen=True, init=False)
class Loss:
    """One term of the objective.

    Args:
        loss: a name (see `losses.LOSSES`); or a graph that computes a scalar (an ONNX model or its path, a
            FunctionProto, an onnxscript function), a function of arrays, a function or module of PyTorch, or a formula
            as ``"mean((scores - y)**2)"`` (see `expression`): its first input takes the prediction unless it has the
            name of a value of the model; inputs with such names take those values; the others become inputs for data.
        factor: what it is multiplied by.
        output: the value of the model that is the prediction; default: the model's only float output.
        labels: name of the label input; default: ``labels``. Terms that give the same name share it.
        teacher: a model with the inputs of the model, whose output takes the place of the labels.
        row_weights: name of an input with a weight for each row, of a loss by name: the mean is weighted by it.
        examples: rows of the inputs for data of a function, by name, where they are not like the prediction and no
            class numbers.
        options: of a loss by name: ``reduction`` ("mean" or "sum"), ``axis`` of the classes (default: found out, see
            `class_axis`), ``ignore_index``, ``weight`` per class, ``delta``, …
    """

    loss: Any
    factor: float
    output: str | None
    labels: str | None
    teacher: Any
    row_weights: str | None
    examples: Mapping[str, Any]
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
        row_weights: str | None = None,
        examples: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        vars(self).update(
            loss=loss, factor=factor, output=output, labels=labels, teacher=teacher, row_weights=row_weights,
            examples=dict(examples or {}), options=options,
        )  # fmt: skip

    @classmethod
    def of(cls, text: str) -> Loss:
        """The term spelled ``factor*name:option=…,output=…,labels=…,teacher=…``; ``….onnx`` is a graph, and a text
        with parentheses a formula.
        """
        if is_expression(text):
            return cls(text)
        factor, rest = weighted(text)
        if rest.endswith(".onnx") and rest.partition(":")[0] not in LOSSES:
            return cls(rest, factor=factor)
        name, options = spelled(rest)
        own: dict[str, Any] = {
            key: str(options.pop(key)) for key in ("output", "labels", "teacher", "row_weights") if key in options
        }
        if "factor" in options:
            raise BadInput(f"{text!r}: write the factor in front, as in 0.5*{name}")
        return cls(name, factor=factor, **own, **options)

    @property
    def name(self) -> str:
        """The name of the term."""
        if is_function(self.loss):
            return name_of(self.loss)
        if isinstance(self.loss, str) and not self.loss.endswith(".onnx"):
            return self.loss
        if isinstance(self.loss, (str, os.PathLike)):
            return identifier(os.path.splitext(os.path.basename(self.loss))[0])
        if isinstance(self.loss, ir.Model) and self.loss.graph.name:
            return identifier(self.loss.graph.name)
        return identifier(getattr(self.loss, "name", None) or "custom")

    def with_names(self, output: str | None, labels: str | None) -> Loss:
        """The same with these names, where it has none of its own."""
        return self.with_loss(self.loss, output=self.output or output, labels=self.labels or labels)

    def with_loss(self, loss: Any, **changes: Any) -> Loss:
        """The same term of another `loss`, or with other attributes."""
        own = {name: value for name, value in vars(self).items() if name not in ("loss", "options")}
        return Loss(loss, **{**own, **self.options, **changes})

    def function(self) -> tuple[LossFunction, dict[str, Any]] | None:
        """The function of that name with all of its options; None for a graph. Raises BadInput for invalid options."""
        if not np.isfinite(self.factor):
            raise BadInput(f"the factor of a loss must be finite, not {self.factor}")
        if not isinstance(self.loss, str) or self.loss.endswith(".onnx") or is_function(self.loss):
            if not isinstance(self.loss, str) and not is_graph(self.loss) and not is_function(self.loss):
                raise BadInput(f"a loss is a name, a model or a function, not a {type(self.loss).__name__}")
            if isinstance(self.loss, type):
                raise BadInput(f"a loss is a function or an object, not the class {self.loss.__name__}")
            if self.options or self.teacher is not None:
                what = "function" if is_function(self.loss) else "graph"
                raise BadInput(f"the loss {self.name!r} is a {what}, which takes no options and no teacher")
            if self.row_weights is not None:
                raise BadInput(f"the loss {self.name!r} is of your own: let it read {self.row_weights!r} itself")
            if is_function(self.loss):
                parameters(Expression(self.loss) if isinstance(self.loss, str) else self.loss)
            return None
        if isinstance(self.options.get("weight"), str):
            raise BadInput(
                f"the weights of classes are numbers, not {self.options['weight']!r}\n  hint: weight=balanced is "
                "computed from the data, by `onnxgrad train` and `onnxgrad.train`"
            )
        return loss_named(self.loss, self.options)


def as_list(loss: Any) -> list[Any]:
    """One loss or several, as a list."""
    return list(loss) if isinstance(loss, Sequence) and not isinstance(loss, str) else [loss]


def terms_of(loss: Any, output: str | None = None, labels: str | None = None) -> list[Loss]:
    """The terms of a loss: a `Loss`, a name or a graph, or several of these; `output` and `labels` are their defaults.

    Raises:
        BadInput: there is none, or an option does not fit.
    """
    terms = [t if isinstance(t, Loss) else Loss.of(t) if isinstance(t, str) else Loss(t) for t in as_list(loss)]
    if not terms:
        raise BadInput("there is no loss to minimize")
    for term in terms:
        term.function()
    return [t.with_names(output, labels) for t in terms]
