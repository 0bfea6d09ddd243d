"""Protection of a command from files in the working directory, which strangers may have put there."""

from __future__ import annotations

import os
from contextlib import suppress

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.figures import RC_FILE, import_matplotlib


def shield() -> None:
    """Keep every package that the command imports from programs and settings in the working directory."""
    os.environ["PATH"] = subprocesses.absolute_paths(os.environ.get("PATH", os.defpath))
    os.environ["NODEFAULTCURRENTDIRECTORYINEXEPATH"] = "1"  # Windows
    if os.path.lexists(RC_FILE):
        with suppress(BadInput):
            import_matplotlib()  # before another package does
