"""Rematerialization: a graph within a memory budget, in which residuals that do not fit are recomputed.

Modules: `value_sizes` (bytes of values), `schedule` (the order in which ONNX Runtime runs nodes, and the values alive
at each), `costs` (of recomputation), `choose` (the residuals to keep), `emit` (the graph that recomputes the others),
`budget` (of memory), `plan` (all of these).
"""

from onnxgrad.remat.budget import amount, megabytes
from onnxgrad.remat.plan import Plan, fit_budget
from onnxgrad.remat.schedule import settle
from onnxgrad.remat.value_sizes import sizes

__all__ = ["Plan", "amount", "fit_budget", "megabytes", "settle", "sizes"]
