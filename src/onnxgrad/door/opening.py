"""What comes in and goes out: one private, raised, inlined, typed copy of the caller's model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import onnx
import onnx_ir as ir

from onnxgrad.ir.infer import infer_model

Model = TypeVar("Model", onnx.ModelProto, ir.Model)
AnyModel = str | os.PathLike | onnx.ModelProto | ir.Model


@dataclass
class Opened:
    """A model that the library may change, and the way back to the caller's kind."""

    model: ir.Model
    kind: type

    def close(self) -> onnx.ModelProto | ir.Model:
        """The model in the kind that came in (a path gives a ModelProto)."""
        return self.model if self.kind is ir.Model else ir.to_proto(self.model)


def open_model(model: AnyModel) -> Opened:
    """A private copy of `model`, ready to be differentiated."""
    if isinstance(model, ir.Model):
        kind, private = ir.Model, model.clone()
    elif isinstance(model, onnx.ModelProto):
        kind, private = onnx.ModelProto, ir.from_proto(model)
    else:
        kind, private = onnx.ModelProto, ir.load(Path(model))
    infer_model(private)
    return Opened(private, kind)
