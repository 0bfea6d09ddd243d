"""The command ``onnxgrad``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command.

    Exit codes: 0 done, 1 not differentiable (check), 2 bad input, 3 a bug in onnxgrad, 130 interrupted.
    """
    from onnxgrad import _startup
    from onnxgrad.cli.app import INTERRUPTED, build

    try:
        build()(prog_name="onnxgrad")
    except KeyboardInterrupt:
        _startup.answered()
        print("error: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
