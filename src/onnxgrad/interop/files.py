"""A model's derivatives as files with a manifest: for programs that run ONNX models and have no Python.

| file | beside the inputs of the model | beside its outputs |
|---|---|---|
| ``f.onnx`` | | |
| ``vjp_f.onnx`` | ``{y}_cotangent`` | ``{x}_grad`` |
| ``jvp_f.onnx`` | ``{x}_tangent`` | ``{y}_tangent`` |

``manifest.json`` lists the files, with their inputs and outputs in order: name, dtype, shape, role, and the value that
each is the derivative of or belongs to.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import ZeroDerivative
from onnxgrad.files import make_folder, replacing
from onnxgrad.function import Function
from onnxgrad.ir.graph import required_inputs
from onnxgrad.ir.match import holds_floats
from onnxgrad.model_io import save_model, signature
from onnxgrad.model_io.open import AnyModel
from onnxgrad.transforms.first_order import jvp, vjp

VERSION = 1


def family(model: AnyModel, folder: str | os.PathLike, name: str = "f") -> list[Path]:
    """Write `model`, its pullback, its pushforward, and the manifest.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        folder: for the files; it is created if it is missing.
        name: of the function: ``f`` is written to ``f.onnx``.

    Returns:
        The files.

    Raises:
        BadInput: a place that cannot be written.
        NotDifferentiable: an operator has no derivative.
    """
    primal = Function(model).model
    wrt = [v.name or "" for v in primal.graph.inputs if holds_floats(v)]
    of = [v.name or "" for v in primal.graph.outputs if holds_floats(v)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroDerivative)
        pullback, pushforward = vjp(primal, wrt=wrt, of=of), jvp(primal, wrt=wrt, of=of)
    back, ahead = signature(pullback), signature(pushforward)
    roles = {
        **{made: ("cotangent", y) for y, made in back.cotangents.items()},
        **{made: ("gradient", x) for x, made in back.gradients.items()},
        **{made: ("tangent", x) for x, made in ahead.tangents.items()},
    }
    folder = Path(folder)
    make_folder(folder)
    written, models = [], {}
    for key, file, made in (
        ("model", f"{name}.onnx", primal),
        ("vjp", f"vjp_{name}.onnx", pullback),
        ("jvp", f"jvp_{name}.onnx", pushforward),
    ):
        written += save_model(made, folder / file)
        models[key] = {"file": file, **_ends(made, roles)}
    with replacing(folder / "manifest.json") as place:
        place.write_text(json.dumps({"version": VERSION, "models": models}, indent=1) + "\n", encoding="utf-8")
    return [*written, folder / "manifest.json"]


def _ends(model: ir.Model, roles: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    graph = model.graph

    def describe(value: ir.Value, own: str) -> dict[str, Any]:
        name = value.name or ""
        role, of = roles.get(name, (own, None))
        shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
        found = {"name": name, "dtype": None if value.dtype is None else value.dtype.name.lower(), "shape": shape}
        return {**found, "role": role} | ({} if of is None else {"of": of})

    return {
        "inputs": [describe(v, "input") for v in required_inputs(graph)],
        "outputs": [describe(v, "output") for v in graph.outputs],
    }
