"""Weights that an exporter has stored once, because they are equal, become tensors of their own.

Trained, they would move together: a running mean *is* a bias as long as both are zero. What is parted:

- a running statistic that is read as something else as well;
- a bias of several layers that have different weights: fresh ones of LSTMs are equal, though not zero;
- fresh weights, whose elements are all equal, that an Identity hands out or that different parameters are;
- equal layers, as PyTorch makes them by copying one. Its newer exporter writes at each node which parameters it read.
  Its older one hands equal parameters out by Identity, and has one name for a parameter of several modules: names that
  differ in a number are two (``layers.0.weight``, ``layers.1.weight``). A matrix that it has transposed has no such
  name; it is parted if another weight shows that the layers were copied, and its readers are in two of them.

Other copies are regarded as tied on purpose, like the two ends of a language model, and stay tied. The two branches of
an If (a decoder with and without its cache) have copies in the same order, and share them.
"""

from __future__ import annotations

import re
from itertools import takewhile

import onnx_ir as ir

from onnxgrad.ir import Names
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.exporter_names import call_parameters, parameter_names
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import is_op, not_none

#: Which input of a layer is the bias; input 1 has its weights.
_BIASES = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "LSTM": 3, "GRU": 3, "RNN": 3}
Uses = list[tuple[ir.Node, int]]  #: nodes, and the inputs at which they read a value


def part_copies(model: ir.Model) -> None:
    """Make copies of weights that were parameters of their own initializers of `model`, in place."""
    graph = model.graph
    layers = _copied_layers(graph) if model.producer_name == "pytorch" else set()
    for node in list(graph):
        if is_op(node, "Identity"):
            _part_identity(graph, node, layers)
        elif is_op(node, "If"):
            _part_branches(graph, node)
    names = Names.of_graph(graph)
    _part_statistics(graph, names)
    _part_biases(graph, names)
    _part_parameters(graph, names)


def replace_node(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol, names: Names | None = None) -> None:
    """Put an initializer with `tensor` and the name of its output in place of `node`, of `graph` or inside it."""
    old, scope = node.outputs[0], node.graph
    assert isinstance(scope, ir.Graph)
    taken = names is not None and old.name in graph.initializers  # branches may use the same name
    name = names.fresh(old.name or "weight") if taken and names else old.name or ""
    old.replace_all_uses_with(add_initializer(graph, rename_tensor(tensor, name)))
    scope.remove(node, safe=True)


def rename_tensor(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """A copy of `tensor` with another name."""
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def only_statistics(value: ir.Value, at: int | None = None) -> bool:
    """True if all uses of `value` are running mean (3) or variance (4), or input `at`."""
    uses = list(value.uses())
    places = {i if is_op(n, "BatchNormalization") else -1 for n, i in uses}
    return bool(uses) and (places == {at} if at is not None else len(places) == 1 and places <= {3, 4})


def _uniform(tensor: ir.TensorProtocol) -> bool:
    array = tensor.numpy()
    return array.size > 0 and bool((array == array.flat[0]).all())


def _source(node: ir.Node) -> ir.Value | None:
    """The initializer of floats that the Identity `node` copies, if its copy is no output."""
    source = node.inputs[0] if is_op(node, "Identity") else None
    if source is None or source.const_value is None or source.dtype not in FLOATS or not source.is_initializer():
        return None
    return None if node.outputs[0].is_graph_output() else source


def _part_identity(graph: ir.Graph, node: ir.Node, layers: set[str]) -> None:
    source, copy = _source(node), node.outputs[0]
    if source is None or source.const_value is None:
        return
    copied = {_list_of(source.name or "", copy.name or ""), _list_of(_module_of(source), _module_of(copy))} & layers
    if copied or only_statistics(copy) or _uniform(source.const_value):
        replace_node(graph, node, source.const_value)


def _copied_layers(graph: ir.Graph) -> set[str]:
    """The lists of layers (``encoder.layers.``) that are copies: parameters of two are equal, and not by chance."""
    sources = [(_source(node), node.outputs[0]) for node in graph]
    return {
        of
        for source, copy in sources
        if source is not None and (of := _list_of(source.name or "", copy.name or "")) is not None
        if "." in (copy.name or "") and source.const_value is not None and not _uniform(source.const_value)
    }


def _list_of(one: str, other: str) -> str | None:
    """The text before the number in which two names first differ; None if they differ in more than numbers."""
    ones, others = (re.split(r"(\d+)", name) for name in (one, other))
    if one == other or ones[::2] != others[::2]:
        return None
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(ones, others)))


