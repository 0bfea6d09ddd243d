"""What an iteration keeps for the way back: what its steps computed, their states, or only every k-th state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import onnx_ir as ir

from onnxgrad.context import changed, current
from onnxgrad.errors import BadInput

Every = int | str | None

#: where a node that was written for a policy remembers what to keep
_KEPT = "onnxgrad.kept"


class Kept(Enum):
    """What a step back reads of the step that it undoes."""

    RESIDUALS = "all that it needs of what the step computed"
    STATES = "the states that the step started from; the rest is computed anew"


@contextmanager
def checkpointing(every: Every) -> Iterator[None]:
    """Within the ``with`` block, reverse mode through a Loop or Scan keeps the states of some steps only.

    ::

        with checkpointing("sqrt"):
            model = grad(model, wrt="w")

    It holds for every call that differentiates in reverse inside the block (`vjp`, `grad`, `hessian`,
    `compile_step`, …), for recurrent operators, and for iterations inside iterations. Of T steps, each with states
    of size s that reads r values of what it computed on the way back:

    ==========  ====================  ============================================================
    `every`     memory                steps computed, besides the way back
    ==========  ====================  ============================================================
    None        T·(s + r)             T: the default, what the steps computed is kept
    1           T·s                   2T: the states are kept, each step is computed once more
    k           T/k·s + k·(s + r)     2T: every k-th state is kept, k steps at a time are computed once more
    "sqrt"      √T·(2s + r), about    2T: as k = √T, with T the number of steps of each run; where that depends
                                      on the data, of segments of 1, 2, 3, … steps, which takes √2 times as much
    ==========  ====================  ============================================================

    What the model itself gives for every step (scan outputs), and what it reads (scan inputs), stays as it is. The
    schedule is that of Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

    Raises:
        BadInput: `every` is neither None, nor a number from 1 on, nor "sqrt".
    """
    wrong = isinstance(every, bool) or not (every is None or every == "sqrt" or (isinstance(every, int) and every > 0))
    if wrong:
        raise BadInput(f"`every` is a number of steps from 1 on, 'sqrt' or None, not {every!r}")
    with changed(every=every):
        yield


def segment_length(node: ir.Node) -> Every:
    """How many steps of `node` to take together, if that is still to be done: a number from 2 on, or "sqrt"."""
    every = current().every
    return None if every in (None, 1) or _KEPT in node.meta else every


def kept(node: ir.Node) -> Kept:
    """What `node` keeps."""
    return node.meta.get(_KEPT) or (Kept.RESIDUALS if current().every is None else Kept.STATES)


def keep(node: ir.Node | None, what: Kept) -> None:
    """Decide what `node` keeps, whatever is asked for."""
    assert node is not None
    node.meta[_KEPT] = what
