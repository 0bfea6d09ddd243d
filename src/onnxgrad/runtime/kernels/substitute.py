"""Named parts of a graph to calls of kernels, in a copy; the original stays.

Passes rewire graphs after a part was named. A call replaces a part only if the outputs are still the same expressions
of the inputs (`Part.holds`), and no operand of the call depends on its results. Other parts stay operators.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.aliases import known_as
from onnxgrad.ir.composites import Part, named_parts
from onnxgrad.ir.execution_order import sort
from onnxgrad.ir.graph import add_initializer, prune, reads, replace_everywhere, scopes, subgraphs
from onnxgrad.ir.literals import attributes_of
from onnxgrad.ir.match import pattern
from onnxgrad.ir.notes import notes
from onnxgrad.ir.passes import Declined, Pass
from onnxgrad.runtime.kernels.attention import MARK, fuse_attention
from onnxgrad.runtime.kernels.convolutions import fuse_convolutions
from onnxgrad.runtime.kernels.elementwise import PHASE, may_fuse
from onnxgrad.runtime.kernels.near_attention import bring_transposes_near
from onnxgrad.runtime.kernels.recurrence import may_recur
from onnxgrad.runtime.setting import Setting

DOMAIN = "onnxgrad.native"

_MASKED = pattern("Mul", "g", pattern("HardSigmoid", "y", name="step"), in_any_order=True)
#: Modules that define kernels.
_MODULES = ("optimizer_kernels", "conv_kernels", "norm_kernels", "row_kernels", "softmax_kernels")


@dataclass(frozen=True)
class Occurrence:
    """A named part as it was found in a graph.

    Attributes:
        name: of the part.
        inputs: its inputs, None for those that it was named without.
        outputs: its outputs, None for those that are not read.
        attributes: its attributes.
        constant: makes a constant of an array, to be an input of a call.
    """

    name: str
    inputs: Sequence[ir.Value | None]
    outputs: Sequence[ir.Value | None]
    attributes: Mapping[str, Any]
    constant: Callable[[np.ndarray], ir.Value]

    @property
    def all_float32(self) -> bool:
        """True if all inputs and outputs are tensors of float32."""
        return all(v is None or v.dtype == ir.DataType.FLOAT for v in (*self.inputs, *self.outputs))

    def sizes(self, index: int) -> tuple[int | None, ...] | None:
        """The dimensions of an input, None for those known only at run time; None for an unknown rank."""
        value = self.inputs[index]
        if value is None or value.shape is None:
            return None
        return tuple(d if isinstance(d, int) else None for d in value.shape)


@dataclass(frozen=True)
class KernelCall:
    """A kernel call for the outputs of a site, in order.

    Attributes:
        kernel: its name in the library.
        inputs: what it reads, None for an operand that is left out. It may read what the inputs of the site are
            computed from, in their place.
        attributes: floats, ints, and lists of ints.
    """

    kernel: str
    inputs: Sequence[ir.Value | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def preceding_call(site: Occurrence, index: int, name: str) -> ir.Node | None:
    """The call of the kernel `name` that computes an input of `site`, if only `site` reads it."""
    value = site.inputs[index]
    node = None if value is None else value.producer()
    if value is None or node is None or (node.domain, node.op_type) != (DOMAIN, name):
        return None
    return node if _is_inside(site, value) else None


def preceding_mask(site: Occurrence, index: int) -> tuple[ir.Value, ir.Value] | None:
    """(g, y) where an input of `site` is g·[y > 0], the cotangent of a ReLU, and only `site` reads it."""
    value = site.inputs[index]
    found = _MASKED.match(value)
    step = None if found is None else found["step"].producer()
    if value is None or found is None or step is None or not _is_inside(site, value):
        return None
    slope, centre = step.attributes.get_float("alpha", 0.2), step.attributes.get_float("beta", 0.5)
    shape = found["y"].shape
    fits = slope is not None and slope >= 1e38 and centre == 0 and shape is not None and shape == value.shape
    return (found["g"], found["y"]) if fits and found["g"].shape == shape else None


def _is_inside(site: Occurrence, value: ir.Value) -> bool:
    """True if nothing but `site` reads `value`."""
    inside, todo = set(), [v for v in site.outputs if v is not None]
    given = {v for v in site.inputs if v is not None}
    while todo:
        here = todo.pop()
        writer = here.producer()
        if here not in given and writer is not None and writer not in inside:
            inside.add(writer)
            todo.extend(reads(writer))
    return not value.is_graph_output() and all(user in inside for user in value.consumers())


def widen_integers(graph: ir.Graph, call: ir.Node) -> None:
    """Cast int32 operands of `call`, a node of `graph`, to int64, as which kernels read indices and labels."""
    for place, value in enumerate(call.inputs):
        if value is not None and value.dtype == ir.DataType.INT32:
            cast = ir.node("Cast", [value], {"to": ir.DataType.INT64}, name=f"{call.name}.cast.{place}")
            (wide,) = cast.outputs
            wide.name, wide.type, wide.shape = cast.name, ir.TensorType(ir.DataType.INT64), value.shape
            graph.insert_before(call, cast)
            call.replace_input_with(place, wide)


Fits = Callable[[Occurrence], KernelCall | None]
_KERNELS: dict[str, Fits] = {}


def kernel(name: str) -> Callable[[Fits], Fits]:
    """Register a function that returns the kernel call for parts called `name`, or None if it does not apply."""

    def registered(fits: Fits) -> Fits:
        assert name not in _KERNELS, name
        _KERNELS[name] = fits
        return fits

    return registered


def float32_kernel(name: str) -> None:
    """Register a kernel for parts called `name`, with their operands and attributes, all in float32."""
    kernel(name)(lambda site: KernelCall(name, site.inputs, site.attributes) if site.all_float32 else None)


@functools.cache
def kernels() -> Mapping[str, Fits]:
    """All that are registered, by the name of the part."""
    for module in _MODULES:
        importlib.import_module(f"onnxgrad.runtime.kernels.{module}")
    return _KERNELS


def wants_kernels(model: ir.Model) -> bool:
    """True if there may be a kernel for something in `model`: a named part, elementwise operators in a row, a Scan."""
    return names_any(model, {*kernels(), MARK}) or may_fuse(model) or may_recur(model)


def names_any(model: ir.Model, known: Collection[str]) -> bool:
    """True if `model`, or a graph inside it, has a part with one of the names `known`."""
    return any(part.name in known for graph in scopes(model.graph) for part in named_parts(graph))


def _call_kernels(model: ir.Model, setting: Setting) -> int:
    """Replace named parts of `model`, also in bodies, by kernel calls. Returns the count."""
    places = _call(model, kernels())
    setting.has_kernels |= places > 0
    return places


def _call(model: ir.Model, known: Mapping[str, Fits]) -> int:
    """Replace parts of `model` that have `known` names by calls. Returns the count."""
    places = _insert_calls(model.graph, {}, itertools.count(), known)
    if not places:
        return 0
    try:
        sort(model.graph)
    except ValueError:
        raise Declined("calls of several results wait for each other") from None
    model.opset_imports[DOMAIN] = 1
    for graph in reversed(scopes(model.graph)):
        prune(graph)
        _without_indices(graph)
    return places


def _call_attention(model: ir.Model, setting: Setting) -> int:
    """Replace attention and its cotangents in `model` by kernel calls. Returns the count."""

    def mark(site: Occurrence) -> KernelCall | None:
        return (
            KernelCall(MARK, site.inputs, site.attributes) if site.all_float32 and site.sizes(1) is not None else None
        )

    if not _call(model, {MARK: mark}):
        return 0
    for graph in scopes(model.graph):
        bring_transposes_near(setting.builder(graph, "near_attention"))
    return _for_each_graph(fuse_attention)(model, setting)


def _for_each_graph(fuse: Callable[[ir.Graph, str], int]) -> Callable[[ir.Model, Setting], int]:
    """A fusion in each graph of a model, inner ones first."""

    def apply(model: ir.Model, setting: Setting) -> int:
        places = sum(fuse(graph, DOMAIN) for graph in reversed(scopes(model.graph)))
        setting.has_kernels |= places > 0
        return places

    return apply


KERNELS = Pass(
    "kernels",
    PHASE,
    "a call of a kernel",
    "named parts: optimizers, normalizations, cotangents of convolutions, pooling, lookups, losses",
    lambda model, _: names_any(model, kernels()),
    _call_kernels,
    Setting.keeps_operators,
)
ATTENTION = Pass(
    "attention",
    PHASE,
    "attention and its cotangents without a matrix of scores",
    "products, a softmax of the last axis and the cotangents of each, float32",
    lambda model, _: names_any(model, {MARK}),
    _call_attention,
    Setting.keeps_operators,
)
CONVOLUTIONS = Pass(
    "convolutions",
    PHASE,
    "convolutions as products of transformed tiles, or of vectors of channels",
    "Conv of 3×3 taps side by side, depthwise Conv and ConvTranspose; weights that change",
    lambda model, _: any(n.op_type in ("Conv", "ConvTranspose") for g in scopes(model.graph) for n in g),
    _for_each_graph(fuse_convolutions),
    Setting.lacks_kernels,
)


def _without_indices(graph: ir.Graph) -> None:
    """Remove unread indices of MaxPool: with them it takes twenty times as long."""
    for node in graph:
        if (node.domain, node.op_type, len(node.outputs)) == ("", "MaxPool", 2):
            indices = node.outputs[1]
            if not indices.uses() and not indices.is_graph_output():
                node.resize_outputs(1)


def _insert_calls(
    graph: ir.Graph, outer: Mapping[str, ir.Value], numbers: Iterator[int], known: Mapping[str, Fits]
) -> int:
    """Insert calls into `graph` and its nested graphs, which see the values `outer` as well. Returns the count."""
    swapping = _Swapping(graph, outer, numbers)
    seen = dict(swapping.values)
    inside = sum(_insert_calls(body, seen, numbers, known) for node in graph for body in subgraphs(node))
    return inside + swapping.all_parts(known)


class _Swapping:
    """Puts calls into one graph."""

    def __init__(self, graph: ir.Graph, outer: Mapping[str, ir.Value], numbers: Iterator[int]) -> None:
        self.graph, self.numbers = graph, numbers
        self.places = {node: i for i, node in enumerate(graph)}
        made = (v for node in graph for v in node.outputs)
        own = [*graph.inputs, *graph.initializers.values(), *made]
        former = {name: v for v in reversed(own) if notes(v) for name in known_as(v)}  # which parts may have
        self.values = {**outer, **former, **{v.name: v for v in own if v.name}}
        self.constants: dict[Any, ir.Value] = {}

    def all_parts(self, known: Mapping[str, Fits]) -> int:
        """Insert calls wherever a kernel applies. Returns the count."""
        count = 0
        parts = [p for p in named_parts(self.graph) if p.name in known]
        for part in [p for p in parts if self._is_here(p)]:  # before calls hide the operators
            site = self._site(part)
            call = None if site is None else known[part.name](site)
            if site is not None and call is not None and self._can_be_called(site, call):
                self._write(site, call)
                count += 1
        return count

    def _is_here(self, part: Part) -> bool:
        """True if all inputs and some outputs of `part` are in the graph, unchanged."""
        inputs, outputs = self._ends(part)
        lost = any(v is None and old is not None for v, old in zip(inputs, part.inputs))
        return not lost and any(v is not None for v in outputs) and part.holds(inputs, outputs)

    def _site(self, part: Part) -> Occurrence | None:
        """The current state of `part`; None if kernels compute all its outputs already."""
        inputs, outputs = self._ends(part)
        if all(v is None for v in outputs):
            return None
        return Occurrence(part.name, inputs, outputs, part.attributes, self._constant)

    def _ends(self, part: Part) -> tuple[list[ir.Value | None], list[ir.Value | None]]:
        """The inputs of `part` in this graph, and its outputs that no kernel computes."""
        inputs, outputs = (
            [None if v is None else self.values.get(v.name or "") for v in vs] for vs in (part.inputs, part.outputs)
        )
        return inputs, [v if v is not None and self._is_open(v) else None for v in outputs]

    def _is_open(self, value: ir.Value) -> bool:
        """True if `value` is computed here, and not by a kernel already: equal sums are one, in two parts perhaps."""
        node = value.producer()
        return node is not None and node in self.places and node.domain != DOMAIN

    def _can_be_called(self, site: Occurrence, call: KernelCall) -> bool:
        """True if no operand of the call depends on its results."""
        results = {v for v in site.outputs if v is not None}
        first = min(self._place(v) for v in results)
        late = [v for v in call.inputs if v is not None and self._place(v) >= first]
        return results.isdisjoint(self._computed(late, from_place=first))

    def _place(self, value: ir.Value) -> int:
        node = value.producer()
        return -1 if node is None else self.places.get(node, -1)

    def _computed(self, values: Iterable[ir.Value], from_place: int) -> set[ir.Value]:
        """The nodes that `values` are computed from, as far back as `from_place`."""
        seen: set[ir.Value] = set()
        todo = list(values)
        while todo:
            value = todo.pop()
            node = value.producer()
            if value not in seen and node is not None and self.places.get(node, -1) >= from_place:
                seen.add(value)
                todo.extend(reads(node))
        return seen

    def _write(self, site: Occurrence, call: KernelCall) -> None:
        """Replace the outputs of `site` by those of `call`."""
        outputs = list(site.outputs)
        while outputs[-1] is None:
            outputs.pop()
        attributes = attributes_of(call.attributes)
        name = f"native.{call.kernel}.{next(self.numbers)}"
        node = ir.Node(DOMAIN, call.kernel, call.inputs, attributes, num_outputs=len(outputs), name=name)
        made = [n for v in outputs if v is not None and (n := v.producer()) is not None]
        last = max(made, key=self.places.__getitem__)
        self.places[node] = self.places[last]
        self.graph.insert_after(last, node)
        widen_integers(self.graph, node)
        for i, (old, new) in enumerate(zip(outputs, node.outputs)):
            new.name = "" if old is None else f"{name}.{i}"
            if old is None:
                continue
            new.type, new.shape = old.type, old.shape
            replace_everywhere(old, new)
            self.values |= {known: new for known in known_as(old) if self.values.get(known) is old}
            new.name, old.name = old.name, new.name

    def _constant(self, array: np.ndarray) -> ir.Value:
        """An initializer with `array`; equal arrays share one."""
        array = np.asarray(array)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self.constants:
            tensor = ir.tensor(array, name=f"native.const.{next(self.numbers)}")
            self.constants[key] = add_initializer(self.graph, tensor)
        return self.constants[key]