def _module_of(value: ir.Value) -> str:
    """The module of PyTorch whose node reads `value`, by the names that its older exporter gives; empty if several do.

    A module that is used again has another name (``layers.0_1``).
    """
    modules = {n.name.rpartition("/")[0] for n, _ in value.uses() if n.name and not is_op(n, "Identity")}
    return modules.pop().lstrip("/").replace("/", ".") if len(modules) == 1 else ""


def _part_branches(graph: ir.Graph, node: ir.Node) -> None:
    """Copies of fresh weights in both branches of an If become initializers that the branches share."""
    copies: list[dict[ir.Value, list[ir.Node]]] = []
    for name in ("then_branch", "else_branch"):
        copies.append({})
        for inner in node.attributes.get_graph(name) or ():
            source = _source(inner)
            if source is not None and source.graph is graph:
                copies[-1].setdefault(source, []).append(inner)
    first, second = copies
    for source, ones in first.items():
        others = second.get(source, [])
        if len(ones) != len(others) or source.const_value is None or not _uniform(source.const_value):
            continue
        for one, other in zip(ones, others):
            kept = one.outputs[0].name or ""
            replace_node(graph, one, source.const_value)
            other.outputs[0].replace_all_uses_with(graph.initializers[kept])
            assert isinstance(other.graph, ir.Graph)
            other.graph.remove(other, safe=True)


def _part_statistics(graph: ir.Graph, names: Names) -> None:
    for node in list(graph):
        if not is_op(node, "BatchNormalization"):
            continue
        for i, value in enumerate(node.inputs[3:5], start=3):
            if value is not None and value.is_initializer() and not only_statistics(value, i):
                uses = [(user, at) for user, at in value.uses() if is_op(user, "BatchNormalization") and at == i]
                _give(graph, value, uses, names.fresh(f"{value.name}_statistic"))


def _part_biases(graph: ir.Graph, names: Names) -> None:
    for name, value in list(graph.initializers.items()):
        readers: dict[ir.Value | None, Uses] = {}
        for node, at in value.uses():
            is_bias = is_op(node, node.op_type) and _BIASES.get(node.op_type) == at
            readers.setdefault(node.inputs[1] if is_bias else None, []).append((node, at))
        if None not in readers and value.dtype in FLOATS and not value.is_graph_output():
            for uses in list(readers.values())[1:]:
                _give(graph, value, uses, names.fresh(name))


def _part_parameters(graph: ir.Graph, names: Names) -> None:
    """Part what several nodes read, where PyTorch's newer exporter has written that they read different parameters."""
    states = parameter_names(graph)
    for name, value in list(graph.initializers.items()) if states else ():
        tensor = value.const_value
        if tensor is None or tensor.size < 2 or value.dtype not in FLOATS or value.is_graph_output():
            continue
        kind = name.rpartition(".")[2] if name in states.values() else ""
        readers: dict[frozenset[str], Uses] = {}
        for node, at in value.uses():
            read = [states.get(p, p) for p in call_parameters(node)]
            read = [r for r in read if r.rpartition(".")[2] == kind] or read
            readers.setdefault(frozenset(read), []).append((node, at))
        kept = next((r for r in readers if name in r), next(iter(readers), frozenset()))
        if len(readers) > 1 and sum(map(len, readers)) == len(frozenset().union(*readers)) and all(readers):
            for own, uses in readers.items():
                if own is not kept:
                    _give(graph, value, uses, names.exactly(*own) if kind and len(own) == 1 else names.fresh(name))


def _give(graph: ir.Graph, value: ir.Value, uses: Uses, name: str) -> None:
    """A copy of the initializer `value`, with a `name` of its own, for some of its `uses`."""
    own = add_initializer(graph, rename_tensor(not_none(value.const_value), name))
    for node, at in uses:
        node.replace_input_with(at, own)
