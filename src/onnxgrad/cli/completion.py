"""``onnxgrad completion``: scripts for shell completion."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.completion import get_completion_script

from onnxgrad.errors import UnknownName

SHELLS = ("bash", "zsh", "fish", "powershell")


def completion(shell: Annotated[str, typer.Argument(help="bash, zsh, fish or powershell.")]) -> None:
    """Print what makes a shell complete the command.

    In bash, put this line into ~/.bashrc: source <(onnxgrad completion bash). In zsh, the same with zsh into ~/.zshrc,
    after compinit. In fish: onnxgrad completion fish > ~/.config/fish/completions/onnxgrad.fish.
    """
    if shell not in SHELLS:
        raise UnknownName(shell, SHELLS, "shell")
    print(get_completion_script(prog_name="onnxgrad", complete_var="_ONNXGRAD_COMPLETE", shell=shell))
