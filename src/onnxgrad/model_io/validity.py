"""Whose fault is it? A failure over a model that is not valid is the model's.

Rules and inference trust that a node is what its operator demands. Where something fails that should not, the onnx
package is asked about the model; what it objects to is the error. If it has nothing to say, the failure is ours, and
goes on.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput, OnnxGradError
from onnxgrad.model_io.read import external_tensors, parse
from onnxgrad.model_io.save import PROTOBUF_LIMIT, to_proto, weight_bytes

#: Seconds that it may take.
PATIENCE = 60


@contextmanager
def blamed(model: Any) -> Iterator[None]:
    """If the block fails as it should not, and `model` is not valid, say so.

    Raises:
        BadInput: the model is not valid.
    """
    try:
        yield
    except OnnxGradError:
        raise
    except Exception as e:
        why = complaint(model)
        if not why:
            raise
        raise BadInput(f"the model is not valid: {why}") from e


def complaint(model: Any) -> str:
    """What the onnx package has against `model`; nothing if it cannot be asked."""
    try:
        if isinstance(model, (str, os.PathLike)):
            model = parse(Path(model))
        if isinstance(model, ir.Model):
            if external_tensors(model) or weight_bytes(model) > PROTOBUF_LIMIT:
                return ""
            model = to_proto(model)
        if not isinstance(model, onnx.ModelProto) or any(t.external_data for t in model.graph.initializer):
            return ""
    except Exception as e:  # it cannot even be written down
        return _line(e)
    try:
        found = subprocesses.run([*subprocesses.PYTHON, "-c", _ASK], input=model.SerializeToString(), timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    if found.returncode < 0:
        return "the onnx package breaks down over it"
    why = " ".join(found.stdout.decode(errors="replace").split())[:400]
    return "" if why.startswith("Field 'shape' of 'type'") else why  # an input whose rank is open does no harm


#: The package is asked in a process of its own: over some models that are not valid it ends the one that asks.
_ASK = """
import sys, onnx
try:
    model = onnx.ModelProto.FromString(sys.stdin.buffer.read())
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    onnx.checker.check_model(model)
except Exception as e:
    sys.stdout.buffer.write((str(e) or type(e).__name__).encode(errors="replace"))
"""


def _line(error: Exception) -> str:
    """The innermost reason of `error`, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:400]
