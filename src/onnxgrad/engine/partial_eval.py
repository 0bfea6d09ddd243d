"""Partial evaluation: split a derived graph into values known beforehand and the rest.

The primal computes the known values. The rest, the linear part, reads seeds (cotangents or tangents) and some of the
known values, the *residuals*. The caller chooses the known values:

=================================  ==============================================================================
caller                             known
=================================  ==============================================================================
calls of local functions           what the primal computes; slopes are computed where they are used (`primal_values`)
``linearize``, ``split_vjp``       what depends on no seed, but on an input of the model (`seedless_values`)
Loop and Scan                      what a step of the primal computes and can stack for all steps
programs of eager functions        what the tape holds
=================================  ==============================================================================

A step for parts of a batch is cut at named values, its gradients: no residuals have to be found, so that only the
slices of `onnxgrad.ir.graph` are shared. The same is true for a sub-graph whose borders a user names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import onnx_ir as ir

from onnxgrad.ir.graph import cut, dependents, reads

#: A test of values: True for those that are known.
Known = Callable[[ir.Value], bool]


def residuals(results: Iterable[ir.Value], known: Known) -> list[ir.Value]:
    """The known values that the computation of `results` reads, each once; a known result is one of them."""
    return cut(results, known)


def primal_values(graph: ir.Graph, emitted: Collection[ir.Node], seeds: Collection[ir.Value]) -> Known:
    """Build a predicate of known values: those of `graph` that do not depend on derivative nodes.

    Seeds are unknown. So are constants: both parts get a copy of these.
    """
    linear = {n for n in emitted if n.graph is graph}
    primal: set[ir.Value] = set(graph.outputs)
    for node in reversed(graph):
        if node not in linear or any(v in primal for v in node.outputs):
            linear.discard(node)
            primal.update(reads(node))

    def is_known(value: ir.Value) -> bool:
        node = value.producer()
        if node is None:
            return value.is_graph_input() and value not in seeds
        return node not in linear and (node.op_type, node.domain) != ("Constant", "")

    return is_known


def seedless_values(graph: ir.Graph, seeds: Collection[ir.Value], given: Iterable[ir.Value]) -> Known:
    """Build a predicate of known values: those that depend on a value of `given` and on no seed.

    Values that depend on weights alone are constants in either part.
    """
    moving, computed = dependents(graph, seeds), dependents(graph, given)
    return lambda value: value in computed and value not in moving
