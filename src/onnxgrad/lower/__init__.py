"""Operators without a rule: written out by hand, or the specification's own function bodies."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir import Builder
from onnxgrad.lower import (  # those but the bodies fill the table of written
    attention,  # noqa: F401
    bodies,
    deform,  # noqa: F401
    optimizers,  # noqa: F401
    recurrent,  # noqa: F401
    regions,  # noqa: F401
    sampling,  # noqa: F401
    spectral,  # noqa: F401
    transformer,  # noqa: F401
    written,
)


def expand(builder: Builder, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node`, in its graph, by other operators; the new nodes, or None if none are known."""
    new = written.expand(builder, node)
    return bodies.expand(builder, node) if new is None else new


__all__ = ["expand"]
