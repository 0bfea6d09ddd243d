"""Rewrites as passes, and their common parts: matches of operators, and the replacement of results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.graph import prune, take_over
from onnxgrad.ir.infer.inference import Inference, infer_model
from onnxgrad.ir.match import constant, producer
from onnxgrad.ir.names import Names
from onnxgrad.ir.passes import Pass
from onnxgrad.ir.shapes import same_dim
from onnxgrad.runtime.setting import Setting

S = TypeVar("S", bound=Collection)
T = TypeVar("T")

#: The phase of all rewrites.
REWRITES_PHASE = "rewrites"


def rewrite(
    name: str, what: str, where: str, applies: Callable[[ir.Graph], bool], apply: Callable[[Builder], int]
) -> Pass[Setting]:
    """A pass that replaces operators by faster ones with equal results.

    Args:
        name, what, where: as of `Pass`.
        applies: returns True if a graph has a place for it.
        apply: changes the graph of a builder and returns the number of places; unread results are pruned.
    """

    def write(model: ir.Model, setting: Setting) -> int:
        return _apply(apply, model, setting, name)

    return Pass(name, REWRITES_PHASE, what, where, lambda m, _: applies(m.graph), write, Setting.keeps_layout)


def rewrite_found(
    name: str, what: str, where: str, find: Callable[[ir.Graph], S], apply: Callable[[Builder, S], int]
) -> Pass[Setting]:
    """The same for places that `find` returns, which takes long enough to be done once.

    Args:
        name, what, where: as of `Pass`.
        find: returns the places in a graph; none are an empty collection.
        apply: as of `rewrite`; gets the places in the graph of the builder as well.
    """

    def applies(model: ir.Model, setting: Setting) -> bool:
        found = find(model.graph)
        setting.found = model.graph, found
        return bool(found)

    def write(model: ir.Model, setting: Setting) -> int:
        graph, found = setting.found
        setting.found = None, None
        places = found if graph is model.graph else find(model.graph)  # else those of the original of this copy
        return _apply(lambda b: apply(b, places), model, setting, name)

    return Pass(name, REWRITES_PHASE, what, where, applies, write, Setting.keeps_layout)


def _apply(apply: Callable[[Builder], int], model: ir.Model, setting: Setting, name: str) -> int:
    places = apply(setting.builder(model.graph, name))
    prune(model.graph)
    setting.is_rewritten |= bool(places)
    return places


def write_out(
    name: str,
    what: str,
    where: str,
    matches: Callable[[ir.Node], bool],
    write: Callable[[Builder, ir.Node], Sequence[Var]],
    unless: Callable[[Setting], str],
) -> Pass[Setting]:
    """A pass that replaces operators, in bodies too, which ONNX Runtime has no kernel for.

    Args:
        name, what, where, unless: as of `Pass`.
        matches: returns True for a node to replace.
        write: emits the operators for such a node, and returns what replaces its results.
    """

    def apply(model: ir.Model, setting: Setting) -> int:
        infer_model(model)
        names, infer = Names.of(model), Inference.of(model.graph, elements=False)
        count = 0
        for graph in model.graphs():
            b = Builder(graph, names, infer, noting=False, prefix=name)
            for node in [n for n in graph if matches(n)]:
                b.before = node
                for new, old in zip(write(b, node), node.outputs):
                    replace_value(new, old)
                count += 1
            prune(graph)
        return count

    def applies(model: ir.Model, setting: Setting) -> bool:
        return any(matches(node) for graph in model.graphs() for node in graph)

    return Pass(name, "preparation", what, where, applies, apply, unless)


def rewrite_sites(
    name: str,
    what: str,
    where: str,
    find: Callable[[ir.Graph], Mapping[ir.Node, T]],
    writer: Callable[[Builder], Callable[[ir.Node, T], object]],
) -> Pass[Setting]:
    """A pass that rewrites the sites that `find` returns, by their last nodes.

    `writer` returns the function that rewrites one of them, with nodes before its last one.
    """

    def apply(b: Builder, sites: Mapping[ir.Node, T]) -> int:
        write = writer(b)
        for b.before, site in sites.items():
            write(b.before, site)
        return len(sites)

    return rewrite_found(name, what, where, find, apply)


class NodeRule(NamedTuple):
    """A rewrite of single results.

    Attributes:
        match: returns the match that ends in a node, or None.
        write: emits the operators for a match, and returns what replaces the node's result.
    """

    match: Callable[[ir.Node], Any]
    write: Callable[[Builder, Any], Var]

    def apply(self, b: Builder) -> int:
        """Replace every match in the graph of `b`. Returns their number."""
        places = 0
        for node in list(b.graph):
            if (site := self.match(node)) is not None:
                b.before = node
                replace_value(self.write(b, site), node.outputs[0])
                places += 1
        return places


def rewrite_results(name: str, what: str, where: str, *rules: NodeRule) -> Pass[Setting]:
    """A pass of `rules`, one after the other over the whole graph."""

    def applies(graph: ir.Graph) -> bool:
        return any(rule.match(node) is not None for node in graph for rule in rules)

    def apply(b: Builder) -> int:
        return sum(rule.apply(b) for rule in rules)

    return rewrite(name, what, where, applies, apply)


def replace_value(y: Var, old: ir.Value) -> None:
    """Replace `old` by the result `y`; the producer of `old` becomes unread.

    Equal results are one value. If that is an output of the graph already, it keeps its name, and another output is a
    copy of it.
    """
    if y.value.is_graph_output():
        if not old.is_graph_output():
            old.replace_all_uses_with(y.value)
            return
        y = y.builder.copy(y)
    take_over(y.value, old)


def match_repeated(indices: ir.Value | None, rank: int, axis: int) -> ir.Value | None:
    """The value that `indices`, of `rank` axes, repeats along all axes but `axis`; None if it does not."""
    while (copied := producer(indices, "Identity")) is not None:
        indices = copied.inputs[0]
    spread = producer(indices, "Expand")
    column = indices if spread is None else spread.inputs[0]
    if column is None or column.shape is None or indices is None or indices.shape is None:
        return None
    if len(column.shape) > rank or len(indices.shape) != rank:
        return None
    dims = (1,) * (rank - len(column.shape)) + column.shape.dims
    alone = all(d == 1 for i, d in enumerate(dims) if i != axis)
    return column if alone and same_dim(indices.shape[axis], dims[axis]) else None


def constant_ids(column: ir.Value | None) -> np.ndarray | None:
    """The constant integers of `column`, of any shape, as a vector."""
    while (reshaped := producer(column, ("Reshape", "Squeeze", "Unsqueeze"))) is not None:
        column = reshaped.inputs[0]
    ids = constant(column)
    return None if ids is None or ids.dtype.kind != "i" else ids.reshape(-1).astype(np.int64)


def same_but(axis: int, one: ir.Shape, other: ir.Shape) -> list[int] | None:
    """The sizes of all axes but `axis`, equal in both shapes (-1: without a number); None if not certain."""
    if len(one) != len(other):
        return None
    attributes = []
    for i, (a, b) in enumerate(zip(one, other)):
        if i != axis:
            if not same_dim(a, b):
                return None
            attributes.append(a if isinstance(a, int) else -1)
    return attributes
