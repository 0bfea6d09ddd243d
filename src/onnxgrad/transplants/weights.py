"""The weights of a model as floats, however they are stored: in floats of any width, or as integers with scales.

`weights_of` lists those of the graph, of branches and bodies, and of local functions; also those in Constant nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.exporter_names import module_names
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.match import is_op, not_none
from onnxgrad.transplants.match import root_mean_square
from onnxgrad.transplants.schemes import Scheme, Tensors, array_of, implicit_bias, scheme_of, tensor_of


@dataclass
class TargetWeight:
    """A weight as a model stores it.

    Attributes:
        name: of its tensor.
        value: the initializer, or the output of a Constant.
        scheme: how integers represent it; None for floats.
        uses: the nodes that read it, and as which input, in the order of the graph.
    """

    name: str
    value: ir.Value
    scheme: Scheme | None = None
    uses: list[tuple[ir.Node, int]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the floats."""
        if self.scheme is not None:
            return self.scheme.shape
        tensor = not_none(tensor_of(self.value))
        return tuple(int(d) for d in tensor.shape.numpy())

    def floats(self) -> np.ndarray:
        """The elements, in the width in which they are stored."""
        return array_of(self.value) if self.scheme is None else self.scheme.floats()

    def tolerance(self, floats: np.ndarray) -> float:
        """The largest relative distance to the weight that `floats` were rounded from."""
        if self.scheme is not None:
            size = root_mean_square(floats) or 1.0
            return min(2 * self.scheme.step() / np.sqrt(12) / size, 0.5)
        return max(1e-5, 2 * float(ml_dtypes.finfo(floats.dtype).eps))

    def store(self, after: np.ndarray, before: np.ndarray | None) -> Tensors:
        """The tensors that store `after` in the form of this weight."""
        if self.scheme is not None:
            return self.scheme.store(after, before)
        dtype = ir.DataType(not_none(tensor_of(self.value)).dtype)
        return {self.value: ir.Tensor(np.asarray(after, dtype.numpy(), order="C"), dtype=dtype)}

    @property
    def labels(self) -> list[str]:
        """Names that hint at the module: of the tensor, of the readers, and of the modules that these come from."""
        found = [self.name]
        for node, _ in self.uses:
            found += labels_of(node)
        return [text for text in found if text]


def labels_of(node: ir.Node) -> list[str]:
    """The name of a node, and of the module that it comes from."""
    return [node.name or "", *module_names(node)[-2:]]


def weights_of(model: ir.Model) -> list[TargetWeight]:
    """The weights of `model`: tensors of floats, and of integers that stand for floats, in the order of their reads."""
    nodes = list(nodes_of(model))
    schemes: dict[ir.Value, Scheme] = {}
    for node in nodes:
        for scheme in (scheme_of(node), implicit_bias(node)):
            if scheme is not None:
                schemes.setdefault(scheme.numbers, scheme)
    hidden = {v for s in schemes.values() for v in (s.scale, s.point)}  # follow from the weight
    found: dict[ir.Value, TargetWeight] = {}
    copies: dict[ir.Value | None, ir.Value] = {}  # an exporter distributes equal tensors by Identity nodes
    for node in nodes:
        if is_op(node, "Identity") and not node.outputs[0].is_graph_output():
            source = copies.get(node.inputs[0], node.inputs[0])
            if source is not None and source not in schemes and tensor_of(source) is not None:
                copies[node.outputs[0]] = source
                continue
        for at, read in enumerate(node.inputs):
            value = copies.get(read, read)
            tensor = tensor_of(value)
            if value is None or tensor is None or value in hidden:
                continue
            if value in schemes or tensor.dtype in FLOATS:
                weight = found.setdefault(value, TargetWeight(value.name or "", value, schemes.get(value)))
                weight.uses.append((node, at))
    return list(found.values())


def nodes_of(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes of the graph, of graphs inside it, and of local functions."""
    for graph in (model.graph, *(f.graph for f in model.functions.values())):
        for scope in scopes(graph):
            yield from scope
