"""The functions that join the axes of a node, by operator, and the alignment of broadcasting that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxgrad.training.pruning.channels import Coupling, rank_of, size_of

Follower = Callable[[Coupling, ir.Node], None]
#: Normalizations that divide by the root of the mean of squares.
RMS = ("RMSNormalization", "SimplifiedLayerNormalization")
FOLLOWERS: dict[str, Follower] = {}


def follows(*names: str) -> Callable[[Follower], Follower]:
    """A decorator: the function joins the axes of these standard operators."""

    def decorate(function: Follower) -> Follower:
        FOLLOWERS.update(dict.fromkeys(names, function))
        return function

    return decorate


def broadcast(j: Coupling, operands: Sequence[ir.Value | None], out: ir.Value, skip: int = 0) -> None:
    """Axes of operands with those of the result, aligned at the last; the last `skip` are left out."""
    rank = rank_of(out)
    for x in operands:
        if x is None or x.shape is None:
            continue
        own = rank_of(x)
        for axis in range(own - skip):
            at = axis + rank - own
            if at < 0:
                continue
            if size_of(x, axis) == 1 and size_of(out, at) != 1:
                j.touch((x, axis), (out, at))
            else:
                j.join(x, axis, out, at)
