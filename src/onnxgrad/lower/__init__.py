"""Lowerings of operators without a rule: handwritten ones, or the function bodies of the specification."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir import Builder
from onnxgrad.lower import (  # noqa: F401  (they fill the registry)
    attention,
    contrib_attention,
    contrib_blocks,
    contrib_products,
    contrib_quantized,
    deform,
    function_bodies,
    optimizers,
    recurrent,
    regions,
    registry,
    sampling,
    spectral,
    transformer,
)


def expand(builder: Builder, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node`, in its graph, by other operators; the new nodes, or None if none are known."""
    new = registry.expand(builder, node)
    return function_bodies.expand(builder, node) if new is None else new


__all__ = ["expand"]
