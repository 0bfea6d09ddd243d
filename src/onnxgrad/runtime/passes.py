"""The passes of a session, in order: from a model to the graph that ONNX Runtime is given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.ir.downgrade import is_too_new, settle_opset
from onnxgrad.ir.execution_order import run_as
from onnxgrad.ir.graph import prune
from onnxgrad.ir.known_branches import known_branches, take_known_branches
from onnxgrad.ir.passes import Pass
from onnxgrad.runtime.batch_norm import BATCH_NORM
from onnxgrad.runtime.constant_transposes import CONSTANT_TRANSPOSES
from onnxgrad.runtime.double_erf import DOUBLE_ERF, LEFT_ERF
from onnxgrad.runtime.kernels import (
    ATTENTION,
    CONVOLUTIONS,
    ELEMENTWISE,
    FACTORED_UPDATES,
    GATHERED_SUMS,
    KERNELS,
    LAST_BLOCKS,
    PRODUCTS,
    RECURRENCE,
    RUNNING_SUMS,
    SUMMED_ROWS,
    compute_again,
    in_place,
)
from onnxgrad.runtime.result_views import result_views
from onnxgrad.runtime.rewrites import COLUMNS_OF_BATCHES, REWRITES, ROWS_OF_BATCHES, compute_soon
from onnxgrad.runtime.same_memory import SameMemory, name_nodes, same_memory
from onnxgrad.runtime.setting import Setting
from onnxgrad.runtime.widened import has_bfloat16, widen

#: Of state: steps with fewer numbers save no memory at the cost of time.
LARGE_STATE = 1 << 26


@dataclass(frozen=True)
class Memory:
    """The state of a session.

    Attributes:
        renewed: inputs that are state, and the outputs that are their new values.
        overwrites: True if kernels may put new values where the old ones are.
        shares: the same for standard operators.
        packs: as of `Setting`.
        reshapes: True if the session reshapes the arrays that it returns.
    """

    renewed: Mapping[str, str]
    overwrites: bool
    shares: bool
    packs: bool = True
    reshapes: bool = False


@dataclass
class SessionSetting(Setting):
    """The setting of a session whose graph may have state.

    Attributes:
        renewed, overwrites, shares, reshapes: as of `Memory`.
        overwritten: the inputs that kernels overwrite.
        shared: those that standard operators overwrite.
        shapes: those of outputs that the session reshapes.
        unnamed: nodes of the given graph that are named until ONNX Runtime has loaded it.
    """

    renewed: Mapping[str, str] = field(default_factory=dict)
    overwrites: bool = False
    shares: bool = False
    reshapes: bool = False
    overwritten: set[str] = field(default_factory=set)
    shared: SameMemory = field(default_factory=SameMemory)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unnamed: list[ir.Node] = field(default_factory=list)

    def keeps_state(self) -> str:
        """The reason that kernels overwrite no state; empty if they may."""
        return self.lacks_kernels() or ("" if self.overwrites else "the session holds no state")

    def keeps_results(self) -> str:
        """The reason that cheap results are kept for the backward pass; empty if they are computed again."""
        if reason := self.lacks_kernels():
            return reason
        sizes = (v.shape.numpy() for v in self.given.inputs if v.name in self.renewed and v.shape is not None)
        numbers = sum(math.prod(size) for size in sizes if not any(isinstance(d, str) for d in size))
        return "" if numbers >= LARGE_STATE else f"the state has fewer than {LARGE_STATE:,} numbers"

    def keeps_shapes(self) -> str:
        """The reason that outputs have the shapes of the model; empty if the session reshapes them."""
        return self.keeps_order() or ("" if self.reshapes else "results are tensors of ONNX Runtime")

    def keeps_two_buffers(self) -> str:
        """The reason that standard operators overwrite no state; empty if they may."""
        if reason := self.keeps_order():
            return reason
        if self.has_kernels:
            return "kernels overwrite state themselves (in_place)"
        return "" if self.shares else "the session holds no state"


def _prepare(model: ir.Model, setting: Setting) -> int:
    count = take_known_branches(model.graph)
    prune(model.graph)
    return count


def _order_rewritten(model: ir.Model, setting: Setting) -> int:
    compute_soon(setting.builder(model.graph, "soon"))
    run_as(model.graph, setting.places)
    return 1


def _order(model: ir.Model, setting: Setting) -> int:
    run_as(model.graph, setting.places)
    return 1


def _overwrite(model: ir.Model, setting: SessionSetting) -> int:
    setting.overwritten |= in_place(model.graph, setting.renewed)
    return len(setting.overwritten)


def _view(model: ir.Model, setting: SessionSetting) -> int:
    setting.shapes |= result_views(model.graph)
    return len(setting.shapes)


def _share(model: ir.Model, setting: SessionSetting) -> int:
    named = name_nodes(model.graph)
    try:
        same_memory(model.graph, setting.renewed, setting.shared)
    except Exception:  # the graph may be that of the caller
        for node in named:
            node.name = None
        raise
    setting.unnamed += named
    return len(setting.shared.inputs)


#: Without these, ONNX Runtime may refuse the model.
PREPARATION: Sequence[Pass[Setting]] = (
    Pass(
        "opset",
        "preparation",
        "an opset that ONNX Runtime loads",
        "newer opsets, where all operators mean the same in both",
        lambda model, _: is_too_new(model),
        lambda model, _: settle_opset(model) is None,
    ),
    Pass(
        "known_branches",
        "preparation",
        "the nodes of a branch",
        "an If with a constant condition",
        lambda model, _: next(known_branches(model.graph), None) is not None,
        _prepare,
    ),
    Pass(
        "widened",
        "preparation",
        "float32 between Casts",
        "operators in bfloat16 that no provider has a kernel for",
        lambda model, _: has_bfloat16(model),
        lambda model, setting: widen(model, setting.providers),
    ),
    DOUBLE_ERF,
    BATCH_NORM,
)

#: The passes that only make a run faster or smaller.
OPTIMIZATION: Sequence[Pass[SessionSetting]] = (
    KERNELS,
    ATTENTION,
    CONVOLUTIONS,
    ROWS_OF_BATCHES,  # makes places for SUMMED_ROWS
    COLUMNS_OF_BATCHES,  # as well
    SUMMED_ROWS,
    *REWRITES,
    GATHERED_SUMS,
    Pass(
        "rewritten_order",
        "rewrites",
        "an order in which memory is free early",
        "a graph that rewrites have changed",
        lambda _, setting: setting.is_rewritten,
        _order_rewritten,
        Setting.keeps_layout,
    ),
    RECURRENCE,
    RUNNING_SUMS,
    LAST_BLOCKS,
    ELEMENTWISE,
    LEFT_ERF,
    PRODUCTS,
    FACTORED_UPDATES,
    CONSTANT_TRANSPOSES,
    Pass(
        "again",
        "memory",
        "a second computation where the backward pass reads it",
        "activations, normalizations and attention to few keys beside products of large weights",
        lambda *_: True,
        lambda model, setting: compute_again(model.graph, setting.renewed.values()),
        SessionSetting.keeps_results,
    ),
    Pass(
        "in_place",
        "memory",
        "new values of state in the memory of the old ones, written by kernels",
        "optimizers, after all readers of the old values",
        lambda *_: True,
        _overwrite,
        SessionSetting.keeps_state,
    ),
    Pass(
        "kernel_order",
        "memory",
        "the order that the graph had",
        "a graph with kernels",
        lambda *_: True,
        _order,
        Setting.lacks_kernels,
    ),
    Pass(
        "result_views",
        "memory",
        "views of the arrays that ONNX Runtime returns",
        "large outputs that are views of other results",
        lambda *_: True,
        _view,
        SessionSetting.keeps_shapes,
    ),
    Pass(
        "same_memory",
        "memory",
        "new values of state in the memory of the old ones, written by standard operators",
        "elementwise updates, after all readers of the old values",
        lambda *_: True,
        _share,
        SessionSetting.keeps_two_buffers,
        looks=True,
    ),
)

#: The names of the passes over a step while it is compiled (see `onnxgrad.training.step.passes`).
STEP_NAMES = ("pool_first", "attention_blocks", "row_results", "step_order")

#: The names that `Options(without=…)` accepts.
NAMES = (*STEP_NAMES, *(p.name for p in PREPARATION), *(p.name for p in OPTIMIZATION))
