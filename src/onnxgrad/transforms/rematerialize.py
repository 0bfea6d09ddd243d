"""A derived model within a memory budget: residuals that do not fit are recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel, open_model, signature
from onnxgrad.model_io.signature import KEY
from onnxgrad.remat import Plan, amount, fit_budget


class Rematerialized(NamedTuple):
    """A model within a memory budget, and the values that it saves and recomputes."""

    model: Any
    plan: Plan


@check_keywords
def rematerialize(model: AnyModel, memory: int | str, *, dims: Mapping[str, int] | None = None) -> Rematerialized:
    """A model with the same outputs, whose intermediate results use at most `memory` at a time.

    ::

        derived, plan = rematerialize(grad(model, wrt="w"), "200MB", dims={"N": 64})

    The values that a derivative reads of the primal computation are saved as far as they fit. The others are recomputed
    behind gates of standard operators that no runtime optimizes away, so the budget is kept on every runtime that runs
    a graph in an order of its dependencies and frees memory. Only results of nodes count, not inputs, outputs and
    initializers. `checkpointing` does the same for the steps of a Loop or Scan, which are single nodes here.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, from `vjp`, `grad`, …; it is not changed.
        memory: a number of bytes, or an amount as ``"200MB"`` or ``"1.5GiB"``.
        dims: sizes of symbolic dimensions of the inputs, by name.

    Returns:
        The model, of the kind that came in (a path gives a ModelProto), and the plan.

    Raises:
        BadInput: it cannot be done (the message says what can), or depends on a dimension whose size was not given.
    """
    budget = amount(memory)
    opened = open_model(model)
    plan = fit_budget(opened.model, budget, dict(dims or {}), _forward(opened.model))
    return Rematerialized(opened.close(), plan)


def _forward(model: ir.Model) -> list[str]:
    """The outputs of the primal, where the backward pass begins; empty without either."""
    if KEY not in model.metadata_props:
        return []
    names = signature(model)
    if not names.gradients:
        return []
    made = {*names.gradients.values(), *names.products.values(), *names.output_tangents.values()}
    return [v.name or "" for v in model.graph.outputs if v.name not in made]
