"""Metrics that a step computes besides the loss, as `METRICS` defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.training.loss.loss_function import LossFunction
from onnxgrad.training.metrics.in_step import share
from onnxgrad.training.metrics.registry import METRICS
from onnxgrad.training.option_strings import looked_up

#: Metrics of the gradient, which the update computes.
OF_GRADIENT = ("gradient_norm",)
#: Names of the metrics that a step can compute.
IN_STEP = (*(name for name, metric in METRICS.items() if metric.in_step), *OF_GRADIENT)


def names_in_step(metrics: str | Sequence[str]) -> list[str]:
    """The names in ``"accuracy,top5"`` or a list. Raises BadInput for one that is not in `IN_STEP`."""
    names = [n.strip() for n in metrics.split(",")] if isinstance(metrics, str) else list(metrics)
    for name in names:
        try:
            looked_up("metric", name, dict.fromkeys(IN_STEP))
        except BadInput as error:
            raise BadInput(f"{error}\n  hint: fit(metrics=…) measures validation data by many more") from None
    return names


def row_functions(names: Sequence[str]) -> dict[str, Callable[[Builder, Var, Var], Var]]:
    """The metrics of classes among `names` that are shares of rows, by name (see `InStep.of_rows`)."""
    forms = {name: METRICS[name].in_step.get("classes") for name in dict.fromkeys(names) if name in METRICS}
    return {name: form.of_rows for name, form in forms.items() if form is not None and form.of_rows is not None}


def write_step_metrics(
    b: Builder,
    names: Sequence[str],
    kind: tuple[LossFunction, dict[str, Any]] | None,
    operands: tuple[Var, list[Var]] | None,
    rights: Mapping[str, Var],
) -> dict[str, Var]:
    """Append the metrics `names`; those in `rights` from the result of their `row_functions`."""
    found = {}
    for name in dict.fromkeys(names):
        if name in OF_GRADIENT:
            continue
        if kind is None or operands is None:
            raise BadInput(f"the loss is a graph, so {name} cannot be taken; give it a further output")
        loss, options = kind
        task = loss.compares or "numbers"
        form = METRICS[name].in_step.get(task)
        if form is None or len(operands[1]) != 1:
            fitting = [n for n, metric in METRICS.items() if task in metric.in_step]
            raise BadInput(f"{name} does not fit the labels of this loss; these do: {', '.join(fitting)}")
        y, (labels, *_) = operands
        if name in rights:
            value = share(b, rights[name], b.Reshape(labels, [-1]), options)
        else:
            value = form.write(b, y, labels, options)
        value.value.name = b.names.exactly(identifier(name))
        found[name] = value
    return found
