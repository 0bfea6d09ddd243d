"""Single passes of a session, on a model: the model itself where none of them applies."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import onnx_ir as ir

from onnxgrad.ir.passes import run_passes
from onnxgrad.runtime.passes import OPTIMIZATION
from onnxgrad.runtime.setting import Setting


def passed(names: Collection[str], model: ir.Model, without: Collection[str] = ()) -> ir.Model:
    """`model` after the passes of these names, none of which fails."""
    found = run_passes(
        model,
        [p for p in OPTIMIZATION if p.name in names],
        lambda: Setting(model.graph, "native"),
        without,
    )
    assert not found.failed, found.failed
    return found.model


with_kernels = partial(passed, ("kernels", "attention", "convolutions"))
recurrent = partial(passed, ("recurrence",))
with_running_sums = partial(passed, ("running_sums",))
fused = partial(passed, ("elementwise",))
with_products = partial(passed, ("products",))
with_summed_rows = partial(passed, ("summed_rows",))
optimized = partial(passed, [p.name for p in OPTIMIZATION if p.phase == "rewrites"])
