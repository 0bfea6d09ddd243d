"""Validate a model's training information against the specification; report every problem, not only the first.

``onnx.checker`` checks none of it. Bindings, names and operators are checked as they are written, so that one mistake
does not hide the next; Gradient nodes are checked on the executed graph, if there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.names import described
from onnxgrad.model_io import AnyModel, training_info
from onnxgrad.model_io.local_functions import infer_types
from onnxgrad.model_io.read import is_ordered, load_model, read_proto
from onnxgrad.model_io.symbolic_dims import settle_dims
from onnxgrad.training.spec.graph_call import calls, without_calls
from onnxgrad.training.spec.operands import misfits, misuses, underivable
from onnxgrad.training.spec.training_info import (
    Source,
    concatenate,
    conflicts,
    mutable,
    named_values,
    read,
)
from onnxgrad.transforms.gradient_node import DOMAIN, is_gradient, scopes

#: The rules, by the names that problems carry, and where the specification states them.
RULES = {
    "key": "a binding's key is an initializer of the inference graph or of the same entry's algorithm",
    "value": "a binding's value is an output: of the initialization; of the algorithm or the inference graph",
    "unique": "no key is bound twice, in all entries together",
    "type": "what an initializer takes has its type and shape, and what an optimizer takes those of its tensor",
    "initialization": "the initialization is a graph without inputs",
    "ssa": "in the graph that is executed, the inference graph and then the algorithm, each name is defined once",
    "order": "a value is computed before it is read",
    "visibility": "an algorithm reads its own values and those of the inference graph, which reads none of it",
    "operator": "operators exist in an imported opset, and are given what they demand",
    "name": "the names in a Gradient exist",
    "gradient": "the variables of a Gradient are independent and determine y",
    "call": "a GraphCall (ONNX 1.7) calls the inference graph, by position, from an algorithm",
}

#: How many problems an error message lists.
MOST = 12
#: Weights of more bytes are not copied to be looked at.
_SMALL = 1024


@dataclass(frozen=True)
class Problem:
    """One violated rule.

    Attributes:
        where: the entry, and the part of it; or the inference graph.
        rule: a key of `RULES`.
        message: what is wrong, with names.
    """

    where: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} ({self.rule})"


def validate(model: AnyModel) -> list[Problem]:
    """Every rule for training information that `model` violates, in the order of the entries.

    Raises:
        BadInput: the model itself cannot be read.
    """
    if isinstance(model, onnx.ModelProto):
        proto, held = model, read_proto(model)
    else:
        held = model if isinstance(model, ir.Model) else load_model(model)
        if not training_info(held) and not any(n.domain == DOMAIN for g in _all_graphs(held) for n in g):
            return []
        proto = _outline(held)
    written = training_info(held)
    found = list(_of_inference(proto, held, written))
    sound = not any(p.rule == "visibility" for p in found)
    found += _unique(written, "update_binding")
    found += _unique(written, "initialization_binding")
    found += [Problem("state", "unique", why) for why in conflicts(written)]
    infos = []
    for index, info in enumerate(written):
        try:
            info = without_calls(held, info, index)
        except BadInput as e:
            found.append(Problem(f"entry {index}, algorithm", "call", str(e)))
        infos.append(info)
    for index in range(len(infos)):
        found += _of_entry(proto, held, infos, index, sound)
    return list(dict.fromkeys(found))


def _outline(model: ir.Model) -> onnx.ModelProto:
    """`model` as a message without training information and without the data of large weights."""
    copy = model.clone()
    for name, value in copy.graph.initializers.items():
        held = value.const_value
        if held is not None and held.dtype != ir.DataType.STRING and held.nbytes > _SMALL:
            shape = ir.Shape(held.shape)  # type: ignore[arg-type]
            value.const_value = ir.ExternalTensor("left out", 0, held.nbytes, held.dtype, shape=shape, name=name)
    return ir.to_proto(copy)


def refuse_invalid(model: AnyModel) -> None:
    """Raise BadInput, with the first dozen problems, unless the training information is valid."""
    problems = validate(model)
    if problems:
        listed = [f"  {p}" for p in problems[:MOST]]
        if len(problems) > MOST:
            listed.append(f"  … and {len(problems) - MOST} more, which validate (onnxgrad check) lists")
        raise BadInput("\n".join(["the training information is not valid", *listed]))


def read_valid(model: AnyModel | Source) -> Source:
    """`model` with its training information, which is validated unless it is a `Source`.

    Raises:
        BadInput: the model cannot be read, or a rule of the specification is violated.
    """
    if isinstance(model, Source):
        return model
    source = read(model)
    refuse_invalid(source.model)
    return source


def _all_graphs(model: ir.Model) -> Iterator[Iterable[ir.Node]]:
    yield from model.graphs()
    for function in model.functions.values():
        yield function.all_nodes()


# --- the entries -----------------------------------------------------------------------------------


def _of_entry(
    proto: onnx.ModelProto, held: ir.Model, infos: list[onnx.TrainingInfoProto], index: int, sound: bool
) -> Iterator[Problem]:
    info = infos[index]
    yield from _bindings(proto, info, index)
    yield from _initialization(proto, info, index)
    where = f"entry {index}, algorithm"
    outside = _graph_names(proto.graph) | _shared(infos, index)
    structure = list(_structure(info.algorithm, outside, where))
    yield from structure
    yield from (Problem(where, "operator", why) for why in misuses(proto, info.algorithm.node))
    if any(calls(info.algorithm)) or not sound:
        return
    if any(p.rule in ("ssa", "order", "visibility") for p in structure):
        known = outside | _graph_names(info.algorithm)
        for node in (n for n in info.algorithm.node if n.domain == DOMAIN and n.op_type == "Gradient"):
            for name in (s for a in node.attribute for s in [*a.strings, *([a.s] if a.name == "y" else [])]):
                if name.decode() not in known:
                    unknown = UnknownName(name.decode(), known)
                    yield Problem(where, "name", f"{described(node)}: {unknown}")
        return
    try:
        joined, nodes = concatenate(Source(held, infos), index)
    except BadInput as e:  # onnx_ir refuses errors that the checks above do not cover
        yield Problem(where, "visibility", str(e))
        return
    settle_dims(joined)
    infer_types(joined)
    wrong = list(_gradients(joined.graph, mutable(infos), where, set(nodes)))
    yield from wrong
    if not wrong:  # or their outputs are not known
        inside = (i for n in nodes for g in subgraphs(n) for i in g.all_nodes())
        yield from (Problem(where, "type", why) for why in misfits([*nodes, *inside]))
    yield from _check_undeclared(joined, info, index)


def _check_undeclared(joined: ir.Model, info: onnx.TrainingInfoProto, index: int) -> Iterator[Problem]:
    """Check the updates of undeclared values by the types that inference finds."""
    declared = {v.name for v in info.algorithm.output if v.type.tensor_type.HasField("shape")}
    outputs = {v.name for v in (*info.algorithm.output, *joined.graph.outputs)}
    values = named_values(joined.graph)
    for pair in info.update_binding:
        old, new = joined.graph.initializers.get(pair.key), values.get(pair.value)
        if pair.value in declared or pair.value not in outputs or old is None or new is None or new.type is None:
            continue
        proto, value = onnx.TensorProto(data_type=int(old.dtype or 0), dims=old.shape.numpy()), ir.to_proto(new)  # type: ignore[union-attr]
        why = _misfit(proto, value)
        if why:
            yield Problem(f"entry {index}, update binding", "type", f"{pair.key!r} ← {pair.value!r}: {why}")


def _bindings(proto: onnx.ModelProto, info: onnx.TrainingInfoProto, index: int) -> Iterator[Problem]:
    weights = {t.name: t for t in (*proto.graph.initializer, *info.algorithm.initializer)}
    weights |= {s.values.name: s.values for s in proto.graph.sparse_initializer}
    update = [*info.algorithm.output, *proto.graph.output]
    for what, pairs, outputs in (
        ("initialization", info.initialization_binding, list(info.initialization.output)),
        ("update", info.update_binding, update),
    ):
        where = f"entry {index}, {what} binding"
        values = {v.name: v for v in outputs}
        for pair in pairs:
            bound = f"{pair.key!r} ← {pair.value!r}"
            if pair.key not in weights:
                yield Problem(where, "key", f"{bound}: {UnknownName(pair.key, weights, 'initializer')}")
            if pair.value not in values:
                yield Problem(where, "value", f"{bound}: {UnknownName(pair.value, values, 'output')}")
            if pair.key in weights and pair.value in values:
                why = _misfit(weights[pair.key], values[pair.value])
                if why:
                    yield Problem(where, "type", f"{bound}: {why}")


def _misfit(tensor: onnx.TensorProto, value: onnx.ValueInfoProto) -> str:
    """The reason that an initializer cannot be assigned a value declared as `value`; empty if none is known."""
    held = value.type.tensor_type
    if held.elem_type and held.elem_type != tensor.data_type:
        names = [onnx.TensorProto.DataType.Name(t) for t in (tensor.data_type, held.elem_type)]
        return f"a tensor of {names[0]} cannot take one of {names[1]}"
    if held.HasField("shape"):
        dims = [d.dim_value if d.HasField("dim_value") else (d.dim_param or "?") for d in held.shape.dim]
        if len(dims) != len(tensor.dims) or any(isinstance(d, int) and d != n for d, n in zip(dims, tensor.dims)):
            return f"a tensor of shape {list(tensor.dims)} cannot take one of shape {dims}"
    return ""


def _unique(infos: Iterable[onnx.TrainingInfoProto], what: str) -> Iterator[Problem]:
    owners: dict[str, list[int]] = {}
    for index, info in enumerate(infos):
        for pair in getattr(info, what):
            owners.setdefault(pair.key, []).append(index)
    for key, entries in owners.items():
        if len(entries) > 1:
            times = f"{len(entries)} times" if len(entries) > 2 else "twice"
            listed = ", ".join(map(str, dict.fromkeys(entries)))
            where = f"entry {entries[-1]}, {what.replace('_', ' ')}"
            yield Problem(where, "unique", f"{key!r} is bound {times}, by entry {listed}; keys are unique in a model")


def _initialization(proto: onnx.ModelProto, info: onnx.TrainingInfoProto, index: int) -> Iterator[Problem]:
    graph, where = info.initialization, f"entry {index}, initialization"
    if graph.input:
        names = ", ".join(repr(v.name) for v in graph.input)
        yield Problem(where, "initialization", f"it has inputs ({names}); the specification allows none")
    yield from _structure(graph, set(), where)
    yield from (Problem(where, "operator", why) for why in misuses(proto, graph.node))


def _shared(infos: list[onnx.TrainingInfoProto], index: int) -> set[str]:
    """State variables that other entries declare: they are visible in every graph."""
    keys = mutable(infos)
    other = {t.name for i, info in enumerate(infos) if i != index for t in info.algorithm.initializer}
    return (other & keys) - _graph_names(infos[index].algorithm)


# --- graphs ----------------------------------------------------------------------------------------


def _graph_names(graph: onnx.GraphProto) -> set[str]:
    """The names that `graph` itself defines."""
    names = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    names |= {s.values.name for s in graph.sparse_initializer}
    return names | {o for node in graph.node for o in node.output if o}


def _structure(graph: onnx.GraphProto, outside: Collection[str], where: str, inner: bool = False) -> Iterator[Problem]:
    """Check SSA, order and visibility of `graph`, whose nodes also see the values `outside`."""
    inputs, held = [v.name for v in graph.input], [t.name for t in graph.initializer]
    held += [s.values.name for s in graph.sparse_initializer]
    made = [o for node in graph.node for o in node.output if o]
    counts = Counter(inputs) + Counter(set(held) - set(inputs)) + Counter(made)
    for name in counts:
        if counts[name] > 1 or Counter(held)[name] > 1:
            yield Problem(where, "ssa", f"{name!r} is defined twice in it")
        elif name in outside:
            around = "in a graph around it" if inner else "in the inference graph"
            yield Problem(where, "ssa", f"{name!r} is defined in it and {around}")
    known = {*outside, *inputs, *held}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            if name and name not in known:
                late = name in made
                why = "is computed only after it" if late else "is defined nowhere that it can see"
                yield Problem(
                    where, "order" if late else "visibility", f"{described(node)} reads {name!r}, which {why}"
                )
        for body in (g for a in node.attribute for g in (a.g, *a.graphs) if g.node or g.output):
            yield from _structure(body, known, where, inner=True)
        known.update(node.output)
    for value in graph.output:
        if value.name not in known:
            yield Problem(where, "visibility", f"no node computes its output {value.name!r}")


def _of_inference(proto: onnx.ModelProto, held: ir.Model, infos: list[onnx.TrainingInfoProto]) -> Iterator[Problem]:
    """Check the inference graph's use of training features; onnx.checker covers the rest."""
    own, where = _graph_names(proto.graph), "inference graph"
    theirs = {name: i for i, info in enumerate(infos) for name in _graph_names(info.algorithm)}
    is_reported = False
    for node in proto.graph.node:
        for name in node.input:
            if name and name not in own and name in theirs:
                what = f"reads {name!r}, which the algorithm of entry {theirs[name]} defines"
                yield Problem(where, "visibility", f"{described(node)} {what}")
                is_reported = True
    try:
        is_ordered(held.graph)
    except BadInput as e:
        if not is_reported:
            yield Problem(where, "visibility", str(e))
        return
    ours = [n for n in proto.graph.node if n.domain == DOMAIN]
    for node in (n for n in ours if n.op_type == "GraphCall"):
        yield Problem(where, "call", f"{described(node)} stands in the graph that it would call")
    yield from (Problem(where, "operator", why) for why in misuses(proto, ours))
    inferred = held
    if any(n.domain == DOMAIN for g in held.graphs() for n in g):
        inferred = held.clone()
        infer_types(inferred)
    yield from _gradients(inferred.graph, mutable(infos), where)
    yield from (Problem(where, "type", why) for why in misfits(inferred.graph.all_nodes()))
    for function in held.functions.values():
        yield from _gradients(function, (), f"function {function.name}")


def _gradients(
    graph: ir.Graph | ir.Function,
    constants: Collection[str],
    where: str,
    only: Collection[ir.Node] | None = None,
) -> Iterator[Problem]:
    """Check the Gradient nodes of `graph`, or only those among or inside the nodes `only`."""
    inside = None if only is None else {*only, *(i for n in only for g in subgraphs(n) for i in g.all_nodes())}
    for scope in scopes(graph, constants):
        for node in scope.nodes:
            if is_gradient(node) and (inside is None or node in inside):
                for text in [*scope.problems(node)] or underivable(node, scope.visible):
                    rule = "name" if text.startswith("no value named") else "gradient"
                    yield Problem(where, rule, f"{described(node)}: {text.partition(chr(10))[0]}")
