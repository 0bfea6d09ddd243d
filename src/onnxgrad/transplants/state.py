"""Weights as a safetensors file under the names of modules, for ``load_state_dict`` of a framework.

With an example, its names, shapes and types stay, and trained weights replace what they were before training. Without
one, names are those of the export: initializers that are called as modules are, and else the module that a node is
from; a matrix of a linear layer has the layout of PyTorch, [outputs, inputs].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.files import replacing
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.match import not_none
from onnxgrad.training.adapters.sites import LINEAR, weights
from onnxgrad.training.graph.exported_constants import sort_out
from onnxgrad.training.tensor_files import read_tensors, save_tensors
from onnxgrad.transplants.names import layer_of
from onnxgrad.transplants.weights import TargetWeight

SUFFIX = ".safetensors"


@dataclass
class StateDict:
    """The tensors of a safetensors file, and the metadata in its header."""

    tensors: dict[str, np.ndarray]
    header: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> StateDict:
        """Read a file. Raises BadInput if it is no safetensors file, or has types that are not known."""
        return cls(*read_tensors(path))

    def weights(self) -> list[TargetWeight]:
        """The tensors of floats."""
        floats = {n: ir.tensor(a, name=n) for n, a in self.tensors.items() if a.dtype.kind not in "iub"}
        return [TargetWeight(n, ir.Value(name=n, const_value=t)) for n, t in floats.items() if t.dtype in FLOATS]

    def save(self, path: Path) -> None:
        """Write the file."""
        with replacing(path) as file:
            save_tensors(self.tensors, file, self.header)


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
    return not_none(value.const_value).numpy()
