"""Recipes of a run: the step, its processes, the data, the loop, monitoring and logging."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import onnxruntime

from onnxgrad.distributed import Collective
from onnxgrad.errors import BadInput
from onnxgrad.keywords import UnknownKeyword, check_kind, check_whole
from onnxgrad.runtime import Options
from onnxgrad.settings import changed_settings, read_recipes, setting, settings_of
from onnxgrad.training.build.recipe import (
    ALGORITHM,
    AdapterRecipe,
    LossRecipe,
    OptimizerRecipe,
    WeightsRecipe,
    further_settings,
    option_spelling,
)
from onnxgrad.training.data.augment import Augment
from onnxgrad.training.data.column_fit import TableSettings
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.data.table import CATEGORIES, MISSING
from onnxgrad.training.detection.recipe import DetectionRecipe
from onnxgrad.training.language.recipe import DETECTION, TaskRecipe
from onnxgrad.training.loop.loop_recipe import File, LoopRecipe
from onnxgrad.training.loop.run import Callback
from onnxgrad.training.metrics.registry import OF_PREDICTIONS, names_of
from onnxgrad.training.option_strings import one_of
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.parallel.ranks import Ranks

if TYPE_CHECKING:
    from onnxgrad.training.loop.evaluation import Evaluation


@dataclass(frozen=True)
class StepRecipe:
    """The settings for the computation of one step."""

    panel: ClassVar[str] = "Run"

    accumulate: int = setting(1, "Cut every batch into so many parts, one after the other, to need less memory.")
    memory: int | str | None = setting(
        None,
        "The results of a step may take so much at a time (200MB); those that do not fit are computed anew.",
        kind=str,
    )
    peak: int | str | None = setting(
        None,
        "The process grows by at most so much for training (64MB): results computed anew, parts of batches, adapters "
        "and fewer layers are tried in turn, and measured.",
        kind=str,
    )
    precision: str | None = setting(
        None, "fp16 or bf16: products in 16 bits beside float32 weights, on a provider with them."
    )
    attention_rows: int | None = setting(
        None, "How many queries attention takes at a time; 0: all. Default: by the length."
    )
    dims: Mapping[str, int] | None = setting(
        None,
        "Sizes of dimensions that the model leaves open, for `memory`: N=64.",
        python="As {'N': 64}.",
        short=("--dim",),
        many=True,
    )
    entry: int | None = setting(None, "Which of the training entries of the model, from 0. Default: all, in turn.")
    evaluation: Evaluation | None = setting(
        None,
        "Evaluation(…): how validation data are measured. Default: by the training information.",
        instead="an evaluation of your own is for Python: Trainer(…, evaluation=…)",
    )

    def __post_init__(self) -> None:
        check_whole(1, accumulate=self.accumulate)
        if self.peak is not None and (self.memory is not None or self.accumulate != 1):
            raise BadInput("peak chooses memory and accumulate; leave them out")
        check_kind("dims", self.dims, Mapping, "a dict, as in {'seq': 128}")


@dataclass(frozen=True)
class RuntimeRecipe:
    """The settings of ONNX Runtime for a step."""

    panel: ClassVar[str] = "Run"

    options: Options | None = setting(
        None,
        "Options(…): settings of ONNX Runtime.",
        instead="the runtime has --threads, --target and --provider",
    )
    threads: int | None = setting(None, "Threads inside an operator. Default: one per physical core.")
    target: str | None = setting(
        None,
        "portable: standard operators alone; native: with kernels in C, refused where they cannot be built; auto: with "
        "kernels where possible.",
        command="auto",
    )
    provider: Sequence[str] | None = setting(
        None, "Execution provider of ONNX Runtime: cpu, cuda, coreml, …; several: best first.", many=True
    )

    def __post_init__(self) -> None:
        check_kind("options", self.options, Options, "an Options(…)")

    def build_options(self) -> Options:
        """The options of the runtime. Raises BadInput for a provider that this ONNX Runtime does not have."""
        own: dict[str, Any] = {"threads": self.threads, "target": self.target}
        own |= {"providers": None if self.provider is None else providers_of(self.provider)}
        given = {name: value for name, value in own.items() if value is not None}
        if self.options is not None and given:
            raise BadInput(f"options has settings of the runtime: write Options(…, {next(iter(given))}=…)")
        return self.options or Options(**given)


def providers_of(names: Sequence[str]) -> tuple[str, ...]:
    """Execution providers by their short or full names, with settings behind a colon.

    The CPU's comes last: it runs operators that others lack.

    Raises:
        BadInput: this ONNX Runtime does not have one of them.
    """
    there = {p.removesuffix("ExecutionProvider").lower(): p for p in onnxruntime.get_available_providers()}
    found = []
    for name in [names] if isinstance(names, str) else names or ("cpu",):
        kind, colon, settings = name.partition(":")
        short = kind.removesuffix("ExecutionProvider").lower()
        if short not in there:
            raise BadInput(
                f"--provider {name}: this onnxruntime has {', '.join(sorted(there))}\n"
                "  hint: another package of it has others, such as onnxruntime-gpu"
            )
        found.append(there[short] + colon + settings)
    return tuple(dict.fromkeys([*found, "CPUExecutionProvider"]))


@dataclass(frozen=True)
class ProcessRecipe(Exchanges):
    """Processes that train together."""

    distributed: Ranks | Collective | str | None = setting(
        None,
        "Processes that train together: torch (torchrun), mpi (mpiexec), or none. Default: those that a launcher has "
        "started. A batch is that of all of them.",
        kind=str,
    )


@dataclass(frozen=True)
class DataRecipe(PreparationRecipe):
    """Held-out data, and the drawing and preparation of rows."""

    validation: Any = setting(
        None, "Held-out data: measured after every epoch, and before and after the run.", kind=Path
    )
    validation_split: float | None = setting(
        None,
        "Hold this share of the rows of the data out instead of training on them: 0.2; of each class its share.",
    )
    stream: bool = setting(
        False, "Read a file part by part while training, instead of into memory: tables, or a folder of them."
    )
    shuffle_buffer: int | None = setting(
        None, "Of a stream: draw rows at random among so many. Default: rows in their order.", metavar="ROWS"
    )
    classes: Sequence[str] | str | None = setting(
        None, "The names of the classes in the order of their numbers, with commas between. Default: sorted.", kind=str
    )
    missing: str | None = setting(
        None,
        "Missing values of columns that `inputs` joins: mean, median (text: the most frequent), indicator (mean, and a "
        "number that says so), or drop (leave the rows out). The saved model does the same. Rows without a label are "
        "left out.",
    )
    categories: str | None = setting(
        None, "Text in columns that `inputs` joins: onehot, or index (whole numbers from 1 on, for an embedding)."
    )
    standardize: bool = setting(False, "Numbers of these columns less their mean, divided by their deviation.")
    augment: Augment | str | None = setting(
        None,
        "Train on random variants of pictures: flip, vflip, crop=4, jitter=0.2, erase, and of pictures with boxes "
        "zoom=0.5 and mosaic, with commas between them.",
        kind=str,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(0, shuffle_buffer=self.shuffle_buffer)
        for name, known in (("missing", MISSING), ("categories", CATEGORIES)):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), known)
        if self.tables is not None and not self.inputs:
            raise BadInput(
                "missing, categories and standardize are of columns that are joined\n"
                "  hint: --input x=age,colour (in Python inputs={'x': 'age,colour'}) says which"
            )
        check_kind("stream", self.stream, bool, "true or false")
        check_kind("validation_split", self.validation_split, (int, float), "a number between 0 and 1")
        check_kind("augment", self.augment, (str, Augment), "a text, as 'flip,crop=4', or an Augment(…)")
        if isinstance(self.augment, str):
            Augment.of(self.augment)
        if self.validation is not None and self.validation_split is not None:
            raise BadInput("validation and validation_split exclude each other")

    @property
    def tables(self) -> TableSettings | None:
        """The settings for columns that are joined, if there are any."""
        if self.missing is None and self.categories is None and not self.standardize:
            return None
        return TableSettings(self.missing, self.categories, self.standardize)

    @property
    def is_streamed(self) -> bool:
        """True if a file is to be read part by part."""
        return self.stream or self.shuffle_buffer is not None

    @property
    def buffer_rows(self) -> int:
        """Rows of a stream among which the next ones are drawn."""
        return self.shuffle_buffer or 0

    @property
    def holds_out(self) -> bool:
        """True if rows of the training data are held out."""
        return self.validation_split is not None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, if they are given."""
        given = self.classes.split(",") if isinstance(self.classes, str) else self.classes
        return None if given is None else tuple(map(str, given))

    @property
    def measures(self) -> bool:
        """True if there are held-out data."""
        return self.validation is not None or self.validation_split is not None


