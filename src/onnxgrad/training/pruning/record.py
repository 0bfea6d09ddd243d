"""The record of pruning in a model: weights whose zeros stay zero, and how a run prunes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.training.metadata import PRUNED, read_record, record_text


@dataclass(frozen=True)
class PruningRecord:
    """The record in the metadata of a model.

    Attributes:
        weights: names of weights whose zeros stay.
        plan: how a run prunes, as the setting `prune` spells it.
    """

    weights: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()

    def write(self, model: ir.Model) -> None:
        """Store the record in `model`; an empty one is removed."""
        if self.weights or self.plan:
            model.metadata_props[PRUNED] = record_text(self)
        else:
            model.metadata_props.pop(PRUNED, None)


def record_in(model: ir.Model) -> PruningRecord:
    """The record of `model`; names of weights that it no longer has are left out.

    Raises:
        BadInput: it is of an unknown form.
    """
    found = read_record(model.metadata_props, PRUNED, _read) or PruningRecord()
    return PruningRecord(tuple(n for n in found.weights if n in model.graph.initializers), found.plan)


def _read(fields: Mapping[str, Any]) -> PruningRecord:
    weights, plan = fields["weights"], fields["plan"]
    if not all(isinstance(text, str) for text in (*weights, *plan)):
        raise ValueError
    return PruningRecord(tuple(weights), tuple(plan))


def record_masked(model: ir.Model, names: Sequence[str]) -> None:
    """Record weights whose zeros stay."""
    known = record_in(model)
    PruningRecord(tuple(dict.fromkeys([*known.weights, *names])), known.plan).write(model)
