"""The recipe of a language task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_kind
from onnxgrad.settings import setting

PREFERENCES = ("dpo", "orpo")
#: The task of a detector, whose further settings are in `onnxgrad.training.detection.recipe`.
DETECTION = "detection"
TASKS = ("causal_lm", "masked_lm", "seq2seq", *PREFERENCES, DETECTION)
#: Metrics of tokens, where no others are asked for.
METRICS_OF_TASKS = ("perplexity", "accuracy")
SPLITS = ("paragraphs", "file")


@dataclass(frozen=True)
class TaskRecipe:
    """The task of a language model or a detector: it makes inputs and labels, and chooses the loss."""

    panel: ClassVar[str] = "Data"

    task: str | None = setting(
        None,
        "Train a language model on text: causal-lm (the next token), masked-lm (tokens hidden by [MASK]), seq2seq (an "
        "encoder and a decoder), or dpo and orpo (answers that are chosen or rejected). `tokenizer` reads the text. Or "
        "train a detector on pictures with boxes: detection.",
    )
    documents: str = setting(
        "paragraphs",
        "Documents of a .txt file for `task`: paragraphs (blank lines separate them), or file (all of it).",
    )
    pack: bool = setting(
        True,
        "Fill rows of `task` with several documents, where the attention mask of the model keeps them apart.",
        off="--no-pack",
    )

    def __post_init__(self) -> None:
        check_kind("task", self.task, str, "one of " + ", ".join(TASKS))
        if self.task is not None and self.name not in TASKS:
            raise BadInput(f"there is no task {self.task!r}; there are {', '.join(t.replace('_', '-') for t in TASKS)}")
        if self.documents not in SPLITS:
            raise BadInput(f"documents are {' or '.join(SPLITS)}, not {self.documents!r}")

    @property
    def name(self) -> str:
        """The task with underscores; empty for none."""
        return (self.task or "").replace("-", "_")

    def check_text(self) -> None:
        """Raise BadInput for the task of a detector."""
        if self.name == DETECTION:
            raise BadInput("the task detection is of `onnxgrad train`, `onnxgrad.train` and `evaluate`")

    @property
    def is_preference(self) -> bool:
        """True if rows are pairs of answers."""
        return self.name in PREFERENCES

    @property
    def is_causal(self) -> bool:
        """True if the model learns the next token."""
        return self.name == "causal_lm" or self.is_preference
