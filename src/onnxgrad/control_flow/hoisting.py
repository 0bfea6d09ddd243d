"""Hoisting out of backward iterations: values that depend only on residuals are computed for all steps at once.

Local derivatives, such as y·(1 - y), do not depend on the cotangent. A few operators on stacked values replace as
many in every step.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.control_flow.reverse_iteration import Backwards, StepInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import prune, values_read
from onnxgrad.ir.match import constant, is_op
from onnxgrad.ir.operators import traits_of
from onnxgrad.ir.subgraphs import formal

#: Elementwise operators that stay in the step: a stack of another type, or of zeros and ones (the step function of a
#: ReLU, see `rules.step_functions`), saves no work, and kernels fuse these with their readers.
_KEPT = frozenset({"Cast", "CastLike", "HardSigmoid"})


def hoist_elementwise(iteration: Backwards) -> None:
    """Hoist elementwise nodes of the body to nodes on stacks outside, whose slices the body then reads.

    Apart from stacks of one shape, these nodes read only scalars, so that they are valid for zero steps as well.
    """
    b, o, columns, own = iteration.b, iteration.op.builder, iteration.columns, iteration.carried
    formals = {c.inner for c in columns} | {v.value for v in own}
    stacks = {c.inner: c for c in columns if c.outer is not None and not c.in_sequence and c.slot.axis == 0}
    ahead: dict[ir.Node, StepInput] = {}
    for node in b.graph:
        operands = _stack_operands(b, o, node, stacks, formals)
        if operands is None:
            continue
        stack = o.append(ir.Node(node.domain, node.op_type, [x.value for x in operands], node.attributes.values()))[0]
        out, first = node.outputs[0], next(stacks[v] for v in node.inputs if v in stacks)
        stacks[out] = ahead[node] = StepInput(out, stack.value, first.slot)
    added = []
    for node, column in ahead.items():
        uses = [use for use in node.outputs[0].uses() if use.node not in ahead]
        if uses:
            column.inner = formal(b, node.outputs[0], "ahead").value
            for use in uses:
                use.node.replace_input_with(use.idx, column.inner)
            added.append(column)
    prune(b.graph)
    used = values_read(b.graph)
    iteration.columns = [c for c in [*columns, *added] if c.inner in used]


def hoist_transposes(iteration: Backwards) -> None:
    """Transpose loop-invariant right operands of Gemms (transB=1) once, outside, which makes the Gemms faster."""
    b, o, columns, own = iteration.b, iteration.op.builder, iteration.columns, iteration.carried
    inside = {v for node in b.graph for v in node.outputs} | set(b.graph.initializers.values())
    inside |= {c.inner for c in columns} | {v.value for v in own}
    for node in b.graph:
        if is_op(node, "Gemm") and node.attributes.get_int("transB"):
            right = node.inputs[1]
            if right is not None and right not in inside:
                node.replace_input_with(1, o.Transpose(Var(o, right), perm=[1, 0]).value)
                del node.attributes["transB"]


def _stack_operands(
    b: Builder, o: Builder, node: ir.Node, stacks: dict[ir.Value, StepInput], formals: set[ir.Value]
) -> list[Var] | None:
    """The operands of `node` stacked over all steps, if it is elementwise on stacks and scalars; else None."""
    if not traits_of(node).is_elementwise or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
        return None
    if is_op(node, _KEPT):
        return None
    shape, operands, backwards = node.outputs[0].shape, [], set()
    for v in node.inputs:
        if v is None or v.shape is None or shape is None:
            return None
        column = stacks.get(v)
        if column is not None:
            if tuple(v.shape) != tuple(shape) or column.outer is None:
                return None
            backwards.add(column.slot.backwards)
            operands.append(Var(o, column.outer))
            continue
        if v in formals or len(v.shape) > len(shape) or any(d != 1 for d in v.shape):
            return None
        maker = v.producer()
        if v in b.graph.initializers.values() or (maker is not None and maker.graph is b.graph):
            number = constant(v)
            if number is None:
                return None
            operands.append(o.const(number, v.dtype))
        else:
            operands.append(Var(o, v))
    return operands if len(backwards) == 1 else None
