"""The command ``onnxgrad``."""

from __future__ import annotations


def main() -> None:
    """Run the command.

    Exit codes: 0 done, 1 not differentiable (check), 2 bad input, 3 a bug in onnxgrad, 130 interrupted.
    """
    from onnxgrad.cli.app import build

    build()(prog_name="onnxgrad")
