"""A graph as ONNX Runtime's CPU kernels like it best: the same numbers, other operators. The original stays.

Each rewrite is a module with the reason for its gain, and a `Pass` with a name, by which `Options(without=…)` disables
it; ``python -m benchmarks.rewrites`` measures each of them by that switch.
"""

from __future__ import annotations

from onnxgrad.ir.passes import Pass
from onnxgrad.runtime.rewrites.average_pools import AVERAGE_POOLS
from onnxgrad.runtime.rewrites.batched_updates import BATCHED_UPDATES, compute_soon
from onnxgrad.runtime.rewrites.blocked_layout import BLOCKED_LAYOUT
from onnxgrad.runtime.rewrites.depthwise_weight import DEPTHWISE_WEIGHT
from onnxgrad.runtime.rewrites.einsum_products import EINSUM_PRODUCTS
from onnxgrad.runtime.rewrites.few_channels import FEW_CHANNELS
from onnxgrad.runtime.rewrites.few_pixels import FEW_PIXELS
from onnxgrad.runtime.rewrites.fewer_passes import FEWER_PASSES
from onnxgrad.runtime.rewrites.flat_depth import FLAT_DEPTH
from onnxgrad.runtime.rewrites.group_norms import GROUP_NORMS
from onnxgrad.runtime.rewrites.joined_slices import JOINED_SLICES
from onnxgrad.runtime.rewrites.known_rows import KNOWN_ROWS
from onnxgrad.runtime.rewrites.maxpool_ties import MAXPOOL_TIES
from onnxgrad.runtime.rewrites.narrow_rows import NARROW_ROWS
from onnxgrad.runtime.rewrites.phases import PHASES
from onnxgrad.runtime.rewrites.ranked_scalars import RANKED_SCALARS
from onnxgrad.runtime.rewrites.rolled_rows import ROLLED_ROWS
from onnxgrad.runtime.rewrites.scaled_channels import SCALED_CHANNELS
from onnxgrad.runtime.rewrites.scattered_rows import COLUMNS_OF_BATCHES, ROWS_OF_BATCHES, SCATTERED_ROWS
from onnxgrad.runtime.rewrites.short_transforms import SHORT_TRANSFORMS
from onnxgrad.runtime.rewrites.slow_functions import SLOW_FUNCTIONS
from onnxgrad.runtime.rewrites.stacked_slices import STACKED_SLICES
from onnxgrad.runtime.rewrites.stepped_transposes import STEPPED_TRANSPOSES
from onnxgrad.runtime.rewrites.strided_blocks import STRIDED_BLOCKS
from onnxgrad.runtime.rewrites.touched_rows import TOUCHED_ROWS
from onnxgrad.runtime.rewrites.turned_products import TURNED_PRODUCTS
from onnxgrad.runtime.rewrites.unexpanded import UNEXPANDED
from onnxgrad.runtime.rewrites.weight_blocks import WEIGHT_BLOCKS
from onnxgrad.runtime.rewrites.whole_rows import WHOLE_ROWS
from onnxgrad.runtime.setting import Setting

#: In the order in which they are applied.
REWRITES: tuple[Pass[Setting], ...] = (
    GROUP_NORMS,
    SCALED_CHANNELS,
    FEW_PIXELS,
    FEW_CHANNELS,
    FLAT_DEPTH,
    BLOCKED_LAYOUT,
    PHASES,
    DEPTHWISE_WEIGHT,
    WEIGHT_BLOCKS,
    STRIDED_BLOCKS,
    AVERAGE_POOLS,
    MAXPOOL_TIES,
    SHORT_TRANSFORMS,
    UNEXPANDED,
    EINSUM_PRODUCTS,
    JOINED_SLICES,
    STACKED_SLICES,
    ROLLED_ROWS,
    KNOWN_ROWS,
    TOUCHED_ROWS,
    SCATTERED_ROWS,
    WHOLE_ROWS,
    TURNED_PRODUCTS,
    FEWER_PASSES,
    STEPPED_TRANSPOSES,
    NARROW_ROWS,
    SLOW_FUNCTIONS,
    BATCHED_UPDATES,
    RANKED_SCALARS,
)

__all__ = ["COLUMNS_OF_BATCHES", "REWRITES", "ROWS_OF_BATCHES", "compute_soon"]
