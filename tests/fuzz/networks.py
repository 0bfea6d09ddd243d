"""Random networks: layers on rows of data, each tried on ONNX Runtime as it is added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.runtime.failures import one_line
from tests.fuzz.random_graphs import Rng, Unfit
from tests.training.nets import session

#: Sizes of channels, features and lengths: odd ones, powers of two and those beside them.
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65]
STEPS = 5
#: Most numbers that a row of a value holds, and most weights of a network.
LARGEST, WEIGHTS = 3000, 60_000


class Network:
    """A network that grows. Axis 0 of every value is the batch; its number of rows is `rows`."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.rows = int(rng.choice([1, 2, 3, 4, 5, 8, 9, 16, 17, 33]))
        self.is_dynamic = bool(rng.random() < 0.6)
        self.opset = int(rng.choice([18, 20, 21, 22, 23, 24]))
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.data: dict[str, np.ndarray] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.layers: list[str] = []
        self.count = 0

    # --- writing ------------------------------------------------------------------------------------

    def name(self, kind: str = "v") -> str:
        """A new name."""
        self.count += 1
        return f"{kind}{self.count}"

    def input(self, array: np.ndarray, kind: str = "x") -> str:
        """A new input of the data: an array of `STEPS` batches."""
        name = self.name(kind)
        self.data[name] = array
        self.shapes[name] = (self.rows, *array.shape[1:])
        return name

    def numbers(self, *shape: int) -> np.ndarray:
        """Float data of that shape for every row."""
        return self.rng.standard_normal((STEPS * self.rows, *shape)).astype(np.float32)

    def weight(self, *shape: int, scale: float | None = None, around: float = 0.0) -> str:
        """A trained tensor, scaled by the number of its inputs (all axes but the first)."""
        name = self.name("w")
        fan = max(1, int(np.prod(shape[1:])))
        drawn = self.rng.standard_normal(shape) * (fan**-0.5 if scale is None else scale) + around
        self.weights[name] = np.asarray(drawn, np.float32)
        return name

    def constant(self, array: Any, dtype: Any = np.int64) -> str:
        """A tensor that is not trained."""
        name = self.name("c")
        self.constants[name] = np.asarray(array, dtype)
        return name

    def add(self, op: str, *operands: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """A node; the names of its outputs, or of the only one."""
        names = [self.name() for _ in range(outputs)]
        attributes = {k: v for k, v in attributes.items() if v is not None}
        self.nodes.append(helper.make_node(op, list(operands), names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def chance(self, share: float) -> bool:
        """True for this share of all draws."""
        return bool(self.rng.random() < share)

    def choose(self, among: Sequence[Any]) -> Any:
        """One of them."""
        return among[int(self.rng.integers(len(among)))]

    def size(self, least: int = 1, most: int = 65) -> int:
        """A size."""
        return self.choose([s for s in SIZES if least <= s <= most])

    # --- trying -------------------------------------------------------------------------------------

    def attempt(self, make: Callable[[Network, str], str], x: str) -> str:
        """The value that a layer computes of `x`; Unfit, and the network as before, if ONNX Runtime cannot run it."""
        before = copy(self)
        for held in ("nodes", "weights", "constants", "data", "shapes", "layers"):
            setattr(before, held, copy(getattr(self, held)))
        try:
            result = make(self, x)
            if result != x:
                self.measure(self.nodes[len(before.nodes) :], [result])
            shape = self.shapes[result]
            fits = len(shape) > 1 and shape[0] == self.rows and 0 < np.prod(shape[1:]) <= LARGEST
            if not fits or sum(w.size for w in self.weights.values()) > WEIGHTS:
                raise Unfit(f"{make.__name__} gives {shape}")
        except (Unfit, ValueError, IndexError, ZeroDivisionError):
            count = self.count
            self.__dict__.update(before.__dict__)
            self.count = count
            raise
        self.layers.append(make.__name__)
        return result

    def measure(self, nodes: Sequence[onnx.NodeProto], results: Sequence[str]) -> None:
        """Run nodes on data of their operands' shapes, and note the shapes of `results`."""
        inner = {o for n in nodes for o in n.output}
        outer = [n for n in read_by(nodes) if n and n not in inner]
        feeds = {n: self.data[n][: self.rows] for n in outer if n in self.data}
        drawn = np.random.default_rng(1)
        for name in outer:
            if name in self.shapes and name not in feeds:
                feeds[name] = drawn.standard_normal(self.shapes[name]).astype(np.float32)
        nodes = [plain for node in nodes for plain in batch_second(node)]
        model = self.model(nodes, feeds, results, symbolic=False)
        try:
            made = session(model)
            onnxruntime.set_default_logger_severity(4)  # what it cannot run is drawn again
            found = made.run(list(results), feeds)
        except Exception as e:
            raise Unfit(one_line(e)) from e
        for name, array in zip(results, found):
            if array.dtype == np.float32 and not (np.isfinite(array).all() and np.abs(array).max(initial=0) < 1e4):
                raise Unfit(f"{name} is not finite, or large")
            self.shapes[name] = array.shape

    # --- the whole ----------------------------------------------------------------------------------

    def model(
        self, nodes: Sequence[onnx.NodeProto], inputs: dict[str, np.ndarray], outputs: Sequence[str], symbolic: bool
    ) -> onnx.ModelProto:
        """A model of float32 with the weights and constants that `nodes` read."""
        used = set(read_by(nodes))
        held = {n: a for n, a in (self.weights | self.constants).items() if n in used}
        ends = [
            helper.make_tensor_value_info(
                n, helper.np_dtype_to_tensor_dtype(a.dtype), ["N" if symbolic else self.rows, *a.shape[1:]]
            )
            for n, a in inputs.items()
        ]
        results = []
        for name in outputs:
            shape = self.shapes.get(name)
            dims = None if shape is None else ["N" if symbolic else shape[0], *shape[1:]]
            results.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
        initializers = [numpy_helper.from_array(a, n) for n, a in held.items()]
        graph = helper.make_graph(list(nodes), "network", ends, results, initializers)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def finished(self, y: str) -> onnx.ModelProto:
        """The network up to `y`."""
        used = set(read_by(self.nodes))
        self.data = {n: a for n, a in self.data.items() if n in used}
        return self.model(self.nodes, self.data, [y], self.is_dynamic)


def batch_second(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """`node`, or the same with ``layout=0`` of a recurrent one that ONNX Runtime does not run."""
    if not any(a.name == "layout" and a.i for a in node.attribute):
        return [node]
    turned, perms, found = onnx.NodeProto(), {3: [1, 0, 2], 4: [2, 0, 1, 3]}, []
    turned.CopyFrom(node)
    del turned.attribute[[a.name for a in node.attribute].index("layout")]
    for at, name in enumerate(node.input):
        if name and at in (0, 5, 6):
            turned.input[at] = f"{node.name}{name}_turned{at}"
            found.append(helper.make_node("Transpose", [name], [turned.input[at]], perm=perms[3]))
    found.append(turned)
    for at, name in enumerate(node.output):
        turned.output[at] = f"{name}_turned"
        found.append(helper.make_node("Transpose", [turned.output[at]], [name], perm=perms[3 if at else 4]))
    return found


def read_by(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """The names that `nodes` read, bodies included."""
    found: dict[str, None] = {}
    for node in nodes:
        found |= dict.fromkeys(node.input)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found |= dict.fromkeys(read_by(attribute.g.node))
                found |= dict.fromkeys(o.name for o in attribute.g.output)
    return list(found)


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model in float64."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    _widen(found.graph)
    return found


def _widen(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _widen(attribute.g)
            elif (attribute.name == "to" and attribute.i == TensorProto.FLOAT) or attribute.name == "stash_type":
                attribute.i = TensorProto.DOUBLE
