"""BatchNormalization in training mode with the statistics of the rows of all ranks.

The statistics are computed by an operator that is not ONNX's: `SumOverRanks`, whose result on every rank is the sum of
all ranks' operands. The loss, a sum over ranks, depends on each operand through the results of all ranks, so the
operator is its own transpose, and the backward pass follows. Each rank must differentiate its part of such a sum: its
loss times the denominator of its mean.

Each rank gives n, n·m and n·(v + m²) of its own rows, with the mean m and the variance v as the kernel finds them.
These sums are in float64, where taking the mean out of them again costs 2⁻⁵³·mean²/variance. The runtime cannot run a
graph with such operators; `onnxgrad.training.parallel.stages` cuts it there.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.custom import custom_vjp
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import named_values, scopes
from onnxgrad.ir.match import not_none
from onnxgrad.ir.names import described
from onnxgrad.rules.norm import along_channels
from onnxgrad.training.graph.batchnorm import attributes_in_training, trains, update_statistic
from onnxgrad.transforms.gradient_node import is_gradient
from onnxgrad.wording import type_text

DOMAIN, OPERATOR = "onnxgrad.ranks", "SumOverRanks"
_DOUBLE = int(ir.DataType.DOUBLE)


def is_sum(node: ir.Node) -> bool:
    """True if `node` is a sum over ranks."""
    return (node.domain, node.op_type) == (DOMAIN, OPERATOR)


def sum_over_ranks(b: Builder, x: Var) -> Var:
    """The sum of `x` over all ranks."""
    (y,) = b.append(ir.Node(DOMAIN, OPERATOR, [x.value]))
    y.value.type, y.value.shape = x.value.type, x.value.shape
    return y


@custom_vjp(f"{DOMAIN}::{OPERATOR}")
def RULE(op: Any, g: Var) -> Var:
    """y = Σ x over ranks: Σ g over ranks"""
    return sum_over_ranks(op.builder, g)


def synchronize(graph: ir.Graph, weight: str) -> None:
    """Have every BatchNormalization in training mode in `graph` use the statistics of all ranks, in place.

    Args:
        graph: with its Gradient bound, of the loss of this rank.
        weight: the name of what the loss is averaged over, by which the Gradient is multiplied; empty: a sum.

    Raises:
        BadInput: there is no such operator, or one in a nested graph, of unknown rank, or in 16 bits.
    """
    norms = [node for node in graph if trains(node)]
    inner = next((node for g in scopes(graph)[1:] for node in g if trains(node)), None)
    if inner is not None:
        raise BadInput(f"{described(inner)} is in a branch or loop body, where its statistics cannot be synchronized")
    if not norms:
        raise BadInput(
            "there is no BatchNormalization in training mode whose statistics could be synchronized\n"
            "  hint: leave sync_batch_norm out"
        )
    graph.opset_imports[DOMAIN] = 1
    b = Builder(graph)
    for node in norms:
        with b.record() as made:
            written = _written(b, node)
        graph.remove(made)
        graph.insert_before(node, made)
        for old, new in zip(node.outputs, written):
            old.replace_all_uses_with(new.value, replace_graph_outputs=True)
            if old.name:
                new.value.name, old.name = old.name, b.names.fresh(old.name)
        graph.remove(node, safe=True)
    if weight:
        for node in [n for n in graph if is_gradient(n)]:
            loss = not_none(node.inputs[-1])
            with b.record() as made:
                weighted = Var(b, loss) * b.cast_like(Var(b, named_values(graph)[weight]), Var(b, loss))
            graph.remove(made)
            graph.insert_before(node, made)
            node.replace_input_with(len(node.inputs) - 1, weighted.value)


def _written(b: Builder, node: ir.Node) -> list[Var]:
    """y, and the next running mean and variance."""
    x, scale, bias, *running = (Var(b, v) for v in node.inputs if v is not None)
    if x.shape is None or scale.shape is None or not isinstance(scale.shape[0], int):
        raise BadInput(f"{described(node)}: the rank of its operand is not known, so it cannot be synchronized")
    if x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):  # gradients times the rows of a batch overflow
        raise BadInput(f"{described(node)}: statistics of a tensor of {type_text(x.dtype)} cannot be synchronized")
    epsilon, momentum = node.attributes.get_float("epsilon", 1e-5), node.attributes.get_float("momentum", 0.9)
    operands = [v.value for v in (x, scale, bias, *running)]
    _, *own = b.append(ir.Node("", "BatchNormalization", operands, attributes_in_training(node), num_outputs=3))
    m, v = (b.Cast(statistic, to=_DOUBLE) for statistic in own)
    n = b.Reshape(b.Cast(b.Size(x), to=_DOUBLE) / b.Cast(b.Size(scale), to=_DOUBLE), [1])
    sums = sum_over_ranks(b, b.Concat(n, n * m, n * (v + m * m), axis=0))
    channels = int(scale.shape[0])
    count, first, second = b.emit("Split", sums, [1, channels, channels], axis=0, outputs=3)
    mean = first / count
    variance = b.Max(second / count - mean * mean, 0.0)
    mean, variance = (b.cast_like(statistic, x) for statistic in (mean, variance))
    gain = b.cast_like(scale, x) / b.Sqrt(variance + epsilon)
    centre, slope, level = (along_channels(b, p, x.rank) for p in (mean, gain, b.cast_like(bias, x)))
    following = [
        update_statistic(b, old, b.cast_like(new, old), momentum) for old, new in zip(running, (mean, variance))
    ]
    return [(x - centre) * slope + level, *following]
