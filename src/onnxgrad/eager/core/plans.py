"""Derivatives of programs as graphs: built once per structure by the rules, and run on the recorded values.

The nodes of a program are written into a graph, and the engine differentiates it. Then the graph is cut where the
derivative reads a value that the tape stores: the value becomes an input, and its producers are removed. Values that
the tape does not store (inside an expression, or inside a derivative that is differentiated again) are recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.batching.directions import Batched, vmapped
from onnxgrad.eager.core.arithmetic import Arithmetic, is_arithmetic
from onnxgrad.eager.core.array import Array
from onnxgrad.eager.core.cache import Cache
from onnxgrad.eager.core.executable import Executable, model_of
from onnxgrad.eager.core.primitives import OPSET, STOP, Output, Primitive
from onnxgrad.eager.core.primitives import output as pick
from onnxgrad.eager.core.recording import record_several
from onnxgrad.eager.core.tape import Node, Program, Source, exporting
from onnxgrad.engine import forward, reverse
from onnxgrad.engine.partial_eval import residuals
from onnxgrad.engine.resolve import CONSTANT
from onnxgrad.errors import BadInput, NotDifferentiable, RuleError
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.cleanup import end_derivation
from onnxgrad.ir.constants import is_repeatable
from onnxgrad.ir.graph import reads, subgraphs
from onnxgrad.ir.outline import restrict
from onnxgrad.ir.schemas import schema_of
from onnxgrad.ir.shapes import allows
from onnxgrad.ir.subgraphs import rewire
from onnxgrad.model_io import Signature
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import OWN, General

#: Indices of results in a program; None for a missing one.
Places = Sequence[int | None]
#: How many graphs are kept.
MOST_PLANS = 1024


def new_builder(operators: Iterable[Primitive]) -> Builder:
    """A builder of an empty graph in the opset for which `operators` were written.

    Operators without a version of their own are the same in all of them.
    """
    wanted = [op.versions for op in dict.fromkeys(operators) if op.versions is not None]
    imports: dict[str, int] = {}
    for versions, _ in wanted:
        for domain, version in versions.items():
            imports[domain] = max(version, imports.get(domain, 0))
    for versions, used in wanted:
        for domain, op_type in used:
            if _form(domain, op_type, versions[domain]) != _form(domain, op_type, imports[domain]):
                raise BadInput(
                    f"{op_type} is used of the opsets {versions[domain]} and {imports[domain]}, which differ on it\n"
                    "  hint: convert the models to one opset"
                )
    return Builder(ir.Graph([], [], nodes=[], name="eager", opset_imports={"": OPSET} | imports))


@functools.cache
def _form(domain: str, op_type: str, opset: int) -> Any:
    """The signature of an operator: defaults of attributes, numbers of inputs and outputs.

    Versions of an operator that differ only in the allowed types have equal signatures.
    """
    schema = schema_of(domain, op_type, opset)
    if schema is None:
        return None
    attributes = frozenset((n, a.default_value.SerializeToString()) for n, a in schema.attributes.items())
    return attributes, schema.min_input, schema.max_input, schema.min_output, schema.max_output


def formal(b: Builder, value: np.ndarray, hint: str, shape: Sequence[Any] | None = None) -> Var:
    """A new input of the graph, like `value`. Raises BadInput for a dtype that ONNX does not have."""
    try:
        dtype = ir.DataType.from_numpy(value.dtype)
    except TypeError:
        raise BadInput(f"an array is {value.dtype}, which ONNX does not have\n  hint: x.astype(float64)") from None
    v = ir.Value(
        name=b.names.fresh(hint),
        type=ir.TensorType(dtype),
        shape=ir.Shape(value.shape if shape is None else shape),
    )
    b.graph.inputs.append(v)
    return b.var(v)


@dataclass(frozen=True)
class Pullback:
    """The backward pass of a graph, which reads its results.

    Attributes:
        graph: gradients of inputs, from cotangents of results, results, and inputs.
        signature: the names of gradients and cotangents, by those of the inputs and results that they are of.
        count: how many of the results may have a cotangent; the others are residuals.
    """

    graph: ir.Graph
    signature: Signature
    count: int


class GraphCall(Primitive):
    """A graph as one operator, which is inlined where it is emitted."""

    __slots__ = ("custom", "graph", "pullback", "versions")
    open = True

    def __init__(
        self, graph: ir.Graph, versions: Any = None, pullback: Pullback | None = None, custom: bool = False
    ) -> None:
        super().__init__("Call", id(graph))
        self.graph = graph
        self.versions = versions
        self.pullback = pullback
        self.custom = custom

    def write_whole(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Emit one node, whose rule is the pullback. Its results must be recorded: no runtime has it."""
        node = ir.Node("onnxgrad.eager", "Call", [x.value for x in operands], num_outputs=len(self.graph.outputs))
        pairs = [(str(n), d) for v, x in zip(self.graph.inputs, operands) for n, d in zip(v.shape or (), x.shape or ())]
        sizes = {name: d for name, d in pairs if isinstance(d, int)}
        for v, like in zip(node.outputs, self.graph.outputs):
            v.type = like.type
            if like.shape is not None:  # a size that no operand has may be another in the next call
                v.shape = ir.Shape([d if isinstance(d, int) else sizes.get(str(d)) for d in like.shape])
        node.meta[OWN] = General(self._pull)
        results = b.append(node)
        return results if len(results) > 1 else results[0]

    def _pull(self, op: Op, g: Any, *values: Var) -> list[Var | None]:
        assert self.pullback is not None
        names, ends = self.pullback.signature, [v.name or "" for v in self.graph.outputs]
        there = dict(zip([*(v.name for v in self.graph.inputs), *ends], values))
        for name, given in zip(ends, g if isinstance(g, tuple) else (g,)):
            if name in names.cotangents:
                there[names.cotangents[name]] = op.zeros_like(there[name]) if given is None else given
        call = GraphCall(self.pullback.graph, self.versions)
        made = call.write(op.builder, [there[v.name] for v in self.pullback.graph.inputs])
        results = made if isinstance(made, tuple) else (made,)
        found = dict(zip((v.name for v in self.pullback.graph.outputs), results))
        return [found.get(names.gradients.get(v.name or "", "")) for v in self.graph.inputs]

    def write(self, b: Builder, operands: Sequence[Var]) -> Any:
        """Emit the nodes of the graph."""
        there = dict(zip(self.graph.inputs, operands))
        for v in self.graph.initializers.values():
            assert v.const_value is not None
            there[v] = b.const(v.const_value.numpy(), v.dtype)
        for node in self.graph:
            inputs = [None if v is None else there[v] for v in node.inputs]
            now = {v: x.value for v, x in there.items()} if subgraphs(node) else {}
            attributes = {a.name: rewire(a, now, b.names) for a in node.attributes.values()}
            count = len(node.outputs)
            if CONSTANT in node.metadata_props:
                there[node.outputs[0]] = STOP.write(b, [x for x in inputs if x is not None])
                continue
            made = b.emit(node.op_type, *inputs, domain=node.domain, outputs=count, **attributes)
            for v, x in zip(node.outputs, made if count > 1 else (made,)):
                there[v] = x
                x.value.type = x.value.type or v.type
                if v.shape is not None and (x.value.shape is None or v.shape.is_static()):
                    x.value.shape = v.shape  # a symbol of the called graph means nothing here
        results = tuple(there[v] for v in self.graph.outputs)
        return results if len(results) > 1 else results[0]


