"""The application: all commands, with common handling of errors and interrupts."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.completion import completion_init
from typer.core import TyperCommand, TyperGroup

from onnxgrad import __version__, _startup
from onnxgrad._later import without_collection
from onnxgrad.cli import console
from onnxgrad.cli.shield import shield
from onnxgrad.errors import OnnxGradError, RuleError
from onnxgrad.keywords import suggested_keyword

BAD_INPUT, BUG, INTERRUPTED = 2, 3, 130

#: The commands, with the summary that ``onnxgrad --help`` prints: the first sentence of their own help.
COMMANDS = {
    "grad": "Write MODEL with its derivative to another file.",
    "check": "Say of every operator between `wrt` and `of` how it is differentiated, or why it cannot be.",
    "ops": "List the operators and how each is differentiated.",
    "lower": "Write MODEL with the operators of ai.onnx.preview.training replaced by standard ones.",
    "train": "Train MODEL with a loss and an optimizer, or as the training information that it carries says.",
    "consolidate": "Turn a checkpoint in parts, as `train --shard-optimizer` writes it, into an ordinary one.",
    "combine": "Combine LoRA adapters of one model: a sum of their factors, TIES, DARE, or all side by side (cat).",
    "quantize": "Quantize MODEL as ONNX Runtime does, and train the quantized model if asked to.",
    "prune": "Remove channels, heads or weights of MODEL: by a share, or until it is within a budget.",
    "transplant": "Put the weights of TRAINED.onnx into another export of the same network, and compare the outputs of "
    "both.",
    "predict": "Run MODEL over data and write what it gives for each row.",
    "generate": "Continue prompts by MODEL, a language model with or without a cache; behind an encoder: answer them.",
    "evaluate": "Compare what MODEL predicts with labels: metrics, and for classes a table of each.",
    "uncertain": "Write MODEL with the spread of its predictions, as plain ONNX: by dropout, Laplace, an ensemble or "
    "held-out data.",
    "info": "Say what MODEL reads and gives, how large it is, of which operators it consists, and how it is trained.",
    "passes": "List the optimizations of the graph that a session of MODEL runs, and why others do not apply.",
    "explain": "Show which parts of a picture, or of a row of data, a prediction of MODEL depends on.",
    "export-step": "Write a training step, its halves, evaluation and inference as models, with the first state and a "
    "contract.",
    "family": "Write MODEL and its derivatives to a folder, for programs that have no Python.",
    "demo": "Train a model that is given as a bare .onnx file, on real data.",
    "completion": "Print what makes a shell complete the command.",
}
#: The modules of those that have none of their own.
_MODULES = {"ops": "check"}


class _Commands(TyperGroup):
    """Group of commands: imports them when called, and turns expected errors into a message and exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        given, listed, rest = super().resolve_command(ctx, args)
        found = None if given is None or listed is None else command(given)
        _startup.end()  # not before: an interrupt while that is imported, or before its arguments, would go unanswered
        return given, found, rest

    def invoke(self, ctx: Any) -> Any:
        shield()
        warnings.showwarning = console.warn_once()
        logging.getLogger("onnx_ir").setLevel(logging.ERROR)
        try:
            return super().invoke(ctx)
        except OnnxGradError as e:
            ranks = sys.modules.get("onnxgrad.cli.train_ranks")  # imported by the commands that train
            problem = ranks.error_to_print(e) if ranks else e
            if problem is not None:
                console.error(problem)
            raise typer.Exit(BAD_INPUT) from e
        except RuleError as e:
            console.error(f"{e}\n  hint: this is a bug in a rule, not in the model; please report it")
            raise typer.Exit(BUG) from e
        except KeyboardInterrupt as e:
            _startup.answered()
            console.error("interrupted")
            raise typer.Exit(INTERRUPTED) from e
        except MemoryError as e:
            console.error("there is not enough memory")
            raise typer.Exit(BAD_INPUT) from e
        except OSError as e:  # a full disk, a closed pipe, …
            where = "" if e.filename is None else f"{e.filename}: "
            console.error(f"{where}{e.strerror or e}")
            raise typer.Exit(BAD_INPUT) from e


class _Grouped(TyperCommand):
    """Lists options under the headings of their panels, in plain text; an unknown option names the nearest one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of click, whose classes typer has under another name
            if hasattr(error, "option_name") and hasattr(error, "possibilities"):
                error.possibilities = None
                error.message = f"No such option: {error.option_name}; {self._near(ctx, error.option_name)}"  # type: ignore[attr-defined]
            raise

    def _near(self, ctx: Any, option: str) -> str:
        """Suggest an option to write instead of `option`."""
        name = option.lstrip("-").replace("-", "_")
        options = {o.removeprefix("--").replace("-", "_"): o for p in self.get_params(ctx) for o in p.opts}
        training = sys.modules.get("onnxgrad.cli.train_options")  # imported by the commands that train
        if training and name not in options and "optimizer" in options and (hint := training.other_spelling(name)):
            return str(hint)
        return suggested_keyword(name, options, options.__getitem__)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                panel = "Arguments" if param.param_type_name == "argument" else None
                panels.setdefault(panel or getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        for heading, records in panels.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"onnxgrad {__version__}")
        raise typer.Exit


def command(name: str) -> Any:
    """The command that is called by `name`, with its parameters."""
    module = name.replace("-", "_")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    with without_collection(all_stay=True):
        function = getattr(importlib.import_module(f"onnxgrad.cli.{_MODULES.get(module, module)}"), module)
    app.command(name, cls=_Grouped)(function)
    return typer.main.get_command(app)


def build() -> typer.Typer:
    """Build the command with all of its subcommands, each of which is imported when it is called."""
    completion_init()  # answers shells that ask by an environment variable (see `onnxgrad.cli.completion`)
    app = typer.Typer(
        cls=_Commands,
        help="Give any ONNX model a backward pass, as plain ONNX.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        pass

    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(lambda: None)
    return app
