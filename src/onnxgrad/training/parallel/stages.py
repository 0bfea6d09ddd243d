"""A graph with sums over ranks in it, cut there: stages that run one after the other, with an exchange between two.

A node is in the first stage in which all of its operands are available, so nodes that need no sum run before one is
awaited; sums that are ready at the same time are exchanged together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import reads
from onnxgrad.ir.match import is_op
from onnxgrad.ir.passes import run_passes, warn_of
from onnxgrad.runtime import Options
from onnxgrad.runtime.kernels import ATTENTION, CONVOLUTIONS, KERNELS
from onnxgrad.runtime.passes import PREPARATION
from onnxgrad.runtime.setting import Setting
from onnxgrad.training.graph.synchronized_norm import DOMAIN, is_sum


@dataclass
class Stage:
    """A part of a graph.

    Attributes:
        model: it. Its inputs are inputs of the whole, what other stages give, and sums, by their names in the whole;
            its outputs are what others read, what is summed, and outputs of the whole.
        summed: which outputs are summed over ranks at its end, by the name of their sum.
    """

    model: ir.Model
    summed: dict[str, str] = field(default_factory=dict)


def stages(model: ir.Model) -> list[Stage]:
    """The stages of `model`, in order."""
    level: dict[ir.Value, int] = {}
    nodes: dict[int, list[ir.Node]] = defaultdict(list)
    sums: dict[int, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        here = max((level.get(v, 0) for v in reads(node)), default=0)
        (sums if is_sum(node) else nodes)[here].append(node)
        level.update(dict.fromkeys(node.outputs, here + is_sum(node)))
    wanted = set(model.graph.outputs) | {v for found in sums.values() for n in found for v in n.inputs if v is not None}
    for here, found in nodes.items():
        wanted |= {v for node in found for v in reads(node) if level.get(v, 0) < here}
    return [
        Stage(
            _part(model, nodes[here], wanted, here),
            {n.inputs[0].name or "": n.outputs[0].name or "" for n in sums[here] if n.inputs[0] is not None},
        )
        for here in range(max(level.values(), default=0) + 1)
    ]


def with_own_kernels(model: ir.Model, options: Options) -> ir.Model:
    """`model`, or a copy with its kernel calls: parts that a cut divides would get none."""
    passed = run_passes(
        model,
        [*PREPARATION, KERNELS, ATTENTION, CONVOLUTIONS],
        lambda: Setting(model.graph, options.target, options.layout, options.provider_names),
        options.without,
    )
    warn_of(passed.failed)
    return passed.model


def _part(model: ir.Model, nodes: list[ir.Node], wanted: set[ir.Value], number: int) -> ir.Model:
    """`nodes` of `model` as a model of their own."""
    copies = Copies({}, None)
    inputs: list[ir.Value] = []
    constants: list[ir.Value] = []
    written: list[ir.Node] = []
    for node in nodes:
        for value in reads(node):
            maker = value.producer()
            if value in copies.values:
                continue
            if is_op(maker, "Constant"):  # to be seen as one
                written.append(copies.node(maker))
                continue
            held = value.is_initializer() and not value.is_graph_input()
            (constants if held else inputs).append(copies.value(value))
        if node.outputs[0] not in copies.values:
            written.append(copies.node(node))
    outputs = [copies.values[v] for node in nodes for v in node.outputs if v in wanted]
    opsets = {domain: version for domain, version in model.graph.opset_imports.items() if domain != DOMAIN}
    graph = ir.Graph(
        inputs, outputs, nodes=written, initializers=constants, opset_imports=opsets, name=f"stage_{number}"
    )
    return ir.Model(graph, ir_version=model.ir_version)


def last_readers(found: list[Stage]) -> Mapping[str, int]:
    """The last stage that reads a value, by its name."""
    return {v.name or "": number for number, stage in enumerate(found) for v in stage.model.graph.inputs}