@dataclass
class Written:
    """A program in a graph.

    Attributes:
        sources: the inputs that stand for what comes from outside.
        values: what the nodes give.
        recorded: for each value that the tape holds, where: a place of the program, and a part.
        versions: the opsets, and the operators that mean just these (see `Primitive.versions`).
    """

    b: Builder
    sources: list[Var]
    values: list[Any]
    recorded: dict[ir.Value, tuple[int, int | None]]
    versions: Any = None

    def at(self, place: int) -> Var:
        """The variable for a place."""
        return self.values[place] if place >= 0 else self.sources[~place]


def write(p: Program, whole: bool = False) -> Written:
    """The program `p` in a new graph; with `whole`, graphs that have a pullback are a node each."""
    b = new_builder(node.op for node in p.nodes)
    return write_into(b, p, [formal(b, p.value(~k), "in") for k in range(len(p.sources))], whole, exporting.get())


def write_into(b: Builder, p: Program, sources: list[Var], whole: bool = False, reused: bool = False) -> Written:
    """The program `p`, written by `b`; `sources` stand for what it reads.

    With `reused`, the graph is for other numbers too, at which loops may have other numbers of steps.
    """
    w = Written(b, sources, [], {})
    calls = {i: n.op for i, n in enumerate(p.nodes) if whole and type(n.op) is GraphCall and n.op.pullback is not None}
    for node, (at, *_) in zip(p.nodes, p.wiring) if calls else ():
        if at in calls and type(node.op) is Output and node.op.key[1] >= calls[at].pullback.count:  # type: ignore[operator, union-attr]
            del calls[at]  # a residual may have a cotangent
    for i, (node, refs) in enumerate(zip(p.nodes, p.wiring)):
        operands = [w.at(r) for r in refs]
        made = calls[i].write_whole(b, operands) if i in calls else node.op.write(b, operands)
        w.values.append(made)
        several = isinstance(made, tuple)
        for part, (var, value) in enumerate(zip(made, node.value) if several else [(made, node.value)]):
            _fit(node.op, var, value, several, reused)
            w.recorded.setdefault(var.value, (i, part if several else None))
    used = [node.op.versions[1] for node in p.nodes if node.op.versions is not None]
    w.versions = (dict(b.graph.opset_imports), frozenset().union(*used)) if used else None
    return w


