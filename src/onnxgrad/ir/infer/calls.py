"""Types and shapes of calls of local functions: a table of the functions in use says what a call gives.

The library's own way types a body once for all calls that look alike, with the new symbols of the first: sizes
that only a run tells (how many elements are not zero) would then pass for equal in all of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.context import changed, current


class Calls(Protocol):
    """Local functions that stay functions."""

    def __contains__(self, node: ir.Node) -> bool:
        """Whether `node` calls one of them."""

    def infer(self, ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        """Set types and shapes of what a call gives."""


def calls_known(calls: Calls | None) -> AbstractContextManager[None]:
    """Within the ``with`` block, inference asks `calls`."""
    return nullcontext() if current().calls is calls else changed(calls=calls)


def register(domain: str, op_type: str) -> None:
    """Have inference ask the table in use about nodes that may be calls; all else stays as it was."""
    before = osi.registry.get(domain, op_type, 1)
    if hasattr(before, "onnxgrad_calls"):
        return
    for since in osi.registry.version_boundaries(domain, op_type) or (1,):
        osi.registry.register(domain, op_type, since)(_asking(osi.registry.get(domain, op_type, since)))


def _asking(otherwise):  # type: ignore[no-untyped-def]
    def infer(ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        calls = current().calls
        if calls is not None and node in calls:
            calls.infer(ctx, node)
        elif otherwise is not None:
            otherwise(ctx, node)

    infer.onnxgrad_calls = True  # type: ignore[attr-defined]
    return infer
