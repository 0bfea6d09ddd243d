"""Unknown keyword arguments: errors that suggest the closest valid name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from onnxgrad.errors import BadInput, close_to, suggested, warn_renamed

P = ParamSpec("P")
R = TypeVar("R")

#: Names of other libraries.
_ELSEWHERE = {
    "lr": "learning_rate",
    "rate": "learning_rate",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "n_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_epochs": "epochs",
    "bs": "batch_size",
    "criterion": "loss",
    "loss_fn": "loss",
    "optim": "optimizer",
    "val_split": "validation_split",
    "val": "validation",
    "validation_data": "validation",
    "eval_set": "validation",
    "early_stopping": "patience",
    "save_best": "keep_best",
    "eval_steps": "evaluate_every",
    "random_state": "seed",
    "argnums": "wrt",
    "parameters": "trainable",
    "params": "trainable",
    "verbose": "progress",
}


class UnknownKeyword(BadInput, TypeError):
    """A call with an argument that the function does not have."""


def check_keyword(function: str, name: str, known: Iterable[str], hint: str = "") -> None:
    """Raise UnknownKeyword, with `hint` or the near ones, unless `function` has an argument called `name`."""
    names = list(known)
    if name not in names:
        raise UnknownKeyword(f"{function} has no argument {name!r}; {hint or suggested_keyword(name, names)}")


def suggested_keyword(name: str, known: Collection[str], spell: Callable[[str], str] = repr) -> str:
    """Suggest the `known` name for `name`: the equivalent of another library's name, or the most similar one.

    `spell` writes a name as the message shows it.

    >>> suggested_keyword("wd", ["weight_decay", "seed"])
    "did you mean 'weight_decay'?"
    """
    near = name if name in known else _ELSEWHERE.get(name, "")
    close = [near] if near in known else close_to(name, known)
    return suggested(name, known, close, spell)


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> None:
    """Raise BadInput unless `value` is None or one of `kinds`, which `what` describes."""
    if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool)):
        raise BadInput(f"{name} is {what}, not {value!r}")


def check_whole(least: int | None = None, /, **numbers: Any) -> None:
    """Raise BadInput for an argument that is neither None nor a whole number, or below `least`."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral)):
            raise BadInput(f"{name} is a whole number, not {number!r}")
        if number is not None and least is not None and number < least:
            raise BadInput(f"{name} must be at least {least}, not {number}")


def check_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function`: unknown keyword arguments raise an error that suggests the closest valid name.

    A function that accepts any name is unchanged: it checks names itself.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function
    names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"]
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            check_keyword(called, name, names)
        if len(args) > len(places):
            taken = [n for n in places if n != "self"]
            others = ", ".join(n for n in names if n not in taken)
            raise UnknownKeyword(
                f"{called} takes {', '.join(taken)} without a name, and {len(args) - len(places)} more are given\n"
                f"  hint: give the others by their names: {others}"
            )
        return function(*args, **kwargs)

    return call


def renamed(old: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` under its deprecated name `old`, with a warning at each call."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        warn_renamed(old, function.__name__)
        return function(*args, **kwargs)

    return call


def checked_fields(cls: type[R]) -> type[R]:
    """Decorate a dataclass: unknown fields raise an error that suggests the closest valid name."""
    cls.__init__ = check_keywords(cls.__init__)  # type: ignore[method-assign]
    return cls


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments of `function`."""
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"]
