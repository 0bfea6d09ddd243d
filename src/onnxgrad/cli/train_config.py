"""``--config run.toml``: flags of ``onnxgrad train`` from a file, and the file that repeats a run.

The keys are the names of the flags without ``--``. Flags on the command line take precedence over the file.
"""

from __future__ import annotations

import enum
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from onnxgrad.cli import panels
from onnxgrad.cli.train_options import other_spelling
from onnxgrad.errors import BadInput, is_unicode
from onnxgrad.files import read_text
from onnxgrad.keywords import suggested_keyword

#: The file beside the checkpoint of a run that repeats it.
REPLAY = "run.toml"
#: Bytes of a file of flags.
_LARGEST = 1 << 20
#: Flags that are not part of repeating a run.
_ONCE = {"resume", "restart", "accept_changes", "force", "config", "find_lr", "quiet", "model", "distributed"}


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Read the flags in the file at `path` as defaults of the command."""
    if path is None:
        return None
    try:
        given = tomllib.loads(read_text(path, _LARGEST))
    except RecursionError as error:
        raise BadInput(f"cannot read {str(path)!r} as TOML: it is nested too deeply") from error
    except BadInput:
        raise
    except ValueError as error:  # tomllib's own are among these
        raise BadInput(f"cannot read {str(path)!r} as TOML: {_short(str(error))}") from error
    flags = {flag: parameter for parameter in context.command.params for flag in _flags(parameter)}
    defaults = {}
    for key, value in given.items():
        flag = flags.get(key.replace("_", "-"))
        if flag is None or flag.name == "config":
            raise BadInput(f"no flag named {_short(key)!r}; {_near(_short(key), flags)}")
        if isinstance(value, dict):
            raise BadInput(f"{str(path)!r} has a table {key!r}; flags belong outside of tables")
        defaults[flag.name] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    for parameter in context.command.params:  # the file has it
        if parameter.name in defaults:
            parameter.required = False
    return path


Config = Annotated[
    Path | None,
    panels.run(
        "--config",
        is_eager=True,
        callback=_read,
        help="A TOML file with flags: learning_rate = 1e-3. Every run writes its own: run.toml, beside its checkpoint.",
    ),
]


def written(context: typer.Context) -> str:
    """The TOML that repeats the command of `context`, without flags that have their default."""
    lines: list[str] = []
    for parameter in context.command.params:
        value, flag = context.params.get(parameter.name or ""), next(iter(_flags(parameter)), "")
        if flag and parameter.name not in _ONCE and value not in (None, (), []) and value != parameter.default:
            line = f"{flag} = {_toml(value)}"
            lines.append(line if is_unicode(line) else f"# {flag}: the name is not UTF-8, which TOML cannot hold")
    return "\n".join(lines) + "\n"


def _near(key: str, flags: Mapping[str, Any]) -> str:
    names = {flag.replace("-", "_"): repr(flag) for flag in flags}
    name = key.replace("-", "_")
    return other_spelling(name) or suggested_keyword(name, names, names.__getitem__)


def _flags(parameter: Any) -> list[str]:
    """The long names of a parameter without ``--``: the first is that of the Python argument."""
    return [o.removeprefix("--") for o in parameter.opts if o.startswith("--")]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    text = json.dumps(str(value.absolute() if isinstance(value, Path) else value), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # which TOML does not have in strings, and JSON does


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"
