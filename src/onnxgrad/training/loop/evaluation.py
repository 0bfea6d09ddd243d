"""Evaluation on held-out data: the inference model as saved, followed by the loss.

The algorithm of a training entry is split. Training-mode copies (BatchNormalization, Dropout) are put back into
inference mode, which makes them equal to their originals. The remaining nodes between the inference graph and the loss
are the *tail*: a small graph whose inputs are values of the inference graph and the labels. The same tail measures the
weights in memory after every epoch and the saved file, and neither measurement depends on training.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from onnxgrad.distributed import Alone, Collective, blocks, gathered
from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import into_input, named_values, prune, reads
from onnxgrad.ir.match import is_op, producer
from onnxgrad.model_io import load_model
from onnxgrad.model_io.local_functions import infer_types
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.session import session_source
from onnxgrad.runtime.widened import has_bfloat16
from onnxgrad.training.data import Data, Field
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.detection.heads import find_head
from onnxgrad.training.detection.predict import BoxDecoder
from onnxgrad.training.graph.class_labels import class_names
from onnxgrad.training.graph.training_mode import to_inference
from onnxgrad.training.loop.means import LossMean, find_means
from onnxgrad.training.loop.predictions import Prediction, add_outputs, find_predictions
from onnxgrad.training.measure.comparisons import Binary, Classes, Maps, Meter, are_shares
from onnxgrad.training.measure.detections import BoxMeter, feed_of
from onnxgrad.training.metadata import DETECTOR
from onnxgrad.training.metrics.registry import METRICS, WHILE_TRAINING, is_metric_of
from onnxgrad.training.optim.averages import with_averages
from onnxgrad.training.spec.training_info import Merged, Source, bindings, merge
from onnxgrad.training.step.step import Step


def plain_session(path: str | os.PathLike) -> onnxruntime.InferenceSession:
    """A session of ONNX Runtime for the file, with default options, except that it prints no warnings."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(session_source(path), options)


