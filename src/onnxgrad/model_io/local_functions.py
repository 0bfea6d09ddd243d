"""Local functions that stay functions: which ones, and the body of each for a given call.

A function is kept where calls of it share much (`worth_keeping`); the rest, among them the tiny functions that
exporters write by the hundred, is inlined, which gives the smallest derivatives.

A function of ONNX is generic: it accepts operands of any type and rank, and attributes. The derivative is that of its
body for one kind of call: attributes are filled in, small constants of whole numbers (axes, shapes) replace their
formals, and every formal has a type and a shape. Symbolic sizes of the caller are symbols inside, equal ones by the
same symbol. So similar calls, like those of the layers of a network, share one body, and inference knows as much of a
body as if it were inlined.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any

import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.errors import BadInput
from onnxgrad.ir.constants import MOST_ELEMENTS
from onnxgrad.ir.fold import infer_and_fold
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.infer.loops import refined
from onnxgrad.ir.match import WHOLE, Dim, constant
from onnxgrad.ir.names import Names, identifier

Identifier = tuple[str, str, str]

#: A function of fewer nodes than this is inlined: a call, with its residuals, would be no smaller.
SMALLEST = 12
#: A function is kept only if inlining it would write at least so many nodes more.
SAVES = 100
#: Nodes after all functions are inlined: at most the one, and at most the others, with the nodes that are written.
MOST_NODES, FREE_NODES, MOST_PER_NODE = 5_000_000, 20_000, 500


@dataclass
class Body:
    """The body of a function for one kind of call.

    Attributes:
        key: what distinguishes the kinds of calls.
        graph: typed; its inputs stand for those inputs of the call that `places` lists, in this order.
        places: the inputs that are neither left out nor filled in.
    """

    key: Hashable
    graph: ir.Graph
    places: list[int]


class Functions:
    """Local functions that stay functions in a model, including those that derivatives add."""

    def __init__(self, model: ir.Model) -> None:
        self.table: MutableMapping[Identifier, ir.Function] = model.functions
        self.imports = model.graph.opset_imports
        self._bodies: dict[Hashable, Body] = {}

    def __contains__(self, node: ir.Node) -> bool:
        return bool(self.table) and node.op_identifier() in self.table

    def add(self, domain: str, name: str, graph: ir.Graph) -> ir.Function:
        """A new function with `graph` for its body, whose name starts with `name`."""
        unique = _unique(self.table, domain, name)
        function = ir.Function(domain, unique, graph=graph, attributes=[])
        self.table[function.identifier()] = function
        return function

    def body(self, node: ir.Node) -> Body:
        """The body that the call `node` means."""
        operands = list(node.inputs)
        while operands and operands[-1] is None:
            operands.pop()
        symbols: dict[str, str] = {}
        kinds = tuple(_kind(v, symbols) for v in operands)
        attributes = tuple(sorted((a.name, _attribute_key(a)) for a in node.attributes.values()))
        key = (node.op_identifier(), attributes, kinds)
        existing = self._bodies.get(key)
        if existing is None:
            existing = self._bodies[key] = self._make(key, node, operands, symbols)
        return existing

    def _make(self, key: Hashable, node: ir.Node, operands: list[ir.Value | None], symbols: dict[str, str]) -> Body:
        function = self.table[node.op_identifier()]
        values: list[ir.Value | None] = []
        constants, places = [], []
        for i, (formal, v) in enumerate(zip(function.inputs, operands)):
            value = None
            if v is not None and (known := _filled_in(v)) is not None:
                value = ir.Value(name=formal.name, type=v.type, shape=ir.Shape(known.shape))
                value.const_value = ir.tensor(known, dtype=v.dtype, name=formal.name)
                constants.append(value)
            elif v is not None:
                shape = None if v.shape is None else ir.Shape([_inside(d, symbols) for d in v.shape])
                value = ir.Value(name=formal.name, type=v.type, shape=shape)
                places.append(i)
            values.append(value)
        attributes = [ir.Attr(a.name, a.type, a.value) for a in node.attributes.values()]
        call = ir.Node(
            function.domain, function.name, values, attributes, overload=function.overload,
            num_outputs=len(function.outputs),
        )  # fmt: skip
        for out, formal in zip(call.outputs, function.outputs):
            out.name = f"{formal.name}_of_call"
        graph = ir.Graph(
            [v for v in values if v is not None and v not in constants],
            list(call.outputs),
            nodes=[call],
            initializers=constants,
            opset_imports=dict(self.imports),
            name=function.name,
        )
        copy = function.clone()
        copy.opset_imports.update({d: v for d, v in self.imports.items() if d in copy.opset_imports})
        model = ir.Model(graph, ir_version=10, functions=[copy])
        from onnx_ir.passes.common import InlinePass  # it takes 5 ms

        InlinePass()(model)
        _forget_declared(graph)
        unshadow(graph, set(), Names.of(model))
        infer_and_fold(model, self)
        return Body(key, graph, places)

    def infer(self, ctx: osi.ShapeInferenceContext, node: ir.Node) -> None:
        """Set types and shapes of the results of the call `node`."""
        body = self.body(node)
        symbols: dict[str, str] = {}
        for v in node.inputs:
            if v is not None and v.shape is not None and _filled_in(v) is None:
                for d in v.shape:
                    _inside(d, symbols)
        outside = {inner: outer for outer, inner in symbols.items()}
        fresh: dict[str, ir.SymbolicDim] = {}
        for value, result in zip(node.outputs, body.graph.outputs):
            value.type = value.type or result.type
            if result.shape is None:
                continue
            value.shape = refined(value.shape, [_outside(d, outside, fresh, ctx) for d in result.shape])


def infer_types(model: ir.Model) -> None:
    """Fill in types and shapes of every value of `model`, calls of its local functions included, in place.

    Raises:
        BadInput: shapes or inputs that no node of their kind can have.
    """
    infer_model(model, Functions(model) if model.functions else None)


def _unique(table: Collection[Identifier], domain: str, name: str) -> str:
    """`name`, with a number where another function has it."""
    taken = {n for d, n, _ in table if d == domain}
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    return unique


def rename_overloads(model: ir.Model, but: Collection[Identifier] = ()) -> None:
    """Rename functions, with exceptions: ONNX Runtime 1.31 loads none that calls a function of its own name."""
    table = model.functions
    renamed: dict[Identifier, str] = {}
    for function in [f for f in table.values() if f.overload and f.identifier() not in but]:
        old = function.identifier()
        renamed[old] = _unique(table, function.domain, identifier(f"{function.name}_{function.overload}"))
        del table[old]
        function.name, function.overload = renamed[old], ""
        table[function.identifier()] = function
    for node in all_nodes(model) if renamed else ():
        if (name := renamed.get(node.op_identifier())) is not None:
            node.op_type, node.overload = name, ""


def fill_defaults(model: ir.Model) -> None:
    """Write the attributes that calls leave to their defaults out, so that a rule finds them."""
    for node in all_nodes(model):
        function = model.functions.get(node.op_identifier())
        for a in () if function is None else function.attributes.values():
            if a.value is not None and a.name not in node.attributes:
                node.attributes[a.name] = a


def drop_unused(model: ir.Model) -> None:
    """Remove the functions that nothing calls."""
    table = model.functions
    used: set[Identifier] = set()
    stack = list(model.graph.all_nodes()) if table else []
    while stack:
        name = stack.pop().op_identifier()
        if name in table and name not in used:
            used.add(name)
            stack.extend(table[name].all_nodes())
    for name in [n for n in table if n not in used]:
        del table[name]


def _filled_in(value: ir.Value) -> Any:
    """The elements of a small constant of whole numbers; None for other values."""
    if value.dtype not in WHOLE:
        return None
    array = constant(value)
    return array if array is not None and array.size <= MOST_ELEMENTS else None


def _kind(value: ir.Value | None, symbols: dict[str, str]) -> Hashable:
    if value is None:
        return None
    filled = _filled_in(value)
    if filled is not None:
        return filled.dtype.str, filled.shape, filled.tobytes()
    dims = None if value.shape is None else tuple(_inside(d, symbols) for d in value.shape)
    return repr(value.type), dims


def _inside(dim: Dim, symbols: dict[str, str]) -> int | str | None:
    """A dimension of an operand as the body sees it; `symbols` maps the names seen so far."""
    if isinstance(dim, int):
        return dim
    return None if dim.value is None else symbols.setdefault(dim.value, f"call_dim_{len(symbols)}")


def _outside(
    dim: Dim,
    outside: dict[str, str],
    fresh: dict[str, ir.SymbolicDim],
    ctx: osi.ShapeInferenceContext,
) -> Dim:
    """A dimension of a result as the caller sees it; a symbol that the body creates is new for each call."""
    if isinstance(dim, int):
        return dim
    if dim.value is None:
        return ctx.new_symbolic_dim()
    if dim.value in outside:
        return ir.SymbolicDim(outside[dim.value])
    met = re.findall(r"[A-Za-z_][A-Za-z_0-9.]*", dim.value)
    if met and all(m in outside for m in met):
        return ir.SymbolicDim(re.sub(r"call_dim_\d+", lambda m: f"({outside[m.group()]})", dim.value))
    if dim.value not in fresh:
        fresh[dim.value] = ctx.new_symbolic_dim()
    return fresh[dim.value]


def _attribute_key(a: ir.Attr) -> Hashable:
    if a.type == ir.AttributeType.TENSOR:
        tensor = a.as_tensor()
        return str(tensor.dtype), tuple(tensor.shape.numpy()), tensor.tobytes()
    return str(a.type), repr(a.value)


def _forget_declared(graph: ir.Graph) -> None:
    """Drop the size names declared inside a function: they differ between calls."""
    for g in (graph, *graph.subgraphs()):
        inner = [] if g is graph else list(g.inputs)
        for value in (*inner, *(v for node in g for v in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape([d if isinstance(d, int) else None for d in value.shape])


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of `model`, of its functions and of nested graphs."""
    return chain(model.graph.all_nodes(), *(f.all_nodes() for f in model.functions.values()))


