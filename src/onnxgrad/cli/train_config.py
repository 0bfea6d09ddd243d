"""``--config run.toml``: flags of ``onnxgrad train`` from a file, and the file that repeats a run.

The keys are the names of the flags without ``--``. Flags on the command line come before those in the file.
"""

from __future__ import annotations

import enum
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from onnxgrad.cli import panels
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.files import open_ordinary

#: The file beside the checkpoint of a run that repeats it.
REPLAY = "run.toml"
#: What repeating a run does not repeat.
_ONCE = {"resume", "restart", "accept_changes", "force", "config", "find_lr", "quiet", "model", "distributed"}


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Take the flags in the file at `path` for the defaults of the command."""
    if path is None:
        return None
    try:
        with open_ordinary(path) as file:
            given = tomllib.loads(file.read().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {str(path)!r} as TOML: {error}") from error
    flags = {_flag(parameter): parameter for parameter in context.command.params if _flag(parameter)}
    defaults = {}
    for key, value in given.items():
        flag = flags.get(key.replace("_", "-"))
        if flag is None or flag.name == "config":
            raise UnknownName(key, flags, "flag")
        if isinstance(value, dict):
            raise BadInput(f"{str(path)!r} has a table {key!r}; flags stand outside of tables")
        defaults[flag.name] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    for parameter in context.command.params:  # what the file gives need not be given again
        if parameter.name in defaults:
            parameter.required = False
    return path


Config = Annotated[
    Path | None,
    panels.run(
        "--config",
        is_eager=True,
        callback=_read,
        help="A TOML file with flags: lr = 1e-3. Every run writes its own, run.toml in the folder of its checkpoint.",
    ),
]


def written(context: typer.Context) -> str:
    """The TOML that repeats the command of `context`; flags that are what they are by default are left out."""
    lines = []
    for parameter in context.command.params:
        value, flag = context.params.get(parameter.name or ""), _flag(parameter)
        if flag and parameter.name not in _ONCE and value not in (None, (), []) and value != parameter.default:
            lines.append(f"{flag} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _flag(parameter: Any) -> str:
    return next((o.removeprefix("--") for o in parameter.opts if o.startswith("--")), "")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value.absolute() if isinstance(value, Path) else value), ensure_ascii=False)
