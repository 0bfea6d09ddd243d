"""A graph as ONNX Runtime's CPU kernels like it best: the same numbers, other operators. The original stays.

Each rewrite is a module that says what it gains and a `Rewrite` with a name, by which `Options(without=…)` leaves it
out; ``python -m benchmarks.rewrites`` measures each of them by that switch.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.ir.order import run_as
from onnxgrad.ir.walk import prune
from onnxgrad.optimize.blocked import BLOCKED
from onnxgrad.optimize.depthwise import DEPTHWISE
from onnxgrad.optimize.rewrite import Rewrite
from onnxgrad.optimize.rows import ROWS
from onnxgrad.optimize.thinned import THINNED
from onnxgrad.optimize.ties import TIES
from onnxgrad.optimize.tiles import TILES
from onnxgrad.optimize.together import TOGETHER, compute_soon

#: In the order in which they are applied.
REWRITES: tuple[Rewrite, ...] = (BLOCKED, DEPTHWISE, THINNED, TIES, TILES, ROWS, TOGETHER)


def optimized(model: ir.Model, without: Collection[str] = ()) -> ir.Model:
    """`model`, or a copy with every rewrite that finds something, but for those of the names in `without`."""
    changed = model
    for rewrite in REWRITES:
        if rewrite.name not in without and rewrite.applies(changed.graph):
            changed = model.clone() if changed is model else changed
            rewrite.apply(changed.graph)
            prune(changed.graph)
    if changed is not model:
        compute_soon(changed.graph)
        run_as(changed.graph, model.graph)
    return changed


__all__ = ["REWRITES", "Rewrite", "optimized"]
