"""Kernels in C for operators that are slow in standard form, in a library built at install time.

A derived graph has standard operators only. If its emitter has *named* a part (`onnxgrad.ir.composites`), a session
(except with ``Options(target="portable")``) replaces the part by a kernel call of that name, in a copy of the graph. So
the graph, its state and its files are the same for both targets, the operators are the oracle of every kernel, and
parts without a kernel run as operators.

To add a kernel, here and elsewhere:

1. **Name the part** where it is emitted, after it was emitted: ``b.named("GroupNormGrad", [dx, …], of=[g, x, scale])``.
   Everything that `dx` is computed from must be in ``of``, a constant, or a shape. Attributes that the kernel needs go
   by name: ``b.named(…, groups=4, epsilon=1e-5)``.
2. **Write the kernel** in ``source/*.c`` (see ``source/kernel.h``, whose head shows a whole one). A new file names
   its table in ``source/library.c``.
3. **Say when it fits** in a module ``*_kernels.py`` (a new one is named in `substitute`): a function from the
   `Occurrence` of the part to a `KernelCall`, or None where the kernel does not fit (its type, its rank, its size)::

       @kernel("GroupNormGrad")
       def group_norm_grad(site: Occurrence) -> KernelCall | None:
           return KernelCall("GroupNormGrad", site.inputs, site.attributes) if site.all_float32 else None

4. **Test it** in ``tests/runtime/kernels``: the same model with both targets, over shapes of 0, 1, odd and large sizes,
   NaN and infinities, one and two threads (``compare`` of ``twins.py`` there).

Modules: `processors` (kinds of processors), `libraries` (the shared library of this one), `substitute`
(parts to calls), `in_place` (which state a call may overwrite), ``*_kernels`` (what fits where), `elementwise` (groups
of operators without a name, to `programs`), `open_norms` (normalizations that these groups finish), `recurrence`
(Scans, to programs), `running_sums` (of their steps), `products` (of matrices, likewise),
`convolutions` (of 3×3 taps), `near_attention` (Transposes that `attention` takes in), `summed_rows` (sums along edges
and of segments), `again` (cheap results that are computed twice, for memory).
"""

from onnxgrad.runtime.kernels.again import compute_again
from onnxgrad.runtime.kernels.elementwise import ELEMENTWISE
from onnxgrad.runtime.kernels.factored_updates import FACTORED_UPDATES, LAST_BLOCKS
from onnxgrad.runtime.kernels.in_place import in_place
from onnxgrad.runtime.kernels.libraries import has_kernels, installed, library, overwrites
from onnxgrad.runtime.kernels.products import PRODUCTS
from onnxgrad.runtime.kernels.recurrence import RECURRENCE
from onnxgrad.runtime.kernels.running_sums import RUNNING_SUMS
from onnxgrad.runtime.kernels.substitute import ATTENTION, CONVOLUTIONS, KERNELS, wants_kernels
from onnxgrad.runtime.kernels.summed_rows import GATHERED_SUMS, SUMMED_ROWS

__all__ = [
    "ATTENTION",
    "CONVOLUTIONS",
    "ELEMENTWISE",
    "FACTORED_UPDATES",
    "GATHERED_SUMS",
    "KERNELS",
    "LAST_BLOCKS",
    "PRODUCTS",
    "RECURRENCE",
    "RUNNING_SUMS",
    "SUMMED_ROWS",
    "compute_again",
    "has_kernels",
    "in_place",
    "installed",
    "library",
    "overwrites",
    "wants_kernels",
]
