"""Losses of one's own: rows of data that show their labels, and the check on the first batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import named_values
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.labels import class_column
from onnxgrad.training.graph.inner_values import inner_values
from onnxgrad.training.loop.run import Run
from onnxgrad.training.loss.config import as_list, terms_of
from onnxgrad.training.loss.label_inputs import LABELS
from onnxgrad.training.loss.recorded import arranged, is_function

#: Rows that show the labels of a loss, and rows of the first batch that it is checked on.
_SHOWN, _CHECKED = 4, 32


def has_own(loss: Any) -> bool:
    """True if a term of `loss` is a function or a formula."""
    return any(is_function(getattr(t, "loss", t)) for t in as_list(loss))


def with_examples(loss: Any, model: ir.Model, columns: Mapping[str, Column], labels: str | None) -> Any:
    """`loss` with the first rows of `columns` as examples of what its functions read beside the model."""
    terms, known = terms_of(loss, labels=labels), named_values(model.graph)
    return [_with_examples(t, known, columns) if is_function(t.loss) else t for t in terms]


def _with_examples(term: Any, known: Mapping[str, Any], columns: Mapping[str, Column]) -> Any:
    _, _, fed = arranged(term.loss, known, term.labels)
    names = [f for f in fed if f is not None and f not in known]
    found = {}
    for name in names:
        usual = [c for c in columns if c.lower() in LABELS and c not in names and c not in known]
        called = name if name in columns else usual[0] if len(usual) == 1 and len(names) == 1 else None
        if called is not None and not columns[called].problem:
            column = class_column(columns[called])
            rows = column.take(np.arange(min(len(column), _SHOWN)), Field(name, np.dtype(np.float32), ()))
            if isinstance(rows, np.ndarray) and rows.dtype.kind in "fiub":
                found[name] = rows
    return term.with_loss(term.loss, examples={**found, **term.examples})


def check_on_first_batch(run: Run, batch: Mapping[str, np.ndarray]) -> None:
    """Compare each loss of one's own with its recorded graph, on some rows of `batch`.

    Raises:
        BadInput: the graph has another value or another derivative than the function.
    """
    source = run.step.source
    recorded = [] if source is None else list(source.recorded)
    if not recorded or not run.data.count(batch):
        return
    whole = run.data.whole
    few = {n: a if n in whole or run.data.fixed else a[:_CHECKED] for n, a in batch.items()}
    model = run.step.inference_model(run.inference_state())
    asked = {n for r in recorded for n in r.values if n not in few}
    if not asked <= named_values(model.graph).keys():  # of a part that training has another form of
        return
    found = next(inner_values(model, sorted(asked), [few], run.trainer.options))
    for loss in recorded:
        if all(n in few or n in found for n in loss.reads):
            loss.check({**few, **found})