@dataclass(frozen=True)
class WatchRecipe:
    """Measurements of held-out data, and decisions by them."""

    panel: ClassVar[str] = "Run"

    metrics: Sequence[str] | str | None = setting(
        None,
        f"Measurements of validation data, with commas between: {', '.join(OF_PREDICTIONS)}. Default: those usual for "
        "the loss.",
        kind=str,
    )
    monitor: str = setting(
        "validation_loss", "For `patience` and `keep_best`: loss, validation_loss, validation_auc, …"
    )
    patience: int | None = setting(None, "Stop when `monitor` has not become better for so many epochs.")
    keep_best: bool = setting(False, "Save the weights of the epoch in which `monitor` was best.")
    keep: int | None = setting(None, "As `keep_best`; the K best states stay beside the checkpoint.", metavar="K")

    def __post_init__(self) -> None:
        check_whole(1, patience=self.patience, keep=self.keep)
        names_of(self.metrics)
        check_kind("monitor", self.monitor, str, "a name, as 'validation_loss'")


@dataclass(frozen=True)
class LogRecipe:
    """The files and tools that record a run."""

    panel: ClassVar[str] = "Output"

    history: File | None = setting(None, "JSON file for losses and metrics, written after every epoch.", kind=Path)
    plot: File | None = setting(None, "PNG file for the curves.", kind=Path)
    report: File | None = setting(None, "HTML file with settings, scores and curves.", kind=Path)
    log: File | None = setting(None, "JSON lines: every step and every epoch, as they happen.", kind=Path)
    tensorboard: File | None = setting(None, "Folder for TensorBoard event files.", kind=Path)
    mlflow: str | None = setting(None, "Log to this MLflow experiment.")
    wandb: str | None = setting(None, "Log to this project of Weights & Biases; offline with WANDB_MODE=offline.")
    sample_prompts: Sequence[str] = setting(
        (),
        "A text that the language model continues after every epoch, on standard error and in `history`.",
        command=None,
        many=True,
    )
    callbacks: Sequence[Callback] = setting(
        (),
        "Callback objects: they hear what the run does, and may interfere.",
        instead="callbacks are for Python: onnxgrad.train(…, callbacks=[…])",
    )
    progress: bool | None = setting(
        None,
        "Show how the run goes, on standard error. Default: in a terminal or a notebook.",
        instead="--quiet hides the progress",
    )

    def __post_init__(self) -> None:
        for name in ("history", "plot", "log"):
            check_kind(name, getattr(self, name), (str, os.PathLike), "a path")
        if isinstance(self.sample_prompts, str) or not all(isinstance(p, str) for p in self.sample_prompts):
            raise BadInput(f"sample_prompts is a list of texts, not {self.sample_prompts!r}")
        if not isinstance(self.callbacks, Sequence) or not all(isinstance(c, Callback) for c in self.callbacks):
            raise BadInput(
                "callbacks are a list of Callback (of onnxgrad.training), as callbacks=[KeepBest('validation_loss')]"
            )


