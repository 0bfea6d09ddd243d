"""Build the flags of commands from the settings of recipes, and convert their values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from onnxgrad.cli.grad import dims_of
from onnxgrad.errors import BadInput
from onnxgrad.settings import F, RecipeField, settings_of

_KINDS = {"int": int, "float": float, "bool": bool, "str": str}


def takes_flags(*recipes: type, only: Iterable[str] = (), **defaults: Any) -> Callable[[F], F]:
    """A decorator: the command has the flags of `recipes` (or `only` these), which it gets as ``**flags``.

    Args:
        recipes: whose settings have flags.
        only: names of settings. Default: all.
        defaults: of flags, where they are not those of the settings.
    """

    def decorate(command: F) -> F:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {p.name for p in own}
        settings = {n: s for n, s in settings_of(*recipes).items() if n not in names}
        chosen = [n for n in only or settings if not settings[n].instead]
        made = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, _default(settings[name])),
                annotation=_option(settings[name], {*names, *settings}),
            )
            for name in chosen
        ]
        command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        return command

    return decorate


def _default(about: RecipeField) -> Any:
    return None if about.many else about.command


def _option(about: RecipeField, names: Iterable[str]) -> Any:
    """The type of a flag, annotated with its option."""
    kind = about.kind or _KINDS.get(about.annotation.split(" ")[0], str)
    flag = f"--{about.name.replace('_', '-')}"
    help = re.sub(r"`(\w+)`", lambda m: f"--{m[1].replace('_', '-')}" if m[1] in names else m[1], about.help)
    option = typer.Option(
        f"{flag}/{about.off}" if about.off else flag,
        *about.short,
        help=f"{help} Repeatable." if about.many else help,
        metavar=about.metavar,
        min=about.least,
        rich_help_panel=about.panel or None,
    )
    if about.many:
        kind = list[kind]  # type: ignore[valid-type]
    return Annotated[kind if about.command is not None and not about.many else kind | None, option]


def read_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values of flags as keywords of Python; flags that are not given are left out.

    Raises:
        BadInput: a value is not written as its flag has it.
    """
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    return {name: _READERS[name](value) if name in _READERS else value for name, value in given.items()}


def inputs_of(texts: Iterable[str]) -> dict[str, str]:
    """``X=f0..f63`` as which columns feed which input."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, columns = text.partition("=")
        if not equals or not name or not columns:
            raise BadInput(f"--input {text} is not written as X=f0..f63")
        if name in found:
            raise BadInput(f"--input feeds {name!r} twice: from {found[name]} and from {columns}")
        found[name] = columns
    return found


def _ratios_of(texts: Iterable[str]) -> dict[str, float]:
    """``Relu=0.1`` as ratios of Dropout by type or name of nodes."""
    found = {}
    for text in texts:
        behind, equals, share = text.rpartition("=")
        try:
            found[behind] = float(share)
        except ValueError:
            equals = ""
        if not equals or not behind:
            raise BadInput(f"--dropout {text} is not written as Relu=0.1")
    return found


def _channels_of(text: str) -> tuple[float, ...] | str:
    """``0.5`` or ``0.5,0.5,0.5`` as numbers; another text unchanged, which the recipe refuses."""
    try:
        return tuple(float(n) for n in text.split(","))
    except ValueError:
        return text


_READERS: dict[str, Callable[[Any], Any]] = {
    "inputs": inputs_of,
    "dims": dims_of,
    "dropout": _ratios_of,
    "image_mean": _channels_of,
    "image_std": _channels_of,
}