def _fit(op: Primitive, var: Var, held: np.ndarray, several: bool, reused: bool) -> None:
    """Record the shape of the tape's value on `var`, which belongs to the structure unless it is one of `several`."""
    if var.dtype != ir.DataType.from_numpy(held.dtype):
        raise RuleError(f"{op} gave {held.dtype}, and in ONNX it gives {var.dtype}")
    if not allows(var.shape, held.shape):
        raise RuleError(f"{op} gave the shape {held.shape}, and in ONNX it gives {var.shape}")
    if var.value.producer() is None or (several and var.shape is not None) or (reused and type(op) is Output):
        return
    var.value.shape = ir.Shape([None] * held.ndim if several else held.shape)


class DerivativePlan:
    """A derivative that is ready to run.

    Attributes:
        run: the graph.
        places: where in a program its first inputs come from; the others are seeds.
        given: which of the results that were asked for it gives; the others are zero.
    """

    def __init__(self, w: Written, seeds: Sequence[Var], results: Sequence[Var | None]) -> None:
        b, graph, versions = w.b, w.b.graph, w.versions
        self.given = [r is not None for r in results]
        for r in results:
            if r is not None:
                graph.outputs.append(b.copy(r).value)
        places = {b.now(v): place for v, place in w.recorded.items()}
        places |= {s.value: (~k, None) for k, s in enumerate(w.sources)}
        ends = [v for end in graph.outputs if (node := end.producer()) is not None for v in reads(node)]
        read = sorted(residuals(ends, places.__contains__), key=lambda v: (places[v][0], places[v][1] or 0))
        self.places = [places[v] for v in read]
        restrict(graph, [*read, *(s.value for s in seeds)], list(graph.outputs), b.names)
        end_derivation(b)
        self._refuse_random(graph)
        self.run: Arithmetic | Executable | None = None
        if graph.outputs:
            self.run = Arithmetic(graph) if is_arithmetic(graph) else Executable(model_of(graph))
        self.call = GraphCall(graph, versions)

    @staticmethod
    def _refuse_random(graph: ir.Graph) -> None:
        for node in graph.all_nodes():
            if not subgraphs(node) and not is_repeatable(
                node.op_type, node.domain, graph.opset_imports.get(node.domain, 1)
            ):
                raise NotDifferentiable(
                    f"the derivative would have to draw the numbers of a {node.op_type} again\n"
                    "  hint: draw them outside, and pass them in"
                )

    def __call__(self, p: Program, seeds: Sequence[Array]) -> list[Array | None]:
        """The results; they are on the tape if an operand is."""
        if self.run is None:
            return [None] * len(self.given)
        if p.tracked or any(s._node is not None for s in seeds):
            operand = self._operand if p.tracked else lambda p, *place: Array(p.value(*place))
            operands = [operand(p, *place) for place in self.places] + list(seeds)
            arrays = self.run.results(operands) if isinstance(self.run, Executable) else self.run(_data(operands))
            rest = iter(record_several(self.call, operands, arrays))
        else:
            values = [p.value(*place) for place in self.places]
            rest = map(Array, self.run([*values, *(s._data for s in seeds)]))
        return [next(rest) if given else None for given in self.given]

    @staticmethod
    def _operand(p: Program, place: int, part: int | None) -> Array:
        source: Source = p.source(place)
        if type(source) is not Node:
            return Array(source)  # type: ignore[arg-type]
        value = p.value(place, part)
        if part is None:
            return Array(value, source)
        picked = Node(pick(part), (source,), value)
        picked.serial = source.serial + 0.5  # as if recorded with its node: no custom derivative comes between them
        return Array(value, picked)


