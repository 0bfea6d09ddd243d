"""Save policies of an iteration for its backward pass: residuals, every state, or every k-th state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import onnx_ir as ir

from onnxgrad.context import ScopedSetting
from onnxgrad.errors import BadInput
from onnxgrad.ir.match import not_none

Every = int | str | None

#: The states of an iteration that reverse mode saves; None: all residuals.
_EVERY: ScopedSetting[Every] = ScopedSetting("checkpointing", None)

#: key of a node's save policy, if it was written for one
_KEPT = "onnxgrad.kept"


class SavePolicy(Enum):
    """The values of a forward step that its backward step reads."""

    RESIDUALS = "all that it needs of what the step computed"
    STATES = "the states that the step started from; the rest is computed anew"


@contextmanager
def checkpointing(every: Every) -> Iterator[None]:
    """Within the ``with`` block, reverse mode through a Loop or Scan saves the states of some steps only.

    ::

        with checkpointing("sqrt"):
            model = grad(model, wrt="w")

    It holds for every call that differentiates in reverse inside the block (`vjp`, `grad`, `hessian`,
    `compile_step`, …), for recurrent operators, and for iterations inside iterations. Of T steps, each with states
    of size s and residuals of size r:

    ==========  ====================  ============================================================
    `every`     memory                forward steps
    ==========  ====================  ============================================================
    None        T·(s + r)             T: the default, all residuals are saved
    1           T·s                   2T: the states are saved, each step is recomputed
    k           T/k·s + k·(s + r)     2T: every k-th state is saved, k steps at a time are recomputed
    "sqrt"      √T·(2s + r), about    2T: as k = √T, with T the number of steps of each run; where that depends
                                      on the data, of segments of 1, 2, 3, … steps, which takes √2 times as much
    ==========  ====================  ============================================================

    The scan inputs and scan outputs of the model itself are kept in memory as before. The
    schedule is that of Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

    Raises:
        BadInput: `every` is neither None, nor a number from 1 on, nor "sqrt".
    """
    wrong = isinstance(every, bool) or not (every is None or every == "sqrt" or (isinstance(every, int) and every > 0))
    if wrong:
        raise BadInput(f"`every` is a number of steps from 1 on, 'sqrt' or None, not {every!r}")
    with _EVERY.changed(every):
        yield


def segment_length(node: ir.Node) -> Every:
    """The length of the segments that `node` is still to be split into: a number from 2 on, or "sqrt"; else None."""
    every = _EVERY.value
    return None if every in (None, 1) or _KEPT in node.meta or _KEPT in node.metadata_props else every


def save_policy(node: ir.Node) -> SavePolicy:
    """The save policy of `node`."""
    if node.metadata_props.get(_KEPT) == SavePolicy.STATES.name:
        return SavePolicy.STATES
    return node.meta.get(_KEPT) or (SavePolicy.RESIDUALS if _EVERY.value is None else SavePolicy.STATES)


def set_save_policy(node: ir.Node | None, what: SavePolicy) -> None:
    """Set the save policy of `node`, which takes precedence over `checkpointing`."""
    not_none(node).meta[_KEPT] = what


def save_always(node: ir.Node, what: SavePolicy) -> None:
    """Fix the same where the model is written to a file and read again."""
    node.metadata_props[_KEPT] = what.name