def unshadow(graph: ir.Graph, outer: set[str], names: Names) -> None:
    """Rename values of nested graphs whose names an outer scope has too."""
    own = [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)]
    for value in dict.fromkeys(own):
        if value.name and value.name in outer:
            if value.const_value is not None:  # renaming would go through to the caller's tensor
                value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype)
            value.name = names.fresh(value.name)
    inner = outer | {v.name for v in own if v.name}
    for node in graph:
        for nested in subgraphs(node):
            unshadow(nested, inner, names)


# --- which ones ------------------------------------------------------------------------------------


def callees_first(model: ir.Model) -> list[Identifier]:
    """The functions of `model`, each after those that it calls. Raises BadInput for a cycle of calls."""
    table = model.functions
    calls = {name: [n for node in f.all_nodes() if (n := node.op_identifier()) in table] for name, f in table.items()}
    try:
        return list(TopologicalSorter(calls).static_order())
    except CycleError as e:
        name = "::".join(e.args[1][0][:2])
        raise BadInput(f"cannot inline the local functions of the model: {name} calls itself") from e


def check_calls(model: ir.Model) -> None:
    """Raise BadInput if functions of `model` call each other in a cycle, or expand to too many nodes."""
    if not model.functions:
        return
    counts: dict[Identifier, int] = {}
    for name in callees_first(model):
        counts[name] = _count(model.functions[name].all_nodes(), counts)
    total = _count(model.graph.all_nodes(), counts)
    written = sum(1 for _ in all_nodes(model))
    most = min(MOST_NODES, FREE_NODES + MOST_PER_NODE * written)
    if total > most:
        raise BadInput(
            f"the functions of the model come to {total} nodes; of {written} that are written, {most} are the most"
        )


def _count(nodes: Iterable[ir.Node], counts: Mapping[Identifier, int]) -> int:
    """The number of `nodes`, in which calls of functions count as `counts` says."""
    return sum(counts.get(n.op_identifier(), 1) for n in nodes)


def worth_keeping(model: ir.Model) -> set[Identifier]:
    """The functions to keep: large ones with enough calls.

    A call from an inlined function counts at every place that the function is inlined into.
    """
    functions = model.functions
    if not functions:
        return set()
    order = callees_first(model)
    size: dict[Identifier, int] = {}
    for name in order:
        size[name] = _count(functions[name].all_nodes(), size)
    sites = Counter(n.op_identifier() for n in model.graph.all_nodes())
    kept = set()
    for name in reversed(order):
        if name[0] != "" and size[name] >= SMALLEST and (sites[name] - 1) * size[name] >= SAVES:
            kept.add(name)
        for node in functions[name].all_nodes():
            sites[node.op_identifier()] += 1 if name in kept else sites[name]
    return kept
