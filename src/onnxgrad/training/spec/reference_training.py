"""Training as the specification words it, slowly: the oracle of the compiled step.

State is a dictionary that all graphs share. A step concatenates the inference graph and the algorithm, evaluates the
result with the current state, and assigns the bound values; an iteration does so for every entry in order. This module
does not use step graphs, slots or sessions with state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.model_io import AnyModel, training_info
from onnxgrad.model_io.read import read_proto
from onnxgrad.model_io.zeros import is_declared, read_tensor
from onnxgrad.runtime.reference import ReferenceSession
from onnxgrad.training.spec.graph_call import without_calls
from onnxgrad.training.spec.initialization import seed_all
from onnxgrad.training.spec.lower_model import lower_gradients
from onnxgrad.training.spec.training_info import model_proto, mutable
from onnxgrad.training.spec.validation import refuse_invalid
from onnxgrad.transforms.gradient_node import DOMAIN

Arrays = dict[str, np.ndarray]


class ReferenceTraining:
    """A training model as a stateful object, by the specification's definition.

    Attributes:
        state: the present value of every state variable: each initializer that a binding names.
    """

    def __init__(self, model: AnyModel, runs: Callable[[ir.Model], Any] = ReferenceSession) -> None:
        """Start from the values of the initializers.

        Args:
            model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with training information.
            runs: makes something that evaluates a model; default: the reference evaluator of onnx.

        Raises:
            BadInput: a rule of the specification is violated; every one is named.
        """
        refuse_invalid(model)
        self.proto = model_proto(model)
        held = read_proto(self.proto)
        self.infos = [without_calls(held, info, i) for i, info in enumerate(training_info(held))]
        for tensor in (t for info in self.infos for t in info.algorithm.initializer if is_declared(t)):
            tensor.raw_data = read_tensor(tensor).tobytes()
        self.runs = runs
        weights = {t.name: t for t in self.proto.graph.initializer}
        for info in self.infos:
            weights |= {t.name: t for t in info.algorithm.initializer if t.name in mutable([info])}
        keys = {b.key for i in self.infos for b in (*i.update_binding, *i.initialization_binding)}
        self.state: Arrays = {n: numpy_helper.to_array(t).copy() for n, t in weights.items() if n in keys}
        self._first = {n: a.copy() for n, a in self.state.items()}
        self._steps: dict[int, tuple[Any, list[str], dict[str, str]]] = {}

    def initialize(self, seed: int | None = None) -> None:
        """The initialization step: state variables get their initializers, then bound values, entry by entry.

        Random operators that have no seed get one by `seed`; default: others every time.
        """
        draws = np.random.default_rng(seed)
        self.state = {n: a.copy() for n, a in self._first.items()}
        for info in self.infos:
            if not info.initialization_binding:
                continue
            proto = lower_gradients(_model_of(self.proto, info.initialization))
            seed_all(proto.graph.node, draws)
            found = self._evaluate(proto, {})
            for binding in info.initialization_binding:
                self.state[binding.key] = found[binding.value]

    def step(self, batch: Mapping[str, np.ndarray], entry: int | None = None) -> list[Arrays]:
        """One iteration: all entries in order, each on the state of the one before; or one `entry` alone.

        Args:
            batch: the inputs of the graphs by name; other initializers (a learning rate) may be overridden.
            entry: which entry to run; default: all of them.

        Returns:
            The outputs of the algorithm of each entry that ran.
        """
        return [self._run(i, batch) for i in (range(len(self.infos)) if entry is None else [entry])]

    def infer(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """The outputs of the inference graph with the current state, which does not change."""
        proto = _model_of(self.proto, self.proto.graph)
        return self._evaluate(_with_state(lower_gradients(proto, variables=self.state), self.state), inputs)

    def _evaluate(self, proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Arrays:
        return self.runs(ir.from_proto(proto)).run(dict(feeds))

    def _run(self, index: int, batch: Mapping[str, np.ndarray]) -> Arrays:
        info = self.infos[index]
        if index not in self._steps:
            self._steps[index] = self._prepared(info)
        session, reads, outputs = self._steps[index]
        rates = {t.name: numpy_helper.to_array(t) for t in info.algorithm.initializer}
        known = rates | dict(batch) | self.state
        lacking = [name for name in reads if name not in known]
        if lacking:
            raise BadInput(f"training entry {index} reads {', '.join(map(repr, lacking))}, which the batch lacks")
        made = session.run({name: known[name] for name in reads})
        found = {name: made[lowered] for name, lowered in outputs.items()}
        for binding in info.update_binding:
            self.state[binding.key] = found[binding.value]
        return {v.name: found[v.name] for v in info.algorithm.output}

    def _prepared(self, info: onnx.TrainingInfoProto) -> tuple[Any, list[str], dict[str, str]]:
        """The executed graph of an entry, with state and rates as inputs; its inputs, and its output names.

        An output that no node computes (a state that is assigned another's value) is a copy.
        """
        values = [v.name for v in info.algorithm.output] + [b.value for b in info.update_binding]
        names = list(dict.fromkeys(values))
        graph = self._concatenated(info.algorithm, names)
        made = {o for node in graph.node for o in node.output}
        outputs = {name: name if name in made else f"{name}/copy" for name in names}
        for value in (v for v in graph.output if v.name not in made):
            graph.node.append(onnx.helper.make_node("Identity", [value.name], [outputs[value.name]]))
            value.name = outputs[value.name]
        outside = set(self.state) | mutable([info])
        lowered = lower_gradients(_model_of(self.proto, graph), variables=outside)
        held = {t.name: t for t in lowered.graph.initializer if t.name in outside}
        for name, tensor in held.items():
            lowered.graph.initializer.remove(tensor)
            lowered.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        return self.runs(ir.from_proto(lowered)), [v.name for v in lowered.graph.input], outputs

    def _concatenated(self, algorithm: onnx.GraphProto, outputs: Sequence[str]) -> onnx.GraphProto:
        """Inference graph, then algorithm, list by list, pruned to `outputs`."""
        graph = onnx.GraphProto(name="executed")
        for part in (self.proto.graph, algorithm):
            graph.input.extend(part.input)
            graph.initializer.extend(part.initializer)
            graph.output.extend(part.output)
            graph.node.extend(part.node)
            graph.value_info.extend(part.value_info)
            graph.sparse_initializer.extend(part.sparse_initializer)
        own = {t.name for t in graph.initializer}
        for info in self.infos:  # state of other entries is visible everywhere
            graph.initializer.extend(
                t for t in info.algorithm.initializer if t.name in self.state and t.name not in own
            )
        wanted = set(outputs)
        needed = []
        for node in reversed(graph.node):
            if wanted & set(node.output):
                needed.append(node)
                wanted |= set(_reads(node))
        kept = {v.name: v for v in graph.output if v.name in outputs}
        nodes, inputs = needed[::-1], [v for v in graph.input if v.name in wanted]
        for field in ("node", "input", "output"):
            graph.ClearField(field)
        graph.node.extend(nodes)
        graph.input.extend(v for v in inputs if v.name not in own)
        graph.output.extend(kept[name] for name in outputs)
        for i in reversed(range(len(graph.initializer))):
            if graph.initializer[i].name not in wanted:
                del graph.initializer[i]
        return graph


def _reads(node: onnx.NodeProto) -> list[str]:
    """The names that `node` reads, including those in a Gradient and in graphs inside the node."""
    names = list(node.input)
    for a in node.attribute:
        for graph in (a.g, *a.graphs):
            names += [v.name for v in graph.output] + [r for inner in graph.node for r in _reads(inner)]
        if node.domain == DOMAIN and node.op_type == "Gradient":
            names += [s.decode() for s in (*a.strings, *([a.s] if a.name == "y" else []))]
    return names


def _model_of(proto: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    model = onnx.ModelProto(ir_version=max(8, proto.ir_version), graph=graph)
    model.graph.name = graph.name or "graph"
    model.opset_import.extend(proto.opset_import)
    model.functions.extend(proto.functions)
    return model


def _with_state(proto: onnx.ModelProto, state: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    for tensor in proto.graph.initializer:
        if tensor.name in state:
            tensor.CopyFrom(numpy_helper.from_array(state[tensor.name], tensor.name))
    return proto
