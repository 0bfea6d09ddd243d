"""Weights as a safetensors file under the names of modules, for ``load_state_dict`` of a framework.

With an example, its names, shapes and types stay, and trained weights replace what they were before training. Without
one, names are those of the export: initializers that are called as modules are, and else the module that a node is
from; a matrix of a linear layer has the layout of PyTorch, [outputs, inputs].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary, replacing
from onnxgrad.ir.builder import FLOATS
from onnxgrad.training.adapters.sites import LINEAR, weights
from onnxgrad.training.adapters.tensors import save_tensors
from onnxgrad.training.graph.exported_constants import sort_out
from onnxgrad.transplants.names import layer_of
from onnxgrad.transplants.weights import TargetWeight

SUFFIX = ".safetensors"
#: Types of numpy by their names in safetensors.
_DTYPES = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "BOOL": np.bool_},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}


@dataclass
class StateDict:
    """The tensors of a safetensors file, and the metadata in its header."""

    tensors: dict[str, np.ndarray]
    header: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> StateDict:
        """Read a file. Raises BadInput if it is no safetensors file, or has types that are not known."""
        library = _library()
        try:
            with open_ordinary(path) as file:
                held = library.deserialize(file.read())
            with library.safe_open(path, "np") as opened:
                header = dict(opened.metadata() or {})
        except FileNotFoundError as error:
            raise BadInput(f"there is no file {path}") from error
        except library.SafetensorError as error:
            raise BadInput(f"{path} is no safetensors file, or a damaged one: {error}") from error
        found = {}
        for name, about in held:
            if about["dtype"] not in _DTYPES:
                raise BadInput(f"{path} has a tensor of {about['dtype']}, {name!r}, a type that is not known here")
            found[name] = np.frombuffer(about["data"], _DTYPES[about["dtype"]]).reshape(about["shape"])
        return cls(found, header)

    def weights(self) -> list[TargetWeight]:
        """The tensors of floats."""
        floats = {n: ir.tensor(a, name=n) for n, a in self.tensors.items() if a.dtype.kind not in "iub"}
        return [TargetWeight(n, ir.Value(name=n, const_value=t)) for n, t in floats.items() if t.dtype in FLOATS]

    def save(self, path: Path) -> None:
        """Write the file."""
        with replacing(path) as file:
            save_tensors(self.tensors, file, self.header)


def _library() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise BadInput("safetensors files need the package safetensors: pip install 'onnxgrad[train]'") from error
    return safetensors


def state_of(model: ir.Model) -> StateDict:
    """The weights of `model` by the names of modules that its exporter has left.

    Raises:
        BadInput: weights have no such name.
    """
    graph = model.graph
    held = {n: v for n, v in graph.initializers.items() if v.const_value is not None and v.dtype in FLOATS}
    matrices = weights(graph)
    found: dict[str, np.ndarray] = {}
    modules: dict[ir.Value, str] = {}
    rest = {}
    for name, value in sort_out(held, list(graph.all_nodes())).weights.items():
        matrix = matrices.get(name)
        if _is_module_name(name):
            modules[value] = name.rpartition(".")[0]
            found[name] = _array(value)
        elif matrix is not None and matrix.module != name:
            modules[value] = matrix.module
            array = _array(value)
            turned = matrix.kind == LINEAR and not matrix.transposed
            found.setdefault(f"{matrix.module}.weight", array.swapaxes(-1, -2) if turned else array)
        else:
            rest[name] = value
    unnamed = []
    for name, value in rest.items():
        layer = layer_of([(u.node, u.idx) for u in value.uses()])
        if layer is not None and layer in modules and value.shape is not None and len(value.shape) == 1:
            found.setdefault(f"{modules[layer]}.bias", _array(value))
        else:
            unnamed.append(name)
    if unnamed:
        raise BadInput(
            f"the export has no names of modules for {', '.join(unnamed[:8])}\n"
            "  hint: --like names a safetensors file with the weights before training, and --base the export of them"
        )
    return StateDict(found, {"format": "pt"})


def _is_module_name(name: str) -> bool:
    return "." in name and not any(mark in name for mark in ("::", "/", " ", "_output_"))


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
