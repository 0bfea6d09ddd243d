"""The commands, put together; what every one of them does with errors and interrupts."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from onnxgrad import __version__, _startup
from onnxgrad.cli import check, console, grad
from onnxgrad.errors import OnnxGradError, RuleError

BAD_INPUT, BUG, INTERRUPTED = 2, 3, 130


class _Commands(TyperGroup):
    """Turns what a user can act on into one clear message and an exit code, for every command."""

    def invoke(self, ctx: Any) -> Any:
        warnings.showwarning = console.warn  # type: ignore[assignment]
        logging.getLogger("onnx_ir").setLevel(logging.ERROR)
        try:
            _startup.end()  # not before: an interrupt between commands and arguments would be answered without a word
            return super().invoke(ctx)
        except OnnxGradError as e:
            console.error(e)
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
        except OSError as e:  # of a stream or a file that nobody else answers for: a full disk, a closed pipe
            where = "" if e.filename is None else f"{e.filename}: "
            console.error(f"{where}{e.strerror or e}")
            raise typer.Exit(BAD_INPUT) from e


class _Grouped(TyperCommand):
    """Lists options under the headings of their panels, in plain text."""

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


def build() -> typer.Typer:
    """The command with all of its subcommands."""
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

    app.command(cls=_Grouped)(grad.grad)
    app.command()(check.check)
    app.command()(check.ops)
    for name in ("lower", "train", "export_step", "demo"):
        app.command(cls=_Grouped)(getattr(importlib.import_module(f"onnxgrad.cli.{name}"), name))
    return app
