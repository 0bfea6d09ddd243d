"""Facts about a language model that its graph shows: scores of tokens, the vocabulary, the number of positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import reach, reads, scopes
from onnxgrad.ir.match import holds_floats, is_op
from onnxgrad.training.language.recipe import TaskRecipe

#: Rows of the table of segments of a sentence encoder.
MOST_SEGMENTS = 4
#: Operators whose results do not have tokens among their elements.
_COUNTS = ("Shape", "Size", "Equal", "Not", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or")


@dataclass(frozen=True)
class Limits:
    """Limits of a model.

    Attributes:
        vocabulary: how many tokens it scores, or looks up; None if unknown.
        positions: the rows of its table of positions; None without one.
    """

    vocabulary: int | None = None
    positions: int | None = None

    @classmethod
    def of(cls, model: ir.Model, prediction: str | None = None) -> Limits:
        """The limits of `model`."""
        tokens = [v for v in model.graph.inputs if _takes_tokens(v.name or "")]
        scores = _scores(model, prediction)
        last = scores.shape[-1] if scores is not None and scores.shape is not None and len(scores.shape) else None
        words: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for node in (n for graph in scopes(model.graph) for n in graph if is_op(n, "Gather")):
            table, indices = node.inputs[:2]
            if table is None or indices is None or node.attributes.get_int("axis", 0) != 0 or table.const_value is None:
                continue
            shape = table.const_value.shape.numpy()
            if len(shape) != 2 or table.dtype is None or not table.dtype.is_floating_point():
                continue  # such as quantized tables
            (words if set(reach([indices], _operands)) & set(tokens) else others).append((int(shape[0]), int(shape[1])))
        widths = {width for _, width in words}
        positions = [n for n, width in others if n > MOST_SEGMENTS and width in widths]
        vocabulary = last if isinstance(last, int) else min((n for n, _ in words), default=None)
        return cls(vocabulary, min(positions, default=None))


def _takes_tokens(name: str) -> bool:
    return "ids" in name and not any(part in name for part in ("position", "type", "segment"))


def _operands(value: ir.Value) -> list[ir.Value]:
    node = value.producer()
    return [] if node is None or is_op(node, _COUNTS) else reads(node)


def scores_of(model: ir.Model, name: str | None = None) -> ir.Value | None:
    """The output with scores of tokens: `name`, "logits", or the only or first one of floats of rank 3.

    Raises:
        BadInput: the model has none.
    """
    found = _scores(model, name)
    if found is None and name is None:
        raise BadInput("the model has no output of scores for tokens [N, T, vocabulary]; --prediction names one")
    return found


def _scores(model: ir.Model, name: str | None) -> ir.Value | None:
    if name is not None:
        return next((v for v in model.graph.outputs if v.name == name), None)
    floats = [v for v in model.graph.outputs if holds_floats(v)]
    if len(floats) == 1:
        return floats[0]
    named = [v for v in floats if (v.name or "").endswith("logits")]
    ranked = [v for v in floats if v.shape is not None and len(v.shape) == 3]
    return next(iter(named or ranked), None)


def with_task(asked: Mapping[str, Any], model: ir.Model, task: TaskRecipe) -> dict[str, Any]:
    """Arguments of `attach` for a language task, where `asked` has no others: its loss, over all labels that count.

    Raises:
        BadInput: the task is that of a detector.
    """
    task.check_text()
    found = {"loss": task.name if task.is_preference else "cross_entropy:ignore_index=-100,axis=-1", **asked}
    if not {"prediction", "output"} & found.keys() and (scores := scores_of(model)) is not None:
        found["prediction"] = scores.name
    return found
