"""The prediction of a model whose uncertainty is asked for: its kind, its logits, and the outputs that are written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import prune
from onnxgrad.model_io import AnyModel, open_model
from onnxgrad.model_io.aside import external_aside
from onnxgrad.model_io.read import as_given
from onnxgrad.runtime import Options
from onnxgrad.training.graph.bounds import bounds
from onnxgrad.training.loss.logits import Ending, logit, scores, sums_to_one
from onnxgrad.training.measure.comparisons import Comparison
from onnxgrad.training.measure.evaluate import labelled_rows, prediction_of
from onnxgrad.training.measure.kinds import alike, choose_comparison
from onnxgrad.training.measure.predict import batches_of

KINDS = ("classes", "binary", "numbers")


class PredictionGraph:
    """A private copy of a model with one output, and what that output holds.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        output: the prediction. Default: the first output of floats.
        kind: ``classes`` (scores of classes along axis 1), ``binary`` (log-odds or probabilities) or ``numbers``.
            Default: by the Softmax or Sigmoid that the model ends in, else ``numbers``.
        beside: an output that is kept, where the model has it: that of this suffix behind the name of the prediction.

    Attributes:
        model: the caller's.
        opened: the copy.
        graph: its graph.
        output: its prediction.
        kind: one of `KINDS`.
        beside: the output that is kept, or None.
        shares: True if the prediction holds probabilities, False if logits or numbers.
    """

    def __init__(
        self, model: AnyModel, output: str | None = None, kind: str | None = None, *, beside: str = ""
    ) -> None:
        if kind is not None and kind not in KINDS:
            raise BadInput(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
        self.model, self.opened = model, open_model(model)
        external_aside(self.opened.model)
        self.graph = self.opened.model.graph
        self.output = prediction_of(self.opened.model, output)
        self.name = self.output.name or "y"
        rank = len(self.output.shape or ())
        low, high = bounds(self.output)
        sums = rank > 1 and sums_to_one(self.output, 1)
        is_softmax = sums or (rank > 1 and scores(self.output, 1) is not None)
        self.shares = sums or (low >= 0 and high <= 1)
        self.kind = kind or ("classes" if is_softmax else "binary" if self.shares else "numbers")
        wanted = f"{self.name}{beside}"
        self.beside = next((v for v in self.graph.outputs if beside and v.name == wanted), None)
        self.graph.outputs[:] = [self.output, *([] if self.beside is None else [self.beside])]
        prune(self.graph)
        self.builder = Builder(self.graph)

    def logits(self) -> Ending | None:
        """The values whose Softmax or Sigmoid the prediction is; None if it is neither, or these are not known."""
        if self.kind == "numbers":
            return None
        return scores(self.output, 1) if self.kind == "classes" else logit(self.output)

    def probabilities(self, y: Var) -> Var:
        """Probabilities of `y`, a prediction; numbers as they are."""
        if self.kind == "numbers" or self.shares:
            return y
        return self.builder.Softmax(y, axis=1) if self.kind == "classes" else self.builder.Sigmoid(y)

    def measure(
        self, data: Any, labels: str | None, options: Options | None, beside: Sequence[ir.Value] = (), **settings: Any
    ) -> tuple[Comparison, Iterator[tuple[Any, ...]]]:
        """The comparison of the prediction with its labels, and of each batch the scores, the labels and more values.

        Args:
            data: rows with labels (see `onnxgrad.evaluate`).
            labels: the array of labels.
            options: how ONNX Runtime runs the model.
            beside: further values of the copy.
            settings: how data are prepared.
        """
        given = as_given(self.model)
        output = next(v for v in given.graph.outputs if v.name == self.name)
        rows, called = labelled_rows(given, data, output, labels, **settings)
        names, kept = [v.name or "" for v in beside], list(self.graph.outputs)
        self.graph.outputs[:] = list(dict.fromkeys([self.output, *beside]))
        running = self.opened.model.clone()
        self.graph.outputs[:] = kept
        found = batches_of(running, rows, list(dict.fromkeys([self.name, *names])), 256, options)
        first = batch, results = next(found)
        every = rows.arrays.get(called, batch[called])
        comparison = choose_comparison(given, results[self.name], batch[called], every, output, called)

        def batches() -> Iterator[tuple[Any, ...]]:
            for batch, results in itertools.chain([first], found):
                yield (*comparison(*alike(results[self.name], batch[called])), *(results[n] for n in names))

        return comparison, batches()

    def close(self, outputs: Mapping[str, Var]) -> Any:
        """The model with these outputs by name, in the kind of the caller's argument."""
        if self.output.name in outputs and self.output is not outputs[self.name].value:
            self.output.name = self.builder.names.fresh(f"{self.name}_plain")
        self.graph.outputs.clear()
        for name, var in outputs.items():
            value = var.value
            if value.producer() is None or value in self.graph.outputs:
                value = self.builder.copy(value).value
            value.name = name
            self.graph.outputs.append(value)
        prune(self.graph)
        self.opened.finish(self.builder)
        return self.opened.close()


def mean_and_spread(b: Builder, samples: Var) -> tuple[Var, Var]:
    """The mean and the standard deviation over the first axis."""
    mean = b.ReduceMean(samples, [0], keepdims=1)
    away = samples - mean
    return b.Squeeze(mean, [0]), b.Sqrt(b.ReduceMean(away * away, [0], keepdims=0))


def hold(model: ir.Model, stacks: Mapping[str, np.ndarray]) -> ir.Model:
    """`model` with the inputs named in `stacks` as initializers of these values."""
    graph = model.graph
    for name, array in stacks.items():
        value = next(v for v in graph.inputs if v.name == name)
        graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=name)
        graph.register_initializer(value)
    return model
