"""Many predictions for each row, as one graph: by masks of Dropout, or by the weights of several models.

The model is a function of what differs between the predictions (the number that decides the masks; the weights), and
`onnxgrad.vmap` runs it for all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import prune
from onnxgrad.keywords import check_whole
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.read import as_given, read_proto
from onnxgrad.model_io.save import in_kind_of
from onnxgrad.settings import settings_of
from onnxgrad.training.graph.dropout_masks import drop_by_count, first_count
from onnxgrad.training.graph.training_mode import Mode, statistics, switch
from onnxgrad.training.loop.recipe import TRAINER
from onnxgrad.training.loop.train import train
from onnxgrad.training.loop.trainer import Trainer
from onnxgrad.training.step.digest import architecture
from onnxgrad.transforms.vmap import vmap
from onnxgrad.uncertainty.prediction import PredictionGraph, hold, mean_and_spread


def dropout(
    model: AnyModel,
    *,
    samples: int = 32,
    seed: int = 0,
    dropout: Mapping[str, float] | None = None,
    output: str | None = None,
    kind: str | None = None,
) -> Any:
    """Predictions with their spread over masks of Dropout (Gal, Ghahramani 2016).

    The masks are a function of the seed, so that equal batches give equal results. BatchNormalization stays in
    inference mode.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        samples: how many masks.
        seed: decides the masks.
        dropout: the share that is dropped behind nodes by type or name, where the exporter has left Dropout out, as
            ``{"Relu": 0.1}``.
        output: the prediction. Default: the first output of floats.
        kind: what it holds (see `onnxgrad.uncertainty.prediction.PredictionGraph`).

    Returns:
        A model with the outputs ``{output}``, the mean, of probabilities if they are scores of classes, and
        ``{output}_spread``, the standard deviation.

    Raises:
        BadInput: the model has no Dropout, and none is asked for.
    """
    check_whole(2, samples=samples)
    prediction = PredictionGraph(model, output, kind)
    graph, nodes = prediction.graph, list(prediction.graph)
    mode = Mode(True, ["*"] if statistics(nodes) else [], dropout or {})
    mode.check(nodes)
    copies, _ = switch(prediction.builder, nodes, [prediction.output], mode)
    if prediction.output not in copies:
        raise BadInput(
            "the prediction depends on no Dropout, so all samples would be the same\n  hint: --dropout Relu=0.1 (in "
            "Python dropout={'Relu': 0.1}) inserts it behind nodes of a type or name"
        )
    y = prediction.probabilities(prediction.builder.var(copies[prediction.output]))
    graph.outputs[:] = [y.value]
    prune(graph)
    count = drop_by_count(graph, [v.name or "" for v in graph.inputs])
    if not count:
        raise BadInput("the Dropout of the model computes its ratio, so its masks have no seed")
    graph.outputs[:] = [y.value] if len(graph.outputs) == 1 else [v for v in graph.outputs if v.name != f"{count}_next"]
    counts = first_count(seed) + np.arange(samples)
    return _over_samples(prediction, model, {count: counts})


def ensemble(models: Sequence[AnyModel], *, output: str | None = None, kind: str | None = None) -> Any:
    """Predictions of several models of one architecture, with their spread (Lakshminarayanan et al. 2017).

    Their weights are stacked, so that one graph computes all of them.

    Args:
        models: two or more, which differ in the values of their weights alone.
        output: the prediction. Default: the first output of floats.
        kind: what it holds (see `onnxgrad.uncertainty.prediction.PredictionGraph`).

    Returns:
        A model with the outputs ``{output}``, the mean, of probabilities if they are scores of classes, and
        ``{output}_spread``, the standard deviation.

    Raises:
        BadInput: fewer than two models, or models of different architectures.
    """
    if len(models) < 2:
        raise BadInput(f"an ensemble has two models or more, not {len(models)}")
    members = [PredictionGraph(m, output, kind) for m in models]
    first = members[0]
    held = [{n: v.const_value for n, v in m.graph.initializers.items() if v.const_value is not None} for m in members]
    for k, (other, weights) in enumerate(zip(members[1:], held[1:]), start=2):
        same = architecture(other.graph) == architecture(first.graph) and weights.keys() == held[0].keys()
        if not same or any(weights[n].shape != t.shape or weights[n].dtype != t.dtype for n, t in held[0].items()):
            raise BadInput(f"model {k} of the ensemble has another architecture than the first one")
    arrays = {n: [weights[n].numpy() for weights in held] for n in held[0]}
    stacks = {n: np.stack(a) for n, a in arrays.items() if any(not np.array_equal(a[0], x) for x in a[1:])}
    if not stacks:
        raise BadInput("the models of the ensemble have the same weights")
    if whole := [n for n, a in stacks.items() if a.dtype.kind in "iu"]:
        raise BadInput(f"the models of the ensemble differ in {whole[0]!r}, whole numbers, not weights")
    first.graph.outputs[:] = [first.probabilities(first.builder.var(first.output)).value]
    return _over_samples(first, models[0], stacks)


def train_members(
    model: AnyModel, data: Any, *, samples: int = 5, redraw: bool = False, seed: int = 0, **settings: Any
) -> list[onnx.ModelProto]:
    """Train `samples` copies of a model, with the seeds `seed`, `seed` + 1, …, for `ensemble`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        data: see `onnxgrad.train`.
        samples: how many.
        redraw: begin each one with other weights: those of two axes or more are drawn from a normal distribution with
            their own mean and deviation. Otherwise, the seed decides the order of rows and the masks of Dropout alone.
        seed: of the first one.
        settings: of `onnxgrad.train`.

    Raises:
        BadInput: as `onnxgrad.train`.
    """
    check_whole(2, samples=samples)
    found = []
    for k in range(samples):
        start = read_proto(model) if isinstance(model, onnx.ModelProto) else as_given(model).clone()
        if redraw:
            own = {name: value for name, value in settings.items() if name in settings_of(*TRAINER)}
            names = [n for n, t in Trainer(start, **own).step.state.items() if t.kind == "parameter"]
            _redraw(start, names, np.random.default_rng([seed, k]))
        trained = train(start, data, seed=seed + k, progress=False, **settings)
        found.append(trained.inference_model())
    return found


def _redraw(model: ir.Model, names: Sequence[str], draw: np.random.Generator) -> None:
    for name, value in model.graph.initializers.items():
        if name in names and value.const_value is not None and len(value.const_value.shape) > 1:
            old = value.const_value.numpy()
            new = draw.normal(old.mean(), old.std(), old.shape).astype(old.dtype)
            value.const_value = ir.tensor(new, name=name)


def _over_samples(prediction: PredictionGraph, model: AnyModel, stacks: Mapping[str, np.ndarray]) -> Any:
    """The mean and spread of the only output over the first axis of `stacks`, inputs or initializers by name."""
    (made,), name, rows = prediction.graph.outputs, prediction.name, len(next(iter(stacks.values())))
    if made.name != name:
        prediction.output.name = prediction.builder.names.fresh(f"{name}_plain")
        made.name = name
    prediction.opened.finish(prediction.builder)
    prediction.opened.kind = ir.Model
    single = prediction.opened.close()
    stacked = vmap(single, dict.fromkeys(stacks, 0), 0, axis_size=rows)
    both = PredictionGraph(hold(stacked, stacks), name)
    mean, spread = mean_and_spread(both.builder, both.builder.var(both.output))
    return in_kind_of(model, both.close({name: mean, f"{name}_spread": spread}))
