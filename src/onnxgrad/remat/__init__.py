"""Rematerialization: a graph within a memory budget, in which residuals that do not fit are recomputed.

`sizes` (how large values are), `schedule` (in which order ONNX Runtime runs nodes, what is alive meanwhile), `costs`,
`choose` (what to keep), `rewrite` (the graph that does so), `plan` (all of it).
"""

from onnxgrad.remat.budget import amount, megabytes
from onnxgrad.remat.plan import Plan, within
from onnxgrad.remat.schedule import settle
from onnxgrad.remat.value_sizes import sizes

__all__ = ["Plan", "amount", "megabytes", "settle", "sizes", "within"]
