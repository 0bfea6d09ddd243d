"""The optimizations of a step while it is compiled: passes over the graph of a training entry."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from onnxgrad.control_flow.recomputed import give_results_on_the_way_back, row_scans
from onnxgrad.ir.passes import Pass
from onnxgrad.training.graph.attention_blocks import attend_by_blocks, wants_blocks
from onnxgrad.training.graph.mixed_precision import Precision
from onnxgrad.training.graph.pool_order import exchangeable, pool_first

_PHASE = "step"


@dataclass
class StepSetting:
    """The settings that a step is compiled with, as of `compile_step`.

    Attributes:
        rows: how many queries attention takes at a time.
        precision, synchronized, gathered, without: as of `compile_step`.
        kept: names of values that stay what they are.
    """

    rows: int | str | None = None
    precision: Precision | None = None
    synchronized: str | None = None
    gathered: Collection[str] = ()
    without: Collection[str] = ()
    kept: Collection[str] = ()


POOL_FIRST: Pass[StepSetting] = Pass(
    "pool_first",
    _PHASE,
    "MaxPool before Relu",
    "a MaxPool that alone reads a Relu",
    lambda model, s: any(True for _ in exchangeable(model.graph, s.kept)),
    lambda model, s: pool_first(model.graph, s.kept),
)
ATTENTION_BLOCKS: Pass[StepSetting] = Pass(
    "attention_blocks",
    _PHASE,
    "attention by blocks of queries and keys, without a matrix of all scores",
    "products with a softmax between them, many keys",
    lambda model, s: wants_blocks(model.graph, s.rows),
    lambda model, s: attend_by_blocks(model.graph, s.rows),
    lambda s: "attention_rows is 0" if s.rows == 0 else "",
)
ROW_RESULTS: Pass[StepSetting] = Pass(
    "row_results",
    _PHASE,
    "results of a Scan given by its way back",
    "Scans of blocks of rows that the way back computes again",
    lambda model, _: bool(row_scans(model.graph)),
    lambda model, _: give_results_on_the_way_back(model.graph),
)
