"""A step with its state between calls of `fit`: accepted data, current state, and derived models."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, json_text, warn_caller
from onnxgrad.model_io import save_model
from onnxgrad.model_io.save import gathered
from onnxgrad.remat import Plan
from onnxgrad.runtime import Options
from onnxgrad.training.adapters.merge import merged
from onnxgrad.training.build.pairs import unpaired
from onnxgrad.training.data import Data, Field
from onnxgrad.training.data.axes import first_dim
from onnxgrad.training.data.items import is_stream
from onnxgrad.training.data.masks import GROUND
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.data.sources import source_name
from onnxgrad.training.data.streams import Stream
from onnxgrad.training.graph.class_labels import class_names
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.language.shift import warn_of_unshifted
from onnxgrad.training.loop.checkpoint import Checkpoint, check_state_fits
from onnxgrad.training.metadata import CLASSES, PREPROCESSING
from onnxgrad.training.optim.averages import with_averages
from onnxgrad.training.parallel.ranks import Ranks
from onnxgrad.training.parallel.strategy import AnyMachine, Strategy
from onnxgrad.training.pruning.in_training import narrowed, with_masks
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.spec.training_info import Source
from onnxgrad.training.step.snapshot import standing, training_model
from onnxgrad.training.step.step import Step

if TYPE_CHECKING:
    from onnxgrad.training.loop.evaluation import Evaluation

#: Sources that `onnxgrad.training.data.open_data` accepts, or opened data.
AnyData = Any


#: How a model that is too large for one message is had.
_LARGE = "trainer.save(path), or save_training_model(path), writes it with its weights in a file of their own"


@dataclass(frozen=True)
class Setup:
    """A step, with the machine and options that run it.

    Attributes:
        step: the step of a whole batch.
        plan: what is kept and what is computed anew, where memory is bounded.
        planned: the most rows of a batch that this is for.
        strategy: how processes share the work of a run.
        accumulate: into how many parts a rank cuts what it has of a batch.
        options: how ONNX Runtime runs the step, the target decided.
        is_free: True if the caller did not set the target.
        machine: builds the machine that runs the step, by the strategy and the options.
    """

    step: Step
    plan: Plan | None
    planned: int | None
    strategy: Strategy
    accumulate: int
    options: Options
    is_free: bool
    machine: Callable[[Strategy, Options], AnyMachine]

    @property
    def parts(self) -> int:
        """The number of parts of a batch, on all ranks."""
        return self.accumulate * self.strategy.ranks.size


class Trained:
    """The base of `Trainer`: a step with its state, the data that it accepts, and the derived models."""

    preprocessing: Preprocessing
    path: str | None = None
    peak: str = ""

    def __init__(self, setup: Setup, evaluation: Evaluation | None, task: TaskRecipe = TaskRecipe()) -> None:
        self._setup, self.task = setup, task
        self.step, self.plan = setup.step, setup.plan
        self.fingerprint = setup.step.fingerprint
        self.strategy, self.accumulate, self.options = setup.strategy, setup.accumulate, setup.options
        self.strategy.use(setup.machine(self.strategy, self.options))
        self._why_not = ""
        if evaluation is not None:
            self._evaluation = evaluation
        source = self.step.source
        self.preprocessing = Preprocessing() if source is None else Preprocessing.of(source.model)

    @cached_property
    def fields(self) -> list[Field]:
        """The arrays of a batch."""
        inputs = {v.name: v for v in self.step.model.graph.inputs}
        field = self._evaluation.field if self._evaluation else Field.of
        fields = [field(inputs[name]) for name in self.step.batch]
        outputs = [] if self.step.source is None else [first_dim(v) for v in self.step.source.model.graph.outputs]
        return [
            replace(f, batch=f.batch and f.batch * self._setup.parts, shares=first_dim(inputs[f.name]) in outputs)
            for f in fields
        ]

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of their numbers, where the model or its training data say them."""
        if self.step.source is None:
            return None
        scores = () if self._evaluation is None else self._evaluation.boundary
        counts = {f.classes for f in self.fields if f.classes is not None}
        return class_names(self.step.source.model, scores, counts.pop() if len(counts) == 1 else None)

    @property
    def machine(self) -> AnyMachine:
        """The step with the state that this process has of it."""
        return self.strategy.machine

    @property
    def ranks(self) -> Ranks | None:
        """The processes that train together, if there are several."""
        return self.strategy.shared_ranks

    @property
    def initial(self) -> dict[str, np.ndarray]:
        """The state before the first step, computed from the model on demand, so that no second copy is kept."""
        return {name: t.initial.numpy() for name, t in self.step.state.items()}

    @cached_property
    def _evaluation(self) -> Evaluation | None:
        """The evaluation of validation data, if the loss has a value outside of training."""
        from onnxgrad.training.loop.evaluation import Evaluation

        try:
            return Evaluation.of(self.step, self.options)
        except BadInput as error:  # which matters only for evaluation
            self._why_not = str(error)
            return None

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation of validation data. Raises BadInput if the loss has no value outside of training."""
        if self._evaluation is None:
            raise BadInput(self._why_not)
        return self._evaluation

    def follow(self, target: str) -> None:
        """Change to `target`, on which a run was begun, unless the caller has set another."""
        if self._setup.is_free and target != self.options.target:
            if target == "portable" or replace(self.options, target="auto").resolve_target().target == target:
                self.options = replace(self.options, target=target)
                self.strategy.use(self._setup.machine(self.strategy, self.options))
            else:
                warn_caller(
                    "the run was begun with kernels in C, which cannot be had here: it goes on with standard "
                    "operators, whose sums may be rounded differently"
                )

    @property
    def is_writer(self) -> bool:
        """True if this process writes files: the first of several ranks does."""
        return self.strategy.ranks.is_first

    def data(
        self,
        data: AnyData,
        what: str = "the data",
        preparation: PreparationRecipe = PreparationRecipe(),
        fit_rows: np.ndarray | None = None,
    ) -> Data:
        """`data` as rows for this step.

        Args:
            data: see `fit`.
            what: to call them in messages.
            preparation: how columns, images and text become arrays, where that is not as the model was trained.
            fit_rows: the rows that the preparation of tables is fitted on. Default: all.

        Raises:
            BadInput: they do not fit.
        """
        from onnxgrad.training.language.task import prepared

        if isinstance(data, Data):
            if self.classes:
                data.number(self.classes)
            return data
        name, model = source_name(data, what), None if self.step.source is None else self.step.source.model
        data, arguments = prepared(data, self.task, preparation, self.preprocessing, model)
        classes = self._classes(preparation)
        return Data(data, self.fields, name, classes=classes, fit_rows=fit_rows, **arguments)

    def training_data(
        self,
        data: AnyData,
        what: str = "the training data",
        preparation: PreparationRecipe = PreparationRecipe(),
        fit_rows: np.ndarray | None = None,
    ) -> Data | Stream:
        """Open data to train on; the model records their preprocessing, and their class names if it has none."""
        for name, features in self.preprocessing.inputs.items():
            if preparation.tables is not None and features.table is not None:
                features.table.check(preparation.tables, name)
        rows = self._stream(data, what, preparation) or self.data(data, what, preparation, fit_rows)
        if not self.task.name and isinstance(rows, Data):
            warn_of_unshifted(rows)
        self.classes = self.classes or rows.classes
        self.preprocessing = self.preprocessing.updated(rows.preprocessing)
        return rows

    def _stream(self, data: AnyData, what: str, preparation: PreparationRecipe) -> Stream | None:
        """`data` as a stream, if they are one or are to be read as one. Raises BadInput where a setting needs rows."""
        from onnxgrad.training.language.task import prepared_stream

        if isinstance(data, Stream):
            return data
        if not is_stream(data) and not preparation.is_streamed:
            return None
        if preparation.holds_out:
            raise BadInput(
                f"validation_split needs all rows, and {source_name(data, what)} is a stream\n"
                "  hint: validation= (--validation) has rows of its own"
            )
        if not is_stream(data) and not isinstance(data, (str, os.PathLike)):
            raise BadInput("stream and shuffle_buffer are for files and streams; these data lie in memory")
        model = None if self.step.source is None else self.step.source.model
        arguments = prepared_stream(self.task, preparation, self.preprocessing, model)
        classes = self._classes(preparation)
        return Stream(
            data, self.fields, source_name(data, what), classes=classes,
            shuffle_buffer=preparation.buffer_rows, **arguments,
        )  # fmt: skip

    def _classes(self, preparation: PreparationRecipe) -> tuple[str, ...] | None:
        """The names of classes: those of the model, or those of `preparation`, which may leave its background out."""
        given, own = preparation.class_names, self.classes or ("",)
        chosen = given is not None and own[0].lower() in GROUND and own[1:] == given
        return given if chosen else self.classes or given

    def check_classes(self, *data: Data | Stream | None) -> None:
        """Raise BadInput for `data` whose classes are not as many as the scores of the model."""
        names = None if self.step.source is None else class_names(self.step.source.model)
        for rows in data:
            if rows is not None:
                rows.check_classes(own=self.classes is not None and self.classes == names)

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state. With `shard_optimizer`, all ranks call this."""
        return dict(self.strategy.whole_state())

    @property
    def optimizer_bytes(self) -> tuple[int, int]:
        """The bytes of the optimizer's state without weights: on this rank, and in total."""
        whole = sum(t.initial.nbytes for t in self.step.state.values() if t.kind == "optimizer")
        return self.strategy.optimizer_bytes(whole), whole

    def inference_model(self) -> onnx.ModelProto:
        """The inference model with the current weights, for ``onnx.save``; adapters are merged into them.

        Weights that are stored as integers are rounded to integers again (see `onnxgrad.training.quantization`).
        If the training information keeps averages of weights, with these (``step.inference_model(state())`` has the
        weights themselves).

        Raises:
            BadInput: it is too large for one message; `Trainer.save` writes it.
        """
        return gathered(self.inference_ir(), _LARGE)

    def inference_ir(self) -> ir.Model:
        """`inference_model` as an ``onnx_ir.Model``, of any size."""
        return self._finished(self.adapted_model())

    def adapted_model(self) -> ir.Model:
        """`inference_ir` with adapters as separate nodes, not merged into the weights."""
        return self.step.inference_model({name: array.copy() for name, array in self._present().items()})

    def _present(self) -> dict[str, np.ndarray]:
        """The state that the inference model needs, averages in place of weights, not copied."""
        state = with_averages(self.step.source, self.strategy.inference_state())
        state = with_masks(self.step.source, state)
        others = {name for name, t in self.step.state.items() if t.kind not in ("parameter", "statistic")}
        return {name: array for name, array in state.items() if name not in others}

    def _finished(self, model: ir.Model) -> ir.Model:
        """`model` for the caller: adapters merged, masters rounded, pruned channels removed, data described."""
        model = unpaired(narrowed(folded(merged(model))))
        model.metadata_props.pop(PREPROCESSING, None)
        return self._named(model, self.preprocessing.in_front_of(model))

    def _named(self, model: ir.Model, preprocessing: Preprocessing | None = None) -> ir.Model:
        preprocessing = self.preprocessing if preprocessing is None else preprocessing
        if self.classes:
            model.metadata_props[CLASSES] = json_text(self.classes)
        fed = {v.name for v in model.graph.inputs}
        own = {name: columns for name, columns in preprocessing.inputs.items() if name in fed}
        replace(preprocessing, inputs=own).write(model)
        return model

    def save_adapter(
        self, folder: str | os.PathLike, *, switchable: bool = False, base: str | os.PathLike | None = None
    ) -> None:
        """Write the adapter into `folder`: for ONNX Runtime, for PEFT and for `load_adapter` (see `adapters.folder`).

        Args:
            folder: the folder to write; it is created if it is missing.
            switchable: also write ``model.onnx``, a copy of the model before training to which ONNX Runtime adds this
                and other adapters (``onnxruntime.LoraAdapter``).
            base: the file of the model, which PEFT's settings name. Default: the path that the trainer was made from.

        Raises:
            BadInput: the model has no adapter, or the folder cannot be written.
        """
        from onnxgrad.training.adapters.folder import save_adapter

        if self.step.source is None:
            raise BadInput("a step without the model that it was compiled from has no adapter to save")
        model = self.strategy.on_writer(self.adapted_model)
        path = self.path if base is None else os.fspath(base)
        if model is not None:
            inference = self._named(self.step.source.inference())
            save_adapter(model, inference, Path(folder), switchable=switchable, path=path)

    def training_model(self) -> onnx.ModelProto:
        """The training model with the current weights, counters, moments and averages.

        ``Trainer(trainer.training_model())`` continues with the same bits, given the same batches.
        """
        state = self.strategy.whole_state(copy=False)
        return gathered(self._named(training_model(self._compiled_from(), state)), _LARGE)

    def _compiled_from(self) -> Source:
        if self.step.source is None:
            raise BadInput("a step without the model that it was compiled from cannot be saved as a training model")
        return self.step.source

    def save_training_model(self, path: str | os.PathLike) -> None:
        """Write `training_model` to `path`, an ``.onnx`` file with a TrainingInfoProto.

        Raises:
            BadInput: it cannot be written there.
        """
        source, strategy = self._compiled_from(), self.strategy
        made = strategy.on_writer(lambda: standing(source, strategy.whole_state(copy=False)))
        if made is not None:
            model, moments = made
            save_model(self._named(model), path, moments)

    def restore(self, path: str | os.PathLike) -> None:
        """Load the state from the checkpoint at `path`, such as one of those that ``fit(keep=3)`` leaves.

        Raises:
            BadInput: there is none, it is damaged, or it belongs to another model.
        """
        found = Checkpoint.load(Path(path))
        check_state_fits(found, self.initial, Path(path))
        self.strategy.load_state(found.state.items())
