"""Weights, wherever an exporter has put them: as initializers of their own, so that bindings can name them.

Three habits of exporters are undone. Weights inside branches and bodies move to the outer graph, where bindings can
name them. Weights in Constant nodes become initializers. If the model has initializers of rank 2 or more as well, only
those that a layer reads do: its exporter may store weights there, and constants in Constants, as PyTorch's always does,
whose Constants stay. Tensors that are equal at export time are often stored
once and distributed by Identity nodes, so that a running mean *is* a bias as long as both are zero; trained, they would
move together. Such a copy becomes a tensor of its own if all its elements are equal (fresh weights: zeros, ones) or if
it is a running statistic; other copies are regarded as tied on purpose, like the two ends of a language model, and stay
tied. The two branches of an If (a decoder with and without its cache) have such copies in the same order, and share
them. PyTorch's newer exporter leaves no copies, but its nodes name their modules: fresh weights that several modules
read become one for each.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.ir import Names
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import constant_tensor, is_op
from onnxgrad.training.graph.exported_constants import LAYERS, behind_layer, meetings

#: Key of the metadata of a node: the modules of PyTorch around it, and its own name.
_SCOPES = "pkg.torch.onnx.name_scopes"


def own_weights(model: ir.Model, wanted: Collection[str]) -> None:
    """Make every weight of `model`, and all `wanted` ones, an initializer of its own, in place."""
    graph = model.graph
    keeps = any(_is_matrix(v) for g in (graph, *graph.subgraphs()) for v in g.initializers.values())
    sure = keeps and model.producer_name == "pytorch"
    names = Names.of_graph(graph)
    for inner in list(graph.subgraphs()):
        _hoist(graph, inner, names)
    for scope in (graph, *graph.subgraphs()):
        for node in list(scope):
            if is_op(node, "Constant"):
                _lift(graph, node, wanted, keeps, sure, names)
    for node in list(graph):
        if is_op(node, "Identity"):
            _untie(graph, node)
        elif is_op(node, "If"):
            _untie_branches(graph, node)
    _split_statistics(graph)
    _split_modules(graph)


def _is_matrix(value: ir.Value) -> bool:
    return value.dtype in FLOATS and value.shape is not None and len(value.shape) > 1 and bool(value.uses())


def _hoist(graph: ir.Graph, inner: ir.Graph, names: Names) -> None:
    """Move the float initializers of a branch or a body to the graph around it."""
    for name, value in list(inner.initializers.items()):
        tensor = value.const_value
        if tensor is None or value.dtype not in FLOATS or tensor.size < 2 or value in (*inner.inputs, *inner.outputs):
            continue
        own = add_initializer(
            graph, _rename_tensor(tensor, name if name not in graph.initializers else names.fresh(name))
        )
        value.replace_all_uses_with(own)
        del inner.initializers[name]


def _of_layer(value: ir.Value) -> bool:
    """True if a layer reads `value` as a weight, or it is the bias behind one."""
    return any(
        (at == 0 if node.op_type == "Gather" else at > 0) if node.op_type in LAYERS else
        node.op_type in ("Add", "Sub") and behind_layer(node, at)
        for node, at, _ in meetings(value)
    )  # fmt: skip


def _lift(graph: ir.Graph, node: ir.Node, wanted: Collection[str], keeps: bool, sure: bool, names: Names) -> None:
    """Make a float Constant an initializer if it is wanted, a statistic, or the weight of a layer.

    Other constants of several elements too, unless the graph `keeps` weights as initializers; weights of layers unless
    it is `sure` to keep all there.
    """
    value = node.outputs[0]
    tensor = constant_tensor(value)
    if tensor is None or tensor.dtype not in FLOATS or value.is_graph_output():
        return
    weight = (not sure and len(tensor.shape) > 0 and _of_layer(value)) or (tensor.size > 1 and not keeps)
    if weight or value.name in wanted or _only_statistics(value):
        _replace(graph, node, tensor, names)


def _untie(graph: ir.Graph, node: ir.Node) -> None:
    """An Identity of an initializer that is equal by chance becomes an initializer."""
    source, copy = node.inputs[0], node.outputs[0]
    if source is None or source.const_value is None or source.dtype not in FLOATS or copy.is_graph_output():
        return
    if source.is_initializer() and (_only_statistics(copy) or _uniform(source.const_value)):
        _replace(graph, node, source.const_value)


def _untie_branches(graph: ir.Graph, node: ir.Node) -> None:
    """Copies of fresh weights in both branches of an If become initializers that the branches share."""
    copies: list[dict[ir.Value, list[ir.Node]]] = []
    for name in ("then_branch", "else_branch"):
        copies.append({})
        for inner in node.attributes.get_graph(name) or ():
            source = inner.inputs[0] if is_op(inner, "Identity") else None
            if source is None or source.dtype not in FLOATS or not source.is_initializer():
                continue
            if source.graph is graph and not inner.outputs[0].is_graph_output():
                copies[-1].setdefault(source, []).append(inner)
    first, second = copies
    for source, ones in first.items():
        others = second.get(source, [])
        if len(ones) != len(others) or source.const_value is None or not _uniform(source.const_value):
            continue
        for one, other in zip(ones, others):
            kept = one.outputs[0].name or ""
            _replace(graph, one, source.const_value)
            other.outputs[0].replace_all_uses_with(graph.initializers[kept])
            assert isinstance(other.graph, ir.Graph)
            other.graph.remove(other, safe=True)


def _split_modules(graph: ir.Graph) -> None:
    """Fresh weights that modules of PyTorch share, because they are equal, become initializers of their own."""
    names = Names.of_graph(graph)
    for name, value in list(graph.initializers.items()):
        module, _, part = name.rpartition(".")
        readers: dict[str, list[tuple[ir.Node, int]]] = {}
        for node, at in value.uses():
            readers.setdefault(_module(node), []).append((node, at))
        tensor = value.const_value
        if len(readers) < 2 or module not in readers or "" in readers or tensor is None or tensor.size < 2:
            continue
        if value.dtype not in FLOATS or value.is_graph_output() or not _uniform(tensor):
            continue
        for other, uses in readers.items():
            if other != module:
                own = add_initializer(graph, _rename_tensor(tensor, names.exactly(f"{other}.{part}")))
                for node, at in uses:
                    node.replace_input_with(at, own)


def _module(node: ir.Node) -> str:
    """The module of PyTorch that `node` was exported from; empty if it does not say so."""
    scopes = re.findall(r"'([^']*)'", node.metadata_props.get(_SCOPES, ""))
    return scopes[-2] if len(scopes) > 1 else ""


def _split_statistics(graph: ir.Graph) -> None:
    """A running statistic that is read as something else as well becomes a tensor of its own."""
    names = Names.of_graph(graph)
    for node in list(graph):
        if not is_op(node, "BatchNormalization"):
            continue
        for i, value in enumerate(node.inputs[3:5], start=3):
            if value is not None and value.is_initializer() and not _only_statistics(value, i):
                assert value.const_value is not None
                own = add_initializer(graph, _rename_tensor(value.const_value, names.fresh(f"{value.name}_statistic")))
                for user, at in list(value.uses()):
                    if is_op(user, "BatchNormalization") and at == i:
                        user.replace_input_with(at, own)


def _replace(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol, names: Names | None = None) -> None:
    """An initializer with `tensor`, in place of `node` (of `graph`, or inside it) and with the name of its output."""
    old, scope = node.outputs[0], node.graph
    assert isinstance(scope, ir.Graph)
    taken = names is not None and old.name in graph.initializers  # branches may use the same name
    name = names.fresh(old.name or "weight") if taken and names else old.name or ""
    old.replace_all_uses_with(add_initializer(graph, _rename_tensor(tensor, name)))
    scope.remove(node, safe=True)


def _rename_tensor(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def _only_statistics(value: ir.Value, at: int | None = None) -> bool:
    """True if all uses of `value` are running mean (3) or variance (4), or input `at`."""
    uses = list(value.uses())
    places = {i if is_op(n, "BatchNormalization") else -1 for n, i in uses}
    return bool(uses) and (places == {at} if at is not None else len(places) == 1 and places <= {3, 4})


def _uniform(tensor: ir.TensorProtocol) -> bool:
    array = tensor.numpy()
    return array.size > 0 and bool((array == array.flat[0]).all())
