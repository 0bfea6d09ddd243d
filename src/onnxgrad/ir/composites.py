"""Named groups of nodes (composites): values that are a known function of others.

A derived graph has standard operators only. An emitter may also name a group of them (``builder.named("Adam", outputs,
of=inputs, beta=0.999)``); a runtime with a kernel of that name may replace the group. The name is a note on the nodes
that produce the outputs. The graph is the same with and without notes; notes are copied and pruned with their nodes.
They exist in memory only, unless `spell_notes` stores them in the metadata of the nodes.

A note is true when it is written. Passes rewire graphs later, so a note also has a digest of the expression of each
output over the inputs, and `Part.holds` checks that the graph still has the same expressions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.exact import exact
from onnxgrad.ir.match import constant_tensor, is_op, is_standard
from onnxgrad.ir.notes import notes, properties

_KEY = "onnxgrad.part"

#: The numbers of the operators of some expressions, and what each of these is: a result of one, an input, a constant.
Digest = tuple[dict[Any, int], list[Any]]

#: An expression of more operators is none that was named.
_LARGEST = 300
#: Constants of more elements are compared by type and shape only.
_COMPARED = 4096


@dataclass(frozen=True)
class Part:
    """Outputs that are the function `name` of inputs.

    Attributes:
        name: of the function.
        inputs: what it is a function of; None for one that is left out.
        outputs: its results; None for an unused one.
        attributes: numbers and lists of numbers that belong to the function.
        digest: of the expressions of the outputs over the inputs; None if no graph has them.
    """

    name: str
    inputs: Sequence[ir.Value | None]
    outputs: Sequence[ir.Value | None]
    attributes: Mapping[str, Any]
    digest: Digest | None

    @classmethod
    def of(
        cls, name: str, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value | None], attributes: Any
    ) -> Part:
        """A part with the digests of the graph as it is now."""
        operators: dict[Any, int] = {}
        results = _digest(outputs, inputs, lambda line: operators.setdefault(line, len(operators)))
        return cls(name, inputs, outputs, attributes, (operators, results))

    @classmethod
    def without_digests(
        cls, name: str, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value | None], attributes: Any
    ) -> Part:
        """A part that is only spelled: no graph has its expressions."""
        return cls(name, inputs, outputs, attributes, None)

    def holds(self, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value | None]) -> bool:
        """True if each of `outputs` that is present is still the same expression of `inputs`."""
        if self.digest is None:
            return False
        operators, results = self.digest
        return len(outputs) == len(results) and all(
            value is None or (old is not None and old == now)
            for value, old, now in zip(outputs, results, _digest(outputs, inputs, operators.get))
        )

    def note(self) -> None:
        """Store the note on the nodes that produce the outputs."""
        for value in self.outputs:
            node = None if value is None else value.producer()
            if node is not None:
                node.meta[_KEY] = self

    def by_name(self) -> Part:
        """The same with values that no node makes, so that a copy does not keep the graph of its original in memory."""
        inputs, outputs = (
            [None if v is None else ir.Value(name=v.name, type=v.type, shape=v.shape) for v in end]
            for end in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)


def named_parts(graph: ir.Graph) -> Iterator[Part]:
    """The parts of `graph` (not of graphs inside it) that were named, each once, in order of their first output.

    The values may be those of the original of this graph: names identify them here.
    """
    seen: set[int] = set()
    for node in graph:
        node_notes = notes(node)
        part = node_notes.get(_KEY) if node_notes else None
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part


def detach_parts(graph: ir.Graph) -> None:
    """Give the parts of `graph`, a copy, values of their own (see `Part.by_name`)."""
    detached: dict[int, Part] = {}
    for node in graph:
        node_notes = notes(node)
        part = node_notes.get(_KEY) if node_notes else None
        if part is not None:
            if id(part) not in detached:
                detached[id(part)] = part.by_name()
            node.meta[_KEY] = detached[id(part)]


def spell_notes(graph: ir.Graph) -> None:
    """Copy the notes on the nodes of `graph` to their metadata, so that they are saved."""
    for part in named_parts(graph):
        spelled = {
            "name": part.name,
            "inputs": [None if v is None else v.name for v in part.inputs],
            "outputs": [None if v is None else v.name for v in part.outputs],
            "attributes": dict(part.attributes),
        }
        for value in part.outputs:
            node = None if value is None else value.producer()
            if node is not None:
                node.metadata_props[_KEY] = json.dumps(spelled)


#: Writes a part of this name, with these attributes, over inputs of this type; None if it cannot.
Written = Callable[[str, Mapping[str, float], ir.DataType], Part | None]


def read_notes(graph: ir.Graph, find: Callable[[str], ir.Value | None], written: Written) -> None:
    """Move the notes that a file has in its metadata to the nodes.

    A file is not trusted. Its note only asks if these values are that part with those attributes; the graph is compared
    with the digests of the part as it is written here.

    Args:
        graph: whose nodes have them.
        find: tells which value a name means, None if there is none.
        written: writes the part that a note names.
    """
    read: dict[str, Part | None] = {}
    for node in graph:
        node_notes = properties(node)
        text = node_notes.pop(_KEY, None) if node_notes else None
        if text is None:
            continue
        if text not in read:
            read[text] = _read(text, find, written)
        part = read[text]
        if part is not None:
            node.meta[_KEY] = part


def _read(text: str, find: Callable[[str], ir.Value | None], written: Written) -> Part | None:
    try:
        fields = json.loads(text)
        inputs, outputs = ([None if n is None else find(n) for n in fields[end]] for end in ("inputs", "outputs"))
        numbers = {str(key): float(number) for key, number in fields["attributes"].items()}
        dtype = inputs[0].dtype if inputs and inputs[0] is not None else None
        lost = any(v is None and n is not None for v, n in zip(inputs, fields["inputs"]))
        part = None if lost or dtype is None else written(str(fields["name"]), numbers, dtype)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):  # not written here
        return None
    return None if part is None else Part(part.name, inputs, outputs, part.attributes, part.digest)


def _digest(
    outputs: Sequence[ir.Value | None], inputs: Sequence[ir.Value | None], number: Callable[[Any], int | None]
) -> list[Any]:
    """Each of `outputs` as an expression of `inputs`, constants and shapes; None if it is computed from more.

    `number` gives equal operators the same number, and None to one that it does not know. A constant, folded or not, is
    part of its readers.
    """
    known: dict[ir.Value | None, Any] = {None: None}
    known |= {v: f"input {i}" for i, v in reversed(list(enumerate(inputs))) if v is not None}
    arrays: dict[ir.Value, np.ndarray] = {}
    fixed = {None, *(v for v in inputs if constant_tensor(v) is not None)}
    owner = next((v.producer() for v in outputs if v is not None), None)
    opset = 1 if owner is None or owner.graph is None else owner.graph.opset_imports.get("", 1)
    for value in outputs:
        todo, count = [value], 0
        while todo:
            top = todo[-1]
            if top is None or top in known:
                todo.pop()
                continue
            node = top.producer()
            if node is None:
                if top.const_value is None or top.is_graph_input() or not top.is_initializer():
                    break
                known[top] = _of_tensor(top.const_value)
                fixed.add(top)
                continue
            if count > _LARGEST:
                break
            op_type = node.op_type if is_standard(node) else ""
            if op_type == "Constant" and "value" in node.attributes:
                known[top] = _of_tensor(node.attributes["value"].value)
                fixed.add(top)
            elif op_type in ("Shape", "Size"):  # of any value with the same dimensions
                known[top] = "shape"
            elif missing := [v for v in node.inputs if v not in known]:
                todo.extend(missing)
                count += len(missing)
            elif fixed.issuperset(node.inputs) and (array := exact(node, opset, arrays)) is not None:
                arrays[top] = array  # folded, or later
                known[top] = _of_tensor(ir.Tensor(array, dtype=top.dtype))
                fixed.add(top)
            else:
                line = _of_node(node, known)
                place = None if line is None else number(line)
                if place is None:
                    break
                for i, v in enumerate(node.outputs):
                    known.setdefault(v, (place, i))
    return [known.get(value) for value in outputs]


def _of_node(node: ir.Node, known: Mapping[ir.Value | None, Any]) -> Any:
    operands = tuple([known[v] for v in node.inputs[: 1 if is_op(node, "Pad") else None]])  # `finish` rewrites a Pad's
    attributes = []
    for name, a in sorted(node.attributes.data.items()) if node.attributes.data else ():
        if a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) or a.is_ref():
            return None
        held = _of_tensor(a.as_tensor()) if a.type == ir.AttributeType.TENSOR else plain_value(a.value)
        attributes.append((name, held))
    return node.domain, node.op_type, operands, tuple(attributes)


def plain_value(value: Any) -> Any:
    """The value of an attribute in the form that a file stores."""
    if isinstance(value, (list, tuple)):
        return tuple([plain_value(v) for v in value])
    return float(np.float32(value)) if isinstance(value, float) else value


def _of_tensor(tensor: ir.TensorProtocol) -> Any:
    dims = tuple(map(int, tensor.shape))  # type: ignore[arg-type]
    small = math.prod(dims) <= _COMPARED and tensor.dtype != ir.DataType.STRING
    return tensor.dtype, dims, tensor.tobytes() if small else b""
