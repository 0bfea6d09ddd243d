"""The memory of a step: residuals that are freed early, and a budget for intermediate results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.execution_order import orders, reorder
from onnxgrad.ir.invariants import fault_of
from onnxgrad.ir.passes import warn_of
from onnxgrad.remat import amount, fit_budget, settle, sizes
from onnxgrad.training.step.step import Step

#: As large as dimensions that are not known are taken to be, where only a comparison depends on them.
USUAL = 64
#: The name of the pass that orders the nodes of a step.
STEP_ORDER = "step_order"
#: Graphs with more nodes are only put in order, not measured.
LARGEST = 10_000


def in_good_order(model: ir.Model) -> str:
    """Reorder the graph of `model` to reduce the peak memory of a run, by 0 to 30 % of a step.

    Returns:
        Why the order is what it was, if it is; empty otherwise.
    """
    nodes = list(model.graph)
    try:
        _order(model)
        if fault := fault_of(model.graph, None):
            raise RuntimeError(fault)
    except Exception as error:
        model.graph.extend(nodes)
        reason = f"{type(error).__name__}: {error}"
        warn_of({STEP_ORDER: reason})
        return f"failed: {reason}"
    return ""


def _order(model: ir.Model) -> None:
    graph = model.graph
    try:
        if graph.num_nodes() <= LARGEST:
            settle(graph, sizes(model, {}, USUAL))
            return
    except BadInput:  # sizes that do not fit: then without them
        pass
    reorder(graph, orders(graph)[1])


def within_memory(
    step: Step, memory: int | str, batch_size: int | None = None, dims: Mapping[str, int] | None = None
) -> Step:
    """`step`, rewritten so that its intermediate results use at most `memory` at a time; its `plan` has the details.

    Residuals that do not fit are recomputed in the backward pass. The results of the step's nodes count, for a batch of
    `batch_size` rows; not the state, the batch and the results, nor the workspace of kernels.

    Args:
        step: from `compile_step`; it is not changed.
        memory: a number of bytes, or an amount as ``"200MB"`` or ``"1.5GiB"``.
        batch_size: rows of a batch; needed if the step takes any number of them.
        dims: sizes of other symbolic dimensions of the batch, by name.

    Raises:
        BadInput: it cannot be done (the message says what can), or depends on a dimension whose size was not given.
    """
    budget, known = amount(memory), dict(dims or {})
    inputs = {v.name: v for v in step.model.graph.inputs}
    for name in step.batch:
        shape = inputs[name].shape
        if shape is not None and len(shape) and isinstance(shape[0], ir.SymbolicDim):
            rows = shape[0].value or f"{name}[0]"
            if rows not in known and batch_size is None:
                raise BadInput("the memory of a step depends on the rows of a batch; say how many, as batch_size=32")
            known.setdefault(rows, batch_size or 0)
    if any(n < 1 for n in known.values()):
        raise BadInput(f"sizes of dimensions are numbers from 1 on, not {min(known.values())}")
    model = step.model.clone()
    hint = "\n  hint: smaller batches take less; so do parts of a batch, one after the other (accumulate)"
    plan = fit_budget(model, budget, known, [step.loss] if step.loss else [], hint)
    return replace(step, model=model, plan=plan)
