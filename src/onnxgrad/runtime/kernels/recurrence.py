"""Scans to calls of one kernel that makes all their steps, rows by rows: recurrent layers, forwards and backwards.

No name is needed: any body whose rows do not read each other becomes a program (`recurrence_programs`).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxgrad.ir.graph import discard, prune, scopes, take_over
from onnxgrad.ir.literals import attributes_of
from onnxgrad.ir.match import is_op
from onnxgrad.ir.passes import Pass
from onnxgrad.runtime.kernels.elementwise import PHASE, see_shapes
from onnxgrad.runtime.kernels.elementwise_steps import DOMAIN
from onnxgrad.runtime.kernels.recurrence_programs import RowProgram, program_of
from onnxgrad.runtime.kernels.steps import Unfit
from onnxgrad.runtime.setting import Setting


def may_recur(model: ir.Model) -> bool:
    """True if there is a Scan anywhere in `model`."""
    return any(_scans(graph) for graph in scopes(model.graph))


def _recur(model: ir.Model, setting: Setting) -> int:
    """Replace Scans of `model` by calls. Returns the count."""
    see_shapes(model)
    count = 0
    for graph in reversed(scopes(model.graph)):
        for scan, program in _programs(graph):
            _write(graph, scan, program, count)
            count += 1
        prune(graph)
    if count:
        model.opset_imports[DOMAIN] = 1
    return count


def _scans(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if is_op(node, "Scan")]


def _programs(graph: ir.Graph) -> Iterator[tuple[ir.Node, RowProgram]]:
    for scan in _scans(graph):
        try:
            yield scan, program_of(scan)
        except Unfit:
            continue


def _write(graph: ir.Graph, scan: ir.Node, program: RowProgram, serial: int) -> None:
    attributes = attributes_of(program.attributes)
    name = f"native.recurrence.{serial}"
    node = ir.Node(DOMAIN, "Recurrence", program.operands, attributes, num_outputs=len(program.results), name=name)
    graph.insert_after(scan, node)
    for i, (old, made) in enumerate(zip(program.results, node.outputs)):
        made.name = "" if old is None else f"{name}.{i}"
        if old is not None:
            take_over(made, old)
    discard(graph, scan)


RECURRENCE = Pass(
    "recurrence",
    PHASE,
    "all steps of a Scan in one call",
    "Scans whose rows do not read each other, such as recurrent layers",
    lambda model, _: may_recur(model),
    _recur,
    Setting.keeps_operators,
)
