"""``onnxgrad info --system``: versions, the processor, and the target of sessions in this process."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import onnxruntime

from onnxgrad import __version__
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels import installed
from onnxgrad.runtime.kernels.processors import supported_kinds
from onnxgrad.runtime.options import TARGET

#: Packages whose versions a report of a problem needs.
PACKAGES = ("onnx", "onnx-ir", "onnx-shape-inference", "numpy")


def describe_system() -> dict[str, Any]:
    """Versions, processor, target and kernels of this process, by names that ``--json`` prints as well."""
    kernels = installed()
    chosen = os.environ.get(TARGET)
    try:
        target = Options().resolve_target().target
    except BadInput as error:
        target = str(error)
    return {
        "onnxgrad": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "onnxruntime": f"{onnxruntime.__version__}: {', '.join(onnxruntime.get_available_providers())}",
        **{name: metadata.version(name) for name in PACKAGES},
        "target": f"{target} ({TARGET} is set)" if chosen else target,
        "kernels": kernels.missing or str(kernels.place),
        "processor": ", ".join(supported_kinds()) or "no kernels for this architecture",
    }
