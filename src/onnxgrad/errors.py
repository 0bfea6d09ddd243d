"""The errors that onnxgrad raises on purpose, as one small tree.

::

    OnnxGradError                     the user can act on it; the command exits with code 2
    ├── BadInput                      a file, name, dtype, shape or option that cannot be used
    │   └── UnknownName               a name that is not in the model (carries close matches)
    ├── NotDifferentiable             a path from `wrt` to `of` cannot be differentiated
    │   ├── NoRule                    onnxgrad has no rule for an operator on the path (yet)
    │   └── NoDerivative              an operator on the path has no derivative mathematically
    └── TrainingError                 a training run went wrong (a NaN loss, missing labels, …)
    RuleError                         a rule broke its contract: a bug, in onnxgrad or in a user's rule
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Control characters, marks that change the direction of text, characters without width, lone surrogates.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)

#: Characters of a library's message.
_MOST = 300


def printable(text: str, keep: str = "") -> str:
    r"""`text`, which may contain untrusted names, with terminal control characters replaced.

    >>> printable("w\x1b[2J")
    'w�[2J'
    """
    return _UNSEEN.sub(lambda found: found[0] if found[0] in keep else "\N{REPLACEMENT CHARACTER}", text)


def json_text(value: Any) -> str:
    """`value` as JSON with non-ASCII characters unescaped, unless file names in it are not valid Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(value)


def is_unicode(text: str) -> bool:
    """True if `text` has no surrogates, which stand for the bytes of file names that are not UTF-8."""
    return re.search("[\ud800-\udfff]", text) is None


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """The names of `known` that are spelled most like `name`, the nearest first."""
    return difflib.get_close_matches(name, dict.fromkeys(known), n=3, cutoff=0.5)


def suggested(name: str, known: Iterable[str], close: Sequence[str] = (), spell: Callable[[str], str] = repr) -> str:
    """Suggest names in place of `name`: the `close` ones as `spell` writes them, else a list of all `known`.

    >>> suggested("epoch", ["epochs", "seed"])
    "did you mean 'epochs'?"
    """
    known = list(known)
    if close := close or close_to(name, known):
        return "did you mean " + " or ".join(map(spell, close)) + "?"
    return (
        "there are: "
        + ", ".join(n if spell is repr else spell(n) for n in known[:8])
        + (", …" if len(known) > 8 else "")
    )


class OnnxGradError(Exception):
    """Base of every error that a user can act on."""

    def __str__(self) -> str:  # names of strangers are a part of it; and KeyError would show the repr of the message
        return printable(str(self.args[0]) if len(self.args) == 1 else super().__str__(), keep="\n")


class BadInput(OnnxGradError, ValueError):
    """An input cannot be used; the message contains the reason and a remedy."""


class UnknownName(BadInput, KeyError):
    """A name that the model does not have."""

    def __init__(self, name: str, known: Iterable[str], what: str = "value") -> None:
        known = sorted(k for k in known if k)
        hint = suggested(name, known) if known else f"the model has no {what}"
        self.name = name
        self.close = close_to(name, known)
        super().__init__(f"no {what} named {name!r}; {hint}")


class NotDifferentiable(OnnxGradError):
    """A path from `wrt` to `of` cannot be differentiated."""


class NoRule(NotDifferentiable):
    """An operator on the path has no rule and no function body to fall back on."""


class NoDerivative(NotDifferentiable):
    """An operator on the path has no derivative: random, or discrete with respect to its input."""


class ZeroDerivative(UserWarning):
    """A requested derivative is zero everywhere; `name` is the value that it is with respect to, or of."""

    def __init__(self, message: str, name: str = "") -> None:
        self.name = name
        super().__init__(message)


class PassWarning(UserWarning):
    """An optimization of a graph failed and was left out, which changes no result; `name`: its name."""

    def __init__(self, message: str, name: str = "") -> None:
        self.name = name
        super().__init__(message)


class TrainingError(OnnxGradError):
    """A training run could not start or continue."""


class RuleError(RuntimeError):
    """A rule broke its contract (wrong dtype, rank or number of gradients)."""


class OperandMisfit(RuleError):
    """A tested rule gave a derivative of another shape than the operand's: the operands of the node do not fit."""


def reason_of(error: BaseException) -> str:
    """The beginning of the message of `error` on one line; the name of its class if it has none."""
    return " ".join(str(error).split())[:_MOST] or type(error).__name__


@contextmanager
def as_bad_input(what: str, nested: bool = False) -> Iterator[None]:
    """Raise BadInput, `what` and the reason, in place of any error of the ``with`` block.

    Libraries that read files raise errors of their own types and of a dozen of Python's.

    Args:
        what: the beginning of the message.
        nested: a BadInput of the block is a reason, too. Default: it is raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, BadInput) and not nested:
            raise
        raise BadInput(f"{what}: {reason_of(error)}") from error


@contextmanager
def needs_package(what: str, extra: str) -> Iterator[None]:
    """Raise BadInput for a package that cannot be imported: `what` needs it, and the `extra` of ours that has it."""
    try:
        yield
    except ImportError as error:
        raise BadInput(f"{what}: pip install 'onnxgrad[{extra}]'") from error


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller that a public name is deprecated."""
    warn_caller(DeprecationWarning(f"{old} is deprecated; it is called {new} now"))


def warn_caller(warning: Warning | str) -> None:
    """Warn at the line that called into onnxgrad, through however many of its own functions and context managers."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "onnxgrad",
        "contextlib",
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)
