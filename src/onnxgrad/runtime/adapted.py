"""A graph as ONNX Runtime's CPU kernels like it best: the same numbers, other operators. The original stays."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.walk import prune
from onnxgrad.runtime.blocked import blocked
from onnxgrad.runtime.ties import Ranking, without_ranking
from onnxgrad.runtime.tiles import concatenate, concatenations


def adapted(model: ir.Model) -> ir.Model:
    """`model`, or a copy: convolutions in blocks of channels, pooling that takes the short way back, slices joined."""
    changed = blocked(model)
    ranked = any(Ranking.ending_in(node) for node in changed.graph)
    summed = bool(concatenations(changed.graph))
    if ranked or summed:
        changed = model.clone() if changed is model else changed
    if ranked:
        without_ranking(changed.graph)
    if summed:
        concatenate(changed.graph)
        prune(changed.graph)
    return changed
