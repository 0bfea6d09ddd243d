"""Attach a loss and an optimizer to an inference model, as a TrainingInfoProto.

The algorithm reads the inference graph and adds: the labels, the loss, one Gradient node, the optimizer
and its state, a counter of steps, the learning rate. Where the network behaves differently in training
(BatchNormalization, Dropout), the algorithm has a copy of that part of it (see `training_mode`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad import control_flow, rules  # noqa: F401  (they fill the registry)
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.cleanup import write_otherwise
from onnxgrad.ir.composites import spell_notes
from onnxgrad.ir.copies import copy_model
from onnxgrad.ir.graph import add_initializer, ancestors, prune, reads, subgraphs
from onnxgrad.model_io import AnyModel, load_model, open_model, training_info
from onnxgrad.model_io.aside import external_aside
from onnxgrad.model_io.save import gathered
from onnxgrad.settings import changed_settings, read_recipes, settings_of, takes
from onnxgrad.training.adapters.config import Adapter
from onnxgrad.training.adapters.insert import adapted
from onnxgrad.training.build.choose_weights import WeightChoice
from onnxgrad.training.build.cut_off import cut_off, put_back
from onnxgrad.training.build.heads import beside_head
from onnxgrad.training.build.pairs import EMBEDDINGS, paired
from onnxgrad.training.build.recipe import ALGORITHM, further_settings, option_spelling
from onnxgrad.training.graph.own_tensors import own_tensors
from onnxgrad.training.graph.rounding import is_rounding, standardize, through_rounding
from onnxgrad.training.graph.row_axis import row_axis
from onnxgrad.training.graph.tied_weights import tie_weights
from onnxgrad.training.graph.training_mode import Mode, exported_in_training, statistics, switch, to_inference
from onnxgrad.training.loss.config import Loss, terms_of
from onnxgrad.training.loss.objective import Objective
from onnxgrad.training.loss.step_metrics import names_in_step
from onnxgrad.training.metadata import AVERAGE, CONVENTION, FED, HEAD, MASKS, SCHEDULED, TAKEN_OF, TRAINS
from onnxgrad.training.optim.config import Optimizer
from onnxgrad.training.optim.optimizers import DEFAULT_OPTIMIZER, completed_settings
from onnxgrad.training.optim.schedules import Schedule
from onnxgrad.training.optim.second_order import LossOfWeights, write_step
from onnxgrad.training.optim.update import State, Update
from onnxgrad.training.pruning.in_training import WeightMasks
from onnxgrad.training.pruning.plan import PrunePlan
from onnxgrad.training.quantization.masters import with_masters
from onnxgrad.training.quantization.operators import open_operators
from onnxgrad.training.quantization.record import Storage, record_in
from onnxgrad.training.quantization.scales import LearnedScale, learned_scales
from onnxgrad.training.quantization.stochastic_rounding import COUNT, round_by_chance
from onnxgrad.training.spec.training_info import Source
from onnxgrad.transforms.gradient_node import DOMAIN
from onnxgrad.wording import type_text

if TYPE_CHECKING:
    from onnxgrad.training.build.keywords import AttachKeywords


_LARGE = "Trainer takes the model itself, and saves a training model with its weights beside it"


@takes(*ALGORITHM, others=True)
def attach(
    model: AnyModel,
    *,
    metrics: str | Sequence[str] = (),
    accumulate: bool = False,
    schedule: Schedule | str | None = None,
    **settings: Unpack[AttachKeywords],
) -> onnx.ModelProto:
    """The model with training information.

    The loss is cross_entropy by default. If the model ends in the Softmax (Sigmoid) that a loss contains, the loss is
    computed from the logits. If these are a product of rows and a matrix of 16384 columns or more, cross_entropy
    computes them by blocks of rows, also in the backward pass, and never stores all of them (``block_rows`` of the loss
    changes the size; 0: all at once).

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. It stays a valid inference model;
            weights in Constant nodes, in branches and bodies, or shared by chance, become initializers of their own
            (see `lift_weights`), and opsets below 18 are raised. Training information that it has is replaced.
        metrics: further results of the algorithm: accuracy, top5, mse, mae, gradient_norm.
        accumulate: also compute ``batch_weight``, by which gradients of parts of a batch are weighted.
        schedule: scales all learning rates in the graph, as a function of the number of steps.
        settings:

    Further settings of the optimizer (``betas``, ``eps``, …) are arguments as well, if `optimizer` is a name.
    ``output=`` is another name of `prediction`. With an adapter, BatchNormalization stays in inference mode, and a
    model that has an adapter already (see `load_adapter`) continues to train it.

    Raises:
        UnknownName, BadInput: a name that the model does not have, or an option that does not fit.
    """
    if isinstance(model, (str, os.PathLike)):
        model = load_model(model, aside=True)
    return gathered(
        attached(model, metrics=metrics, accumulate=accumulate, schedule=schedule, **settings).model, _LARGE
    )


def attached(
    model: AnyModel,
    *,
    metrics: str | Sequence[str] = (),
    accumulate: bool = False,
    cached: bool = False,
    schedule: Schedule | str | None = None,
    **settings: Any,
) -> Source:
    """The result of `attach` as a `Source`, which is neither read nor validated again.

    With `cached`, a loss that needs all rows of a batch is prepared for `cut_at_predictions` (see ``Source.compared``).
    """
    further = further_settings()
    rest = {name: settings.pop(name) for name in further if name in settings and name not in settings_of(*ALGORITHM)}
    output = rest.pop("output", None)
    loss, optimizer, weights, adapters = read_recipes(
        "attach", ALGORITHM, settings, ["model", "accumulate", *further], option_spelling
    )
    prediction = loss.prediction or output
    if loss.pairs is not None:
        model, prediction = paired(model, loss.pairs, prediction), EMBEDDINGS
    terms = terms_of("cross_entropy" if loss.loss is None else loss.loss, prediction, loss.labels)
    asked = {**changed_settings(optimizer), **rest}
    chosen = Optimizer.of(asked.pop("optimizer", None) or DEFAULT_OPTIMIZER, **asked, schedule=schedule)
    metrics = names_in_step(metrics)
    frozen = ["*"] if weights.freeze_bn is True else list(weights.freeze_bn or ())
    mode = Mode(weights.train_mode, frozen, weights.dropout or {})
    adapter, freeze = adapters.build_adapter(), weights.freeze or ()
    patterns = [*(weights.trainable or ()), *freeze, *(group.pattern for group in chosen.groups)]
    tied = None if weights.untie or adapter is not None else patterns
    if weights.update is not None:
        raise BadInput("update needs data to choose weights by: it is for onnxgrad.train and the command train")
    plans = [PrunePlan.of(text) for text in weights.prune]
    if plans and (adapter is not None or chosen.takes_loss):
        raise BadInput(f"prune is not for {'adapters' if adapter is not None else f'the optimizer {chosen.name!r}'}")
    attachment = _Attachment(model, weights.trainable, freeze, adapter, tied, plans)
    attachment.round_by_chance(weights.integers)
    with through_rounding(attachment.model):
        return attachment.attach(terms, chosen, mode, metrics, accumulate, cached)


class _Attachment:
    """One model to which an algorithm is attached: written behind the inference graph, then cut off it."""

    def __init__(
        self,
        model: AnyModel,
        trainable: Sequence[str] | None,
        freeze: Sequence[str],
        adapter: Adapter | None = None,
        chosen: Sequence[str] | None = None,
        plans: Sequence[PrunePlan] = (),
    ) -> None:
        self.model = open_model(model, standardize).model
        self.graph = self.model.graph
        external_aside(self.model)
        training_info(self.model).clear()
        self.model.metadata_props.pop(MASKS, None)
        if adapter is not None:
            adapter = beside_head(self.model, adapter)
            trainable = [*(trainable or ()), *adapter.train_also] or trainable
        self.model.metadata_props.pop(HEAD, None)
        own_tensors(self.model, trainable or ())
        tied = [] if chosen is None else tie_weights(self.graph, chosen)
        self.masks = WeightMasks(self.model, plans)
        self.adapter = adapted(self.model, adapter)
        self.scales = self._opened_integers(trainable, freeze)
        write_otherwise(self.graph)  # so that the stock runtime is right about the trained file
        self.model.opset_imports.setdefault(DOMAIN, 1)
        self.builder = Builder(self.graph, digests=False)  # its notes are spelled
        self.nodes = list(self.graph)
        self.switched = [n for n in self.nodes if exported_in_training(n)]
        to_inference(self.switched)
        self.held = set(self.graph.initializers)
        self.inputs = list(self.graph.inputs)
        self.bindings: dict[str, str] = {}
        self.choice = WeightChoice(
            self.model, self.nodes, self.held, self.scales, self.adapter, trainable, freeze, tied
        )

    def round_by_chance(self, integers: str) -> None:
        """Have stored integers learn without floats behind them, if `integers` is "stochastic"."""
        record = record_in(self.model) if integers == "stochastic" else None
        self.rounded = [] if record is None else list(record.weights)
        if integers == "stochastic" and not self.rounded:
            raise BadInput("integers='stochastic' is for models that store weights as integers; this one has none")
        self.steps: Var | None = None

    def _round(self, held: ir.Value, new: Var) -> Var:
        if self.steps is None:
            self.steps = self._add_initializer(COUNT, np.array(0), ir.DataType.INT64)
            self._bind(self.steps.value, self.builder.Add(self.steps, self.builder.const(np.array(1))))
        return round_by_chance(self.builder, new, held, self.steps, self.rounded.index(held.name or ""))

    def _opened_integers(self, trainable: Sequence[str] | None, freeze: Sequence[str]) -> dict[str, LearnedScale]:
        """Replace stored integers by floats, if any. Returns the scales that can train, by name.

        With an adapter, integers are unchanged.
        """
        if self.adapter is None:
            with_masters(self.model, opened=open_operators(self.model, trainable, freeze))
        elif any(is_rounding(n) for n in self.graph):
            Storage().write(self.model)
        return {} if self.adapter is not None else learned_scales(list(self.graph))

    def attach(
        self, terms: Sequence[Loss], optimizer: Optimizer, mode: Mode, metrics: Sequence[str], accumulate: bool,
        cached: bool = False,
    ) -> Source:  # fmt: skip
        """Write everything; the model with its training information."""
        if (self.adapter is not None or self.scales) and not mode.frozen and statistics(self.nodes):
            mode = replace(mode, frozen=["*"])
        mode.check(self.nodes)
        objective = Objective(
            self.builder, terms, self._output, partial(row_axis, self.model), whole=optimizer.name == "lm"
        )
        updates: dict[ir.Value, ir.Value] = {}
        copies: dict[ir.Value, ir.Value] = {}
        if mode.on:
            copies, updates = switch(self.builder, self.nodes, objective.predictions(), mode)
        gathered = objective.gather_predictions(copies) if cached and objective.needs_all_rows else {}
        loss = objective.write({**copies, **gathered}, metrics, accumulate and not gathered)
        if gathered:
            objective.count_once()
        parameters, owners = self.choice.choose(self.builder, loss.value, optimizer)
        for statistic, new in updates.items():
            self.bindings[statistic.name or ""] = new.name or ""
        state = State(self.builder, self._add_initializer, self._bind)
        update = Update(optimizer, state)
        if optimizer.takes_loss:
            if accumulate or updates or "gradient_norm" in metrics:
                what = "parts of a batch" if accumulate else "running statistics" if updates else "gradient_norm"
                raise BadInput(f"the optimizer {optimizer.name!r} takes the loss as a function: it has no {what}")
            ends = [copies.get(v, v) for v in objective.predictions()]
            function = LossOfWeights(self.builder, loss.value, ends, parameters)
            write_step(optimizer.name, completed_settings(optimizer.name, optimizer.settings), function, state)
        else:
            gradients = self._gradient(loss.value, parameters)
            self.optimizer = optimizer.name
            gradients = [
                s.gradient(self.builder, g) if (s := self.scales.get(x.name or "")) else g
                for x, g in zip(parameters, gradients)
            ]
            update.write(parameters, gradients, owners, "gradient_norm" in metrics)
            self.masks.write_scores(self.builder, self._add_initializer, self._bind, parameters, gradients)
        for held in self.graph.initializers.values() if optimizer.schedule is not None else ():
            if FED in held.metadata_props:
                held.metadata_props[SCHEDULED] = str(optimizer.schedule)
        if "gradient_norm" in metrics and update.norm is not None:
            update.norm.value.name = self.builder.names.exactly("gradient_norm")
            objective.measures["gradient_norm"] = update.norm
        info, join = self._cut(loss.name, [v.name for v in objective.measures.values()])
        trains = self.choice.note + self._describe_switched()
        notes = {CONVENTION: optimizer.convention(), TAKEN_OF: "; ".join(objective.notes), TRAINS: trains}
        for key, value in notes.items():
            if value:
                info.algorithm.metadata_props.add(key=key, value=value)
        model = copy_model(self.model)  # in which nothing that was cut off uses a value
        training_info(model).append(info)
        compared = [v.name or "" for v in gathered.values()]
        return Source(model, [info], objective.recorded, objective.named, compared, join)

    def _describe_switched(self) -> str:
        if not self.switched:
            return ""
        found = Counter(n.op_type for n in self.switched)
        counts = " and ".join(f"{count} {op_type}" for op_type, count in sorted(found.items()))
        return f"; {counts} of the file in training mode: the saved model has them in inference mode"

    def _output(self, name: str | None) -> ir.Value:
        values = {v.name or "": v for v in self.graph.outputs}
        if name is not None:
            values |= {v.name: v for node in self.nodes for v in node.outputs if v.name}
            if name not in values:
                raise UnknownName(name, values, "value")
            if values[name].dtype not in FLOATS:
                raise BadInput(f"{name!r} is a tensor of {type_text(values[name].dtype)}; a loss is taken of floats")
            return values[name]
        floats = [v for v in self.graph.outputs if v.dtype in FLOATS]
        if len(floats) != 1:
            found = ", ".join(repr(v.name) for v in floats) or "none"
            raise BadInput(f"name the output that meets the labels: output= (--prediction); float outputs: {found}")
        return floats[0]

    def _gradient(self, loss: ir.Value, parameters: list[ir.Value]) -> list[Var]:
        needed = {v for node in ancestors(self.graph, [loss]) for v in reads(node)}
        others = [v for v in self.graph.inputs if v in needed]
        node = ir.Node(
            DOMAIN,
            "Gradient",
            [*parameters, *others],
            [
                ir.AttrStrings("xs", [v.name or "" for v in parameters]),
                *([ir.AttrStrings("zs", [v.name or "" for v in others])] if others else []),
                ir.AttrString("y", loss.name or ""),
            ],
            num_outputs=len(parameters),
            name=self.builder.names.exactly("gradient"),
        )
        for value, like in zip(node.outputs, parameters):
            value.name = self.builder.names.exactly(identifier(f"{like.name}_grad"))
            value.type, value.shape = like.type, like.shape
        return list(self.builder.append(node))

    def _add_initializer(
        self,
        name: str,
        array: np.ndarray,
        dtype: ir.DataType,
        fed: bool = False,
        average: str | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> Var:
        """A new initializer of its own (constants of the builder are shared)."""
        name = self.builder.names.exactly(identifier(name))
        tensor = ir.Tensor(array.astype(dtype.numpy(), copy=False), dtype=dtype, name=name)
        value = add_initializer(self.graph, tensor)
        if fed:
            value.metadata_props[FED] = "rate"
        if average is not None:
            value.metadata_props[AVERAGE] = average
        value.metadata_props.update(notes or {})
        return Var(self.builder, value)

    def _bind(self, held: ir.Value, new: Var) -> None:
        new = self.masks.masked(self.builder, held, new, self._add_initializer, self._bind)
        if held.name in self.scales:
            new = self.scales[held.name].following(self.builder, new, self.optimizer)
        if held.name in self.rounded:
            new = self._round(held, new)
        if new.value.producer() is None or new.name in self.bindings.values():
            new = self.builder.copy(new)
        new.value.name = self.builder.names.exactly(identifier(f"{held.name}_next"))
        self.bindings[held.name or ""] = new.name

    def _cut(self, loss: str, measures: Sequence[str]) -> tuple[onnx.TrainingInfoProto, Callable[[], ir.Model] | None]:
        """Move the added nodes from the inference model into a training entry; the second result moves them back.

        It is None where nodes have bodies, or results that a graph which was inlined still lists as outputs.
        """
        graph = self.graph
        named = {v.name: v for node in graph for v in node.outputs}
        ends = [named[name] for name in dict.fromkeys([loss, *measures, *self.bindings.values()])]
        lasting = [v for n, v in graph.initializers.items() if n in self.held]
        prune(graph, [*(v for n in self.nodes for v in n.outputs), *lasting, *ends])
        spell_notes(graph)
        nodes = list(graph)[len(self.nodes) :]
        inputs = [v for v in graph.inputs if v not in self.inputs]
        added = [v for name, v in graph.initializers.items() if name not in self.held]
        info = cut_off(graph, nodes, inputs, added, ends, self.bindings)
        plain = not any(subgraphs(node) or any(v.is_graph_output() for v in node.outputs) for node in nodes)
        return info, partial(put_back, self.model, info, nodes, inputs, added) if plain else None