def _data(operands: Sequence[Array]) -> list[np.ndarray]:
    return [x._data for x in operands]


# --- the plans that there are ----------------------------------------------------------------------

plans = Cache(MOST_PLANS)


def pull(
    p: Program, ends: Sequence[int | None], seeds: Sequence[Array], directions: bool = False
) -> list[Array | None]:
    """The cotangents of the variables of `p`, given those of the places `ends`; None for zero.

    With `directions`, all have one more axis in front.
    """
    asked = [(end, s) for end, s in zip(ends, seeds) if end is not None]
    count = p.key[0]
    if not asked:
        return [None] * count
    places = tuple(end for end, _ in asked)
    kinds = tuple((s.dtype.num, s.shape[:1] if directions else None) for _, s in asked)
    key = ("pull", p.key, places, kinds, directions)
    return plans.get(key, lambda: _plan_pull(p, asked, directions))(p, [s for _, s in asked])


def _plan_pull(p: Program, given: Sequence[tuple[int, Array]], directions: bool) -> DerivativePlan:
    w = write(p, whole=True)
    b = w.b
    seeds = [formal(b, s._data, "cotangent") for _, s in given]
    ends = [_own(b, w.at(end)) for end, _ in given]
    targets = [v.value for v in w.sources[: p.key[0]]]

    def emit(slices: Sequence[Var]) -> list[Var | None]:
        terms: dict[ir.Value, Var] = {}
        for end, s in zip(ends, slices):
            terms[end.value] = s if end.value not in terms else terms[end.value] + s
        cotangents = reverse(b, list(b.graph), terms, targets)
        return [cotangents.get(t) for t in targets]

    return DerivativePlan(w, seeds, _apply_to_directions(b, seeds, emit, w.sources[: p.key[0]], directions))


def _own(b: Builder, x: Var) -> Var:
    """A value with a producer: a variable itself may be a requested result."""
    return b.copy(x) if x.value.is_graph_input() else x


def push(
    p: Program, ends: Sequence[int | None], seeds: Sequence[Array], directions: bool = False
) -> list[Array | None]:
    """The tangents of the places `ends`, given those of the variables of `p`; None for zero."""
    key = ("push", p.key, tuple(ends), tuple((s.dtype.num, s.shape) for s in seeds), directions)
    return plans.get(key, lambda: _plan_push(p, ends, seeds, directions))(p, seeds)


def _plan_push(p: Program, ends: Sequence[int | None], seeds: Sequence[Array], directions: bool) -> DerivativePlan:
    w = write(p)
    b = w.b
    entering = [formal(b, s._data, "tangent") for s in seeds]
    wanted = [None if end is None else _own(b, w.at(end)) for end in ends]
    targets = [v.value for v in w.sources[: p.key[0]]]

    def emit(slices: Sequence[Var]) -> list[Var | None]:
        tangents = forward(b, list(b.graph), dict(zip(targets, slices)), [y.value for y in wanted if y is not None])
        return [None if y is None else tangents.get(y.value) for y in wanted]

    return DerivativePlan(w, entering, _apply_to_directions(b, entering, emit, wanted, directions))


def _apply_to_directions(
    b: Builder,
    seeds: Sequence[Var],
    emit: Callable[[Sequence[Var]], list[Var | None]],
    likes: Sequence[Any],
    many: bool,
) -> list[Var | None]:
    """Apply `emit` to the seeds, or with `many` to each slice of the seeds."""
    if not many:
        return emit(seeds)
    which: list[bool] = []

    def emit_present(slices: Sequence[Var]) -> list[Var]:
        results = emit(slices)
        which[:] = [x is not None for x in results]
        return [b.zeros_like(like) if x is None else x for x, like in zip(results, likes) if like is not None]

    made = iter(vmapped(b, seeds, emit_present, [Batched(like) for like in likes if like is not None]))
    return [None if like is None else next(made) for like in likes]
