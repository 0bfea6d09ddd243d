"""Failures over models that are not valid are reported as errors of the model.

Rules and inference rely on valid operands. If a derivation fails, the onnx package checks the model, and ONNX Runtime,
if it is installed, loads and runs it. Their message becomes the error. If they accept the model, the failure is a bug
of this library, and is raised unchanged.
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
from onnxgrad.errors import BadInput, OnnxGradError, OperandMisfit
from onnxgrad.model_io.checks.declared_sizes import PROTOBUF_LIMIT
from onnxgrad.model_io.read import external_tensors, parse
from onnxgrad.model_io.save import to_proto, weight_bytes

#: Seconds that the check of a model may take.
PATIENCE = 60


@contextmanager
def blamed(model: Any) -> Iterator[None]:
    """Raise BadInput in place of an unexpected error of the block, if `model` is not valid."""
    try:
        yield
    except OnnxGradError:
        raise
    except Exception as e:
        why = complaint(model)
        if not why and not isinstance(e, OperandMisfit):
            raise
        raise BadInput(f"the model is not valid: {why or e}") from e


def complaint(model: Any) -> str:
    """The error of the onnx package or of ONNX Runtime for `model`; empty if they find none or cannot check it."""
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
        asked = subprocesses.run([*subprocesses.PYTHON, "-c", _ASK], input=model.SerializeToString(), timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    if asked.returncode < 0:
        return "the onnx package or ONNX Runtime crashes over it"
    return " ".join(asked.stdout.decode(errors="replace").split())[:400]


#: Runs in a process of its own: some models that are not valid end the process that checks them. ONNX Runtime is not
#: asked about operators that it may lack, and runs a model only on inputs whose elements cannot be at fault.
_ASK = """
import sys, onnx
try:
    model = onnx.ModelProto.FromString(sys.stdin.buffer.read())
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    try:
        onnx.checker.check_model(model)
    except Exception as e:
        if not str(e).startswith("Field 'shape' of 'type'"):  # an output whose number of axes is unknown is valid
            raise
    try:
        import numpy, onnxruntime
    except ImportError:
        sys.exit()
    known = {"", "ai.onnx", *(f.domain for f in model.functions)}
    if not known.issuperset(o.domain for o in model.opset_import) or model.training_info:
        sys.exit()
    onnxruntime.set_default_logger_severity(4)
    for node in model.graph.node:
        node.name = node.name or next(filter(None, node.output), "")
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        kinds = {"tensor(float)": "f4", "tensor(double)": "f8", "tensor(float16)": "f2"}
        inputs = session.get_inputs()
        if all(i.type in kinds and all(type(d) is int for d in i.shape) for i in inputs):
            session.run(None, {i.name: numpy.ones(i.shape, kinds[i.type]) for i in inputs})
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        pass
except Exception as e:
    sys.stdout.buffer.write((str(e) or type(e).__name__).encode(errors="replace"))
"""


def _line(error: Exception) -> str:
    """The innermost reason of `error`, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:400]