#: Recipes of `Trainer`, and of its `fit`.
TRAINER = (*ALGORITHM, TaskRecipe, DetectionRecipe, StepRecipe, RuntimeRecipe, ProcessRecipe)
FIT = (DataRecipe, LoopRecipe, WatchRecipe, LogRecipe)


@dataclass(frozen=True)
class Recipe:
    """All settings of a run.

    Attributes:
        loss, optimizer, weights, adapter: of the algorithm, for a model that carries none.
        task: of a language model, or a detector.
        detection: of a detector.
        settings: further settings of the optimizer, as ``{"betas": (0.9, 0.95)}``.
        step, runtime, processes: how a step is computed.
        data, loop, watch, log: how the step is run over data.
    """

    loss: LossRecipe = LossRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    weights: WeightsRecipe = WeightsRecipe()
    adapter: AdapterRecipe = AdapterRecipe()
    task: TaskRecipe = TaskRecipe()
    detection: DetectionRecipe = DetectionRecipe()
    step: StepRecipe = StepRecipe()
    runtime: RuntimeRecipe = RuntimeRecipe()
    processes: ProcessRecipe = ProcessRecipe()
    data: DataRecipe = DataRecipe()
    loop: LoopRecipe = LoopRecipe()
    watch: WatchRecipe = WatchRecipe()
    log: LogRecipe = LogRecipe()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        function: str,
        keywords: Mapping[str, Any],
        recipes: Sequence[type],
        also: Sequence[str] = (),
        recipe: Self | None = None,
    ) -> Self:
        """The recipe of the `keywords` of a call of `function`.

        Args:
            function: its name in messages.
            keywords: settings of `recipes`, and further settings of `attach`.
            recipes: those that the function takes.
            also: other arguments of the function.
            recipe: all settings as one value, in place of keywords; it is returned.

        Raises:
            UnknownKeyword: there is no such setting.
            BadInput: a value does not fit, or there are keywords beside `recipe`.
        """
        if recipe is not None:
            if keywords:
                raise BadInput(f"recipe has all settings; drop {next(iter(keywords))}")
            return recipe
        owned, further = settings_of(*recipes), further_settings()
        rest = {name: value for name, value in keywords.items() if name in further and name not in owned}
        own = {name: value for name, value in keywords.items() if name not in rest}
        for name in [n for n in own if n in settings_of(*FIT) and n not in owned and n not in also]:
            raise UnknownKeyword(f"{function} has no argument {name!r}; its method fit has")
        made = read_recipes(function, recipes, own, [*also, *further], option_spelling)
        places = {type(f.default): f.name for f in fields(cls)}
        recipe = cls(**{places[type(r)]: r for r in made}, settings=rest)
        recipe.detection.check_task(recipe.task.name == DETECTION)
        return recipe

    @property
    def held_out(self) -> tuple[float, int] | None:
        """The share of the rows of the data that is held out, if any, and the seed that chooses them."""
        share = self.data.validation_split
        return None if share is None else (share, self.loop.seed)

    def algorithm(self) -> dict[str, Any]:
        """The settings of `attach` that differ from their defaults."""
        found = {**changed_settings(self.loss, self.optimizer, self.weights), **self.settings}
        found = {name: value for name, value in found.items() if value is not None}
        adapter = self.adapter.build_adapter()
        return found if adapter is None else {**found, "adapter": adapter}
