"""Recipes: frozen dataclasses whose fields are settings, each with its default, its help and its flag.

A recipe is the one source of the keywords of a function, the flags of a command, the keys of its TOML file and the
reference page.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from onnxgrad.keywords import check_keyword

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

_UNSET: Any = object()


@dataclass(frozen=True)
class RecipeField:
    """One field of a recipe.

    Attributes:
        name: of the keyword; the flag and the TOML key are called the same.
        annotation: the type in Python, as text.
        default: in Python.
        help: one or two sentences; names of other settings stand in backticks.
        python: what else Python takes, a sentence.
        command: the default of the flag.
        short: further names of the flag, as ``--lr``.
        off: the flag that puts it off, where it is on by default.
        kind: type of the flag; None: by the annotation.
        many: the flag is given once for each value.
        least: the smallest value of the flag.
        metavar: placeholder of the value in the help of the flag.
        panel: heading of the flag.
        instead: the way of the command, for a setting without a flag.
    """

    name: str
    annotation: str
    default: Any
    help: str
    python: str = ""
    command: Any = None
    short: tuple[str, ...] = ()
    off: str = ""
    kind: Any = None
    many: bool = False
    least: float | None = None
    metavar: str | None = None
    panel: str = ""
    instead: str = ""

    @property
    def text(self) -> str:
        """The help for readers who write Python."""
        return f"{self.help} {self.python}".strip()


def setting(default: Any, help: str, *, command: Any = _UNSET, **about: Any) -> Any:
    """A field of a recipe; `RecipeField` explains the arguments."""
    metadata = {"help": help, "command": default if command is _UNSET else command, **about}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(*recipes: type) -> dict[str, RecipeField]:
    """The settings of `recipes` by name, in their order; fields that are no settings are left out."""
    found = {}
    for recipe in recipes:
        for f in fields(recipe):
            if "help" in f.metadata:
                about = {"panel": getattr(recipe, "panel", ""), **f.metadata}
                default = f.default_factory() if f.default_factory is not MISSING else f.default
                found[f.name] = RecipeField(f.name, str(f.type), default, **about)
    return found


def pop_recipe(recipe: type[R], keywords: dict[str, Any]) -> R:
    """An instance of `recipe` with those of `keywords` that are settings of it; they are removed from `keywords`."""
    return recipe(**{n: _value_of(about, keywords.pop(n)) for n, about in settings_of(recipe).items() if n in keywords})


def _value_of(about: RecipeField, value: Any) -> Any:
    """`value`, in a tuple if it is one name, pattern or plan where a setting takes several."""
    return (value,) if isinstance(value, str) and about.many and about.annotation.startswith("Sequence[") else value


def changed_settings(*recipes: Any) -> dict[str, Any]:
    """The settings of `recipes` whose values are not the defaults."""
    found = {}
    for recipe in recipes:
        for name, about in settings_of(type(recipe)).items():
            value = getattr(recipe, name)
            if value is not about.default and not _is_equal(value, about.default):
                found[name] = value
    return found


def _is_equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and isinstance(value, (bool, int, float, str, tuple)) and value == default


def read_recipes(
    function: str, recipes: Iterable[type], keywords: Mapping[str, Any], also: Iterable[str] = (),
    elsewhere: Callable[[str, Collection[str]], str] = lambda name, known: "",
) -> Any:  # fmt: skip
    """Instances of `recipes` with the `keywords` of a call of `function`.

    Args:
        function: its name in messages.
        recipes: classes of recipes.
        keywords: arguments by name.
        also: other names that the function takes, which the error of an unknown name may suggest.
        elsewhere: the suggestion for an unknown name, given the known ones, that is written in another setting.

    Raises:
        UnknownKeyword: neither the recipes nor `also` have a keyword; the message suggests the closest name.
        BadInput: a recipe refuses a value.
    """
    owned = {recipe: settings_of(recipe) for recipe in recipes}
    known = [*also, *(name for names in owned.values() for name in names)]
    for name in keywords:
        check_keyword(function, name, known, elsewhere(name, known) if name not in known else "")
    return [
        recipe(**{n: _value_of(about, keywords[n]) for n, about in names.items() if n in keywords})
        for recipe, names in owned.items()
    ]


def takes(*recipes: type, others: bool = False) -> Callable[[F], F]:
    """A decorator for a function with ``**settings``: its signature and docstring name the settings of `recipes`.

    The line ``settings:`` of its docstring is replaced by a line for each setting. With `others`, it takes further
    keywords, and checks their names itself.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        found = {n: s for n, s in settings_of(*recipes).items() if n not in signature.parameters}
        made = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=s.default, annotation=s.annotation)
            for n, s in found.items()
        ]
        rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD and others]
        function.__signature__ = signature.replace(parameters=[*own, *made, *rest])  # type: ignore[attr-defined]
        function.__doc__ = _insert_settings(function.__doc__ or "", found)
        return function

    return decorate


def _literal_globs(text: str) -> str:
    """Set quoted patterns with a star as literals: in a docstring, a star begins an emphasis.

    >>> _literal_globs("all; '!head*': not these")
    "all; ``'!head*'``: not these"
    >>> _literal_globs("X=f0, X='pixel*', all")
    "X=f0, ``X='pixel*'``, all"
    """
    return re.sub(r"[^\s,;:(]*'[^'\s]*\*[^'\s]*'", r"``\g<0>``", text)


def _insert_settings(text: str, settings: Mapping[str, RecipeField]) -> str:
    """A docstring whose line ``settings:`` is replaced by a line for each setting."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.strip() == "settings:":
            indent = line[: len(line) - len(line.lstrip())]
            wrap = textwrap.TextWrapper(120, initial_indent=indent, subsequent_indent=f"{indent}    ")
            lines[i : i + 1] = [
                part for s in settings.values() for part in wrap.wrap(f"{s.name}: {_literal_globs(s.text)}")
            ]
            break
    return "\n".join(lines)