@dataclass
class Evaluation:
    """The evaluation of a training entry.

    Attributes:
        source: the training model.
        tail: the graph from values of the inference graph and labels to the loss, and to what is compared;
            none where the inference graph computes the loss itself.
        loss: output of the tail.
        means: those that the loss is a sum of, outputs of the tail.
        boundary: inputs of the tail that the inference graph computes.
        labels: batch inputs that the inference graph does not read.
        predictions: the outputs that are compared with labels.
        most_rows: the rows of a batch, where memory allows for no more.
    """

    source: Source
    tail: ir.Model | None
    loss: str
    boundary: list[str]
    labels: set[str]
    predictions: list[Prediction]
    means: list[LossMean]
    state: list[str] = field(default_factory=list)
    options: Options = field(default_factory=Options)
    most_rows: int | None = None

    def __post_init__(self) -> None:
        nodes = () if self.tail is None else self.tail.graph
        #: labels whose logarithms are taken, kept away from 0 by a Max: probabilities
        self.label_logarithms = {v.name for n in nodes if n.op_type == "Max" for v in reads(n) if v.name in self.labels}
        #: labels whose softmax is taken, of a quotient too: logits of a teacher
        softmaxes = [n for n in nodes if n.op_type == "LogSoftmax"]
        quotients = [d for n in softmaxes if (d := producer(n.inputs[0], "Div")) is not None]
        self.label_logits = {v.name for n in (*softmaxes, *quotients) for v in reads(n)}
        self._head: Session | None = None
        self._decoder: BoxDecoder | None = None

    @classmethod
    def of(cls, step: Step, options: Options | None = None) -> Evaluation:
        """The evaluation that belongs to a compiled step.

        Raises:
            BadInput: the loss depends on something that has no value outside of training.
        """
        if step.source is None:
            raise BadInput("a step without the model that it was compiled from cannot be evaluated")
        source = step.source
        model, own = measuring_graph(source, step)
        (loss,) = model.graph.outputs
        inference = {v.name or "" for n in source.model.graph for v in n.outputs}
        nodes = _tail_nodes(model.graph, loss, inference)
        state = list(step.state)
        options = options or Options()
        if not nodes:
            return cls(source, None, step.loss, [step.loss], set(), [], [LossMean(step.loss, None)], state, options)
        boundary = _cut(model.graph, nodes, loss, own - step.state.keys())
        head = source.inference().graph
        given = {v.name or "" for v in head.inputs} - set(head.initializers)
        read = {v.name for n in head for v in reads(n)}
        tail_inputs = {v.name for v in model.graph.inputs}
        labels = {n for n in step.batch if n not in given or (n not in read and n in tail_inputs)}
        others = {name for recorded in source.recorded for name in recorded.reads}
        predictions = [
            p for p in find_predictions(nodes, labels) if p.label not in others or not isinstance(p.comparison, Binary)
        ]
        means = find_means(loss, set(step.batch) - set(boundary))
        return cls(source, model, loss.name or "", boundary, labels, predictions, means, state, options)

    @cached_property
    def _tail(self) -> Session | None:
        return None if self.tail is None else Session(self.tail, self.options)

    def field(self, value: ir.Value) -> Field:
        """The dtype, shape and classes that data for the batch input `value` must have."""
        name = value.name or ""
        found = Field.of(value, label=name in self.labels)
        for recorded in self.source.recorded:  # whose formula may resemble another loss
            if name in recorded.reads:
                return replace(found, classes=recorded.classes.get(name), indices=name in recorded.classes)
        for p in self.predictions:
            if p.label == name and isinstance(p.comparison, Classes):
                return replace(found, classes=p.classes, ignored=p.ignored, indices=True)
            if p.label == name and isinstance(p.comparison, Binary):
                return replace(found, binary=True)
        return replace(found, binary=name in self.label_logarithms, logits=found.label and name in self.label_logits)

    def meters(self, metrics: Sequence[str] | None = None, classes: Sequence[str] | None = None) -> list[Meter]:
        """Build meters for `metrics` (default: the usual ones), one for each prediction.

        Args:
            metrics: names (see `onnxgrad.training.metrics.registry`); each is taken of the first prediction that it
                is defined for.
            classes: names of the classes, where they are known.

        Raises:
            BadInput: one is defined for none of the predictions.
        """
        if metrics is None:
            return [Meter(p.comparison) for p in self.predictions]
        metrics = [m for m in metrics if m not in self._of_boxes(metrics)]
        if not metrics:
            return []
        if not self.predictions:
            raise BadInput(
                f"the loss does not show which values it compares with labels, so {metrics[0]} cannot be taken\n"
                "  hint: `onnxgrad evaluate` measures the trained model"
            )
        shares: list[list[str]] = [[] for _ in self.predictions]
        for name in metrics:
            tasks = METRICS[name.partition(":")[0]].tasks.keys()
            fitting = (i for i, p in enumerate(self.predictions) if {p.comparison.task, *p.comparison.maps} & tasks)
            shares[next(fitting, 0)].append(name)
        classes = classes or class_names(self.source.model)
        return [
            Meter(Maps() if p.comparison.maps and Maps.fits(names) else p.comparison, names, classes)
            for p, names in zip(self.predictions, shares)
        ]

    def metrics(self, asked: Sequence[str] | None, watched: Iterable[str]) -> tuple[str, ...] | None:
        """The metrics to measure: the `asked` or the usual ones, with those that callbacks monitor."""
        names = [w.removeprefix("validation_") for w in watched if w.startswith("validation_")]
        names = [n for n in names if n.partition(":")[0] in METRICS]
        usual = [*self._of_boxes(None), *(n for m in self.meters() for n in m.running)]
        if asked is None and set(names) <= set(usual):
            return None
        return tuple(dict.fromkeys([*([n for n in usual if n != "top5"] if asked is None else asked), *names]))

    def __call__(
        self,
        state: Mapping[str, np.ndarray],
        data: Data,
        batch_size: int = 256,
        metrics: Sequence[str] | None = None,
        collective: Collective | None = None,
    ) -> dict[str, float]:
        """Loss and metrics of the inference model with the weights of `state` (with their averages, if it has them).

        The ranks of a `collective` measure a part of the batches each, and get the same numbers.
        """
        if self._head is None and self.boundary:
            self._head = Session(self._open_head(), self.options)
        return self._measure(self._head, data, batch_size, with_averages(self.source, state), metrics, collective)

    def file(
        self, path: str | os.PathLike, data: Data, batch_size: int = 256, metrics: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Loss and metrics of a saved inference model, run by plain ONNX Runtime.

        If the loss is taken of a value that is no output of the file (the logits before a final Softmax), the
        run asks for that value as well.
        """
        try:
            session = plain_session(path)
            with_outputs = {v.name for v in session.get_outputs()}
            if not {v.name for v in session.get_inputs()} <= set(data.names):  # columns of a table
                with_outputs = set()
        except Exception as error:
            if not has_bfloat16(load_model(path)):  # which no CPU provider supports directly
                raise BadInput(f"ONNX Runtime cannot load {os.fspath(path)!r}: {error}") from error
            with_outputs = set()
        weights = set(self.state).intersection([] if self._tail is None else self._tail.inputs)
        if with_outputs and set(self.boundary) <= with_outputs and not weights:
            return self._measure(Session(os.fspath(path), self.options), data, batch_size, {}, metrics)
        model = load_model(path)
        model = Preprocessing.of(model).behind_tables(model)
        held = {n: v.const_value for n, v in model.graph.initializers.items() if n in weights}
        known = {n: tensor.numpy().copy() for n, tensor in held.items() if tensor is not None}
        for name in sorted(weights - known.keys()):
            raise BadInput(f"the loss reads the weight {name!r}, which {os.fspath(path)!r} does not have")
        self._reduce(model.graph)
        return self._measure(Session(model, self.options) if self.boundary else None, data, batch_size, known, metrics)

    def _of_boxes(self, metrics: Sequence[str] | None) -> list[str]:
        """The metrics of boxes among `metrics`, or the usual ones; none if the model is no detector."""
        if DETECTOR not in self.source.model.metadata_props:
            return []
        return [m for m in (WHILE_TRAINING["boxes"] if metrics is None else metrics) if is_metric_of(m, "boxes")]

    def _box_meters(self, data: Data, metrics: Sequence[str] | None) -> list[BoxMeter]:
        """The meter of boxes in a list, if there are metrics of them and `data` has pictures with boxes."""
        names, feed = self._of_boxes(metrics), feed_of(data)
        if not names or feed is None:
            return []
        if self._decoder is None:
            model = self.source.inference()
            infer_types(model)
            head = find_head(model, (feed.letterbox.height, feed.letterbox.width))
            self._decoder = BoxDecoder(head, named_values(model.graph), self.options)
        return [BoxMeter(feed, self._decoder, names)]

    def _open_head(self) -> ir.Model:
        """The inference graph with its weights as inputs, so that one session serves all epochs."""
        model = self.source.inference()
        graph = model.graph
        for name in self.state:
            if name in graph.initializers:
                into_input(graph, name)
        infer_types(model)
        self._reduce(graph)
        return model

    def _reduce(self, graph: ir.Graph) -> None:
        """Reduce `graph` to the boundary and the inputs that it needs, in place."""
        graph.outputs[:] = add_outputs(graph, self.boundary)
        prune(graph)
        graph.inputs[:] = [v for v in graph.inputs if v.uses() or v.is_graph_output()]

    def _measure(
        self,
        head: Session | None,
        data: Data,
        batch_size: int,
        state: Mapping[str, np.ndarray],
        metrics: Sequence[str] | None,
        ranks: Collective | None = None,
    ) -> dict[str, float]:
        fixed, last = data.fixed, len(data) - 1
        size = fixed or min(batch_size, self.most_rows or batch_size)
        more = -len(data) % fixed if fixed else 0
        # the last row fills the last batch up, and then a batch alone, which is subtracted
        rows = np.minimum(np.arange(len(data) + (more + size if more else 0)), last)
        tail_inputs = [] if self._tail is None else self._tail.inputs
        inputs = {*tail_inputs, *(head.inputs if head is not None else ())}
        known = {k: v for k, v in state.items() if k in inputs}
        weights = self.source.model.graph.initializers
        for name in set(tail_inputs) - {*self.boundary, *data.names, *known}:
            known[name] = weights[name].const_value.numpy()  # type: ignore[union-attr]
        losses, ranks = [], ranks or Alone()  # the means of batches, with their denominators
        meters, boxes = self.meters(metrics, data.classes), self._box_meters(data, metrics)
        bounds = [size * n for n in blocks(-(-len(rows) // size), ranks.size)]
        own_rows = rows[bounds[ranks.rank] : bounds[ranks.rank + 1]]
        for low, batch in zip(range(bounds[ranks.rank], len(rows), size), data.batches(size, own_rows)):
            count = data.count(batch)
            own = min(count, max(len(data) - low, 0))
            feeds = batch | known
            if head is not None and self.boundary:
                feeds |= head.run({n: feeds[n] for n in head.inputs}, self.boundary)
            for box_meter in boxes:
                box_meter.add(feeds, range(low, low + own))
            found = feeds if self._tail is None else self._tail.run({n: feeds[n] for n in tail_inputs})
            share = 1.0 if own else -more / size
            counts = [share * float(count if m.denominator is None else found[m.denominator]) for m in self.means]
            losses.append([[float(found[m.value]) if n else 0.0, n] for m, n in zip(self.means, counts)])
            if len(losses) == 1:
                self._doubt(found)
            for p, meter in zip(self.predictions, meters if own else ()):
                meter.add(p.comparison.first_rows(found[p.value], own / count), batch[p.label][:own])
        if ranks.size > 1:
            everything = gathered(ranks, [losses, [m.sums() for m in meters] + [m.sums() for m in boxes]])
            meters, boxes = self.meters(metrics, data.classes), self._box_meters(data, metrics)
            for _, sums in everything:
                for join, own in zip([m.join for m in meters] + [m.join for m in boxes], sums):
                    join(own)
            losses = [loss for own, _ in everything for loss in own]
        values, counts_of = np.moveaxis(np.asarray(losses), -1, 0)
        with np.errstate(invalid="ignore"):
            measured = {"loss": float(((values * counts_of).sum(0) / counts_of.sum(0)).sum())}
        for found_by in [m.result() for m in meters] + [m.result() for m in boxes]:
            measured |= {k: v for k, v in found_by.items() if k not in measured}
        return measured

    def _doubt(self, found: Mapping[str, np.ndarray]) -> None:
        """Warn of scores that are taken for logits, and are probabilities by their numbers."""
        for p in self.predictions:
            noted = isinstance(p.comparison, Classes) and p.comparison.probabilities
            if type(p.comparison) is Classes and not noted and are_shares(found[p.value], p.comparison.axis):
                warnings.warn(
                    f"the scores that are compared with {p.label!r} lie between 0 and 1 and sum to 1: the loss takes "
                    "them for logits, and they look like probabilities\n"
                    "  hint: name the value before the activation with `output` (--prediction)",
                    stacklevel=2,
                )


def measuring_graph(source: Source, step: Step) -> tuple[ir.Model, set[str]]:
    """Inference graph and algorithm up to the loss, in inference mode, and the names of the algorithm's values."""
    merged, values = _entry_with(source, step)
    model = merged.model
    infer_types(model)
    to_inference(model.graph)
    _without_dropout(model.graph)
    model.graph.outputs[:] = [values[step.loss]]
    CommonSubexpressionEliminationPass()(model)
    return model, set(merged.own)


def _entry_with(source: Source, step: Step) -> tuple[Merged, dict[str, ir.Value]]:
    """The executed graph of the entry that computes the loss of `step`, and its values by name."""
    for index in range(len(source.infos)):
        if bindings(source, [index])[index].keys() <= step.state.keys():
            merged = merge(source, index, {}, set())
            values = named_values(merged.model.graph)
            if step.loss in values:
                return merged, values
    raise BadInput(f"the loss {step.loss!r} is no value of the training entry, so it cannot be evaluated")


def _without_dropout(graph: ir.Graph) -> None:
    """Have the readers of a Dropout in inference mode read its input, in place."""
    for node in graph:
        x = node.inputs[0] if is_op(node, "Dropout") else None
        if x is not None and not any(v.uses() for v in node.outputs[1:]):
            node.outputs[0].replace_all_uses_with(x, replace_graph_outputs=True)


def _tail_nodes(graph: ir.Graph, loss: ir.Value, inference: set[str]) -> list[ir.Node]:
    """The nodes, in order, between the inference graph and `loss`."""
    live = {loss}
    found = []
    for node in reversed(graph):
        if any(v in live for v in node.outputs) and not any(v.name in inference for v in node.outputs):
            live.update(reads(node))
            found.append(node)
    return found[::-1]


def _cut(graph: ir.Graph, nodes: list[ir.Node], loss: ir.Value, constants: set[str]) -> list[str]:
    """Keep only `nodes` in `graph`; values from other nodes become inputs. Returns the names of these."""
    inside = {v for n in nodes for v in n.outputs}
    boundary = []
    inputs: dict[ir.Value, ir.Value] = {}
    for node in nodes:
        for value in reads(node):
            if value in inside or value in inputs or (value.is_initializer() and value.name in constants):
                continue
            if value.producer() is not None:
                boundary.append(value.name or "")
            inputs[value] = ir.Value(name=value.name, type=value.type, shape=value.shape)
    for old, new in inputs.items():
        for user, i in tuple(old.uses()):  # also in bodies
            user.replace_input_with(i, new)
    graph.remove([n for n in graph if n not in set(nodes)], safe=False)
    for value in inputs:
        if value.is_initializer():
            graph.initializers.pop(value.name or "", None)
    graph.inputs[:] = list(inputs.values())
    graph.outputs[:] = [loss]
    prune(graph)
    return boundary
