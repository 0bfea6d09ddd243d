"""A step with its state, between calls of `fit`: what it takes, what it holds, and what is made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, warn_caller
from onnxgrad.model_io import save_model
from onnxgrad.remat import Plan
from onnxgrad.runtime import Options
from onnxgrad.training.adapters.folder import save_adapter
from onnxgrad.training.adapters.merge import merged
from onnxgrad.training.data import Data, Field, Images, Text
from onnxgrad.training.data.axes import first_dim
from onnxgrad.training.loop.checkpoint import check_state_fits
from onnxgrad.training.loop.checkpoint_parts import load_whole
from onnxgrad.training.loop.evaluation import Evaluation
from onnxgrad.training.loop.trainer_setup import AnyRunner, Setup
from onnxgrad.training.metadata import CLASSES, class_names
from onnxgrad.training.optim.averages import averaged
from onnxgrad.training.parallel.ranks import Ranks
from onnxgrad.training.parallel.sharded import Sharded, inference_state, load_state, whole_state
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.spec.training_info import Source
from onnxgrad.training.step.snapshot import standing, training_model
from onnxgrad.training.step.step import Step

R = TypeVar("R")

#: What `onnxgrad.training.data.open_data` can open, or data that were opened.
AnyData = Any


class Trained:
    """What a `Trainer` is but for the training: a step on a machine that holds its state."""

    step: Step
    machine: AnyRunner
    options: Options
    ranks: Ranks | None
    accumulate: int
    plan: Plan | None
    fingerprint: str
    fields: list[Field]
    classes: tuple[str, ...] | None

    def __init__(self, setup: Setup, evaluation: Evaluation | None) -> None:
        self._setup = setup
        self.step, self.plan, self.fingerprint = setup.step, setup.plan, setup.fingerprint
        self.ranks, self.accumulate, self.options = setup.ranks, setup.accumulate, setup.options
        self.machine = setup.run_by(self.options)
        self._why_not = ""
        self._evaluation = evaluation or self._default_evaluation()
        inputs = {v.name: v for v in self.step.model.graph.inputs}
        field = self._evaluation.field if self._evaluation else Field.of
        fields = [field(inputs[name]) for name in self.step.batch]
        outputs = [] if self.step.source is None else [first_dim(v) for v in self.step.source.model.graph.outputs]
        self.fields = [
            replace(f, batch=f.batch and f.batch * setup.parts, shares=first_dim(inputs[f.name]) in outputs)
            for f in fields
        ]
        self.classes = None if self.step.source is None else class_names(self.step.source.model)

    @property
    def initial(self) -> dict[str, np.ndarray]:
        """The state before the first step; made of the model when asked for, so that it is not kept twice."""
        return {name: t.initial.numpy() for name, t in self.step.state.items()}

    def _default_evaluation(self) -> Evaluation | None:
        try:
            return Evaluation.of(self.step, self.options)
        except BadInput as error:  # which matters only to those who want to evaluate
            self._why_not = str(error)
            return None

    @property
    def evaluation(self) -> Evaluation:
        """How validation data are measured. Raises BadInput if they cannot be."""
        if self._evaluation is None:
            raise BadInput(self._why_not)
        return self._evaluation

    def _follow(self, target: str) -> tuple[AnyRunner, str]:
        """The machine of a run that was begun on `target`, and its own: another one, if nobody said which to take."""
        if self._setup.is_free and target != self.options.target:
            if target == "portable" or replace(self.options, target="auto").settled().target == target:
                self.options = replace(self.options, target=target)
                self.machine = self._setup.run_by(self.options)
            else:
                warn_caller(
                    "the run was begun with kernels in C, which cannot be had here: it goes on with standard "
                    "operators, whose sums may be rounded differently"
                )
        return self.machine, self.options.target

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files: the first of several ranks does."""
        return self.ranks is None or self.ranks.is_first

    def data(
        self,
        data: AnyData,
        what: str = "the data",
        inputs: Mapping[str, str] | None = None,
        images: Images | None = None,
        text: Text | None = None,
    ) -> Data:
        """`data` as rows for this step.

        Args:
            data: see `fit`.
            what: to call them in messages.
            inputs: which columns feed which input (see `fit`).
            images: how pictures become arrays.
            text: how text becomes tokens.

        Raises:
            BadInput: they do not fit.
        """
        if isinstance(data, Data):
            if self.classes:
                data.number(self.classes)
            return data
        name = repr(os.fspath(data)) if isinstance(data, (str, os.PathLike)) else what
        return Data(data, self.fields, name, inputs=inputs, classes=self.classes, images=images, text=text)

    def training_data(
        self,
        data: AnyData,
        what: str = "the training data",
        inputs: Mapping[str, str] | None = None,
        images: Images | None = None,
        text: Text | None = None,
    ) -> Data:
        """The same of data to train on: the names of their classes are those of the model, if it has none yet."""
        rows = self.data(data, what, inputs, images, text)
        self.classes = self.classes or rows.classes
        return rows

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state. With `shard_optimizer`, all ranks call this."""
        return whole_state(self.machine)

    def _of_all(self, made: Callable[[], R]) -> R | None:
        """What the process that writes makes of the state; ranks that have shared it out all make it."""
        found = made() if self.is_writer or isinstance(self.machine, Sharded) else None
        return found if self.is_writer else None

    @property
    def optimizer_bytes(self) -> tuple[int, int]:
        """Bytes of what the optimizer keeps beside the weights: on this rank, and of all of it."""
        whole = sum(t.initial.nbytes for t in self.step.state.values() if t.kind == "optimizer")
        return self.machine.optimizer_bytes if isinstance(self.machine, Sharded) else whole, whole

    def inference_model(self) -> Any:
        """The inference model with the weights as they are now, an ``onnx_ir.Model``; adapters are merged into them.

        Weights that are stored as integers are rounded to integers again (see `onnxgrad.training.quantization`).
        If the training information keeps averages of weights, with these (``step.inference_model(state())`` has the
        weights themselves).
        """
        return self._finished(self.adapted_model())

    def adapted_model(self) -> Any:
        """The same with adapters beside the weights that they adapt, not merged into them."""
        return self.step.inference_model({name: array.copy() for name, array in self._present().items()})

    def _present(self) -> dict[str, np.ndarray]:
        """What the inference model has of the state, averages in the place of weights, where it lies."""
        state = averaged(self.step.source, inference_state(self.machine))
        others = {name for name, t in self.step.state.items() if t.kind not in ("parameter", "statistic")}
        return {name: array for name, array in state.items() if name not in others}

    def _finished(self, model: ir.Model) -> ir.Model:
        """`model` as it is handed out: adapters merged, masters of integers rounded, classes named."""
        return self._named(folded(merged(model)))

    def _named(self, model: ir.Model) -> ir.Model:
        if self.classes:
            model.metadata_props[CLASSES] = json.dumps(self.classes, ensure_ascii=False)
        return model

    def save_adapter(self, folder: str | os.PathLike) -> None:
        """Write the adapter into `folder`: for ONNX Runtime, for PEFT and for `load_adapter` (see `adapters.folder`).

        Raises:
            BadInput: the model has no adapter, or the folder cannot be written.
        """
        if self.step.source is None:
            raise BadInput("a step without the model that it was compiled from has no adapter to save")
        model = self._of_all(self.adapted_model)
        if model is not None:
            save_adapter(model, self.step.source.inference(), Path(folder))

    def training_model(self) -> Any:
        """The training model as it stands, an ``onnx_ir.Model``: present weights, counters, moments and averages.

        ``Trainer(trainer.training_model())`` goes on with the same bits, given the same batches.
        """
        machine = self.machine
        state = machine.whole() if isinstance(machine, Sharded) else machine.now
        return self._named(training_model(self._compiled_from(), state))

    def _compiled_from(self) -> Source:
        if self.step.source is None:
            raise BadInput("a step without the model that it was compiled from cannot be saved as a training model")
        return self.step.source

    def save_training_model(self, path: str | os.PathLike) -> None:
        """Write `training_model` to `path`, an ``.onnx`` file with a TrainingInfoProto.

        Raises:
            BadInput: it cannot be written there.
        """
        source, machine = self._compiled_from(), self.machine
        made = self._of_all(lambda: standing(source, machine.whole() if isinstance(machine, Sharded) else machine.now))
        if made is not None:
            model, moments = made
            save_model(self._named(model), path, moments)

    def restore(self, path: str | os.PathLike) -> None:
        """Take the state in the checkpoint at `path`, such as one of those that ``fit(keep=3)`` leaves.

        Raises:
            BadInput: there is none, it is damaged, or it belongs to another model.
        """
        found = load_whole(Path(path))
        check_state_fits(found, self.initial, Path(path))
        load_state(self.machine, found.state.items())
