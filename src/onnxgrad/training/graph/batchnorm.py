"""BatchNormalization in training mode, written so that ONNX Runtime leaves the state alone.

The runtime's kernel writes the new running statistics into the memory of the old ones, be it an input of
the caller's or a shared constant. So the node gets buffers of its own, and momentum 0, which makes its
second and third output the statistics of the batch; the running ones are moved by ordinary operators.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import is_op


def trains(node: ir.Node) -> bool:
    """True if `node` is a BatchNormalization in training mode."""
    return is_op(node, "BatchNormalization") and bool(node.attributes.get_int("training_mode", 0))


def attributes_in_training(node: ir.Node) -> list[ir.Attr]:
    """The attributes of a BatchNormalization like `node` that returns the statistics of the batch."""
    kept = [a for name, a in node.attributes.items() if name == "epsilon"]
    return [ir.AttrInt64("training_mode", 1), ir.AttrFloat32("momentum", 0.0), *kept]


def with_private_statistics(b: Builder, node: ir.Node, serial: int) -> list[Var]:
    """y, m·mean + (1 - m)·batch mean, m·var + (1 - m)·batch variance, in memory of their own.

    `serial` tells the nodes of one graph apart.
    """
    x, scale, bias, mean, var = (Var(b, v) for v in node.inputs if v is not None)
    momentum = node.attributes.get_float("momentum", 0.9)
    buffers = [_buffer(b, s, (s, scale, bias), x, 2 * serial + k).value for k, s in enumerate((mean, var))]
    new = ir.Node(
        "",
        "BatchNormalization",
        [x.value, scale.value, bias.value, *buffers],
        attributes_in_training(node),
        num_outputs=3,
        name=node.name,
    )
    y, *batch = b.append(new)
    for old, out in zip((mean, var), batch):
        out.value.type, out.value.shape = old.value.type, old.value.shape
    return [y, *(update_statistic(b, old, new, momentum) for old, new in zip((mean, var), batch))]


def update_statistic(b: Builder, old: Var, new: Var, momentum: float) -> Var:
    """A running statistic after a batch that has `new`."""
    return b.Mul(old, momentum) + b.Mul(new, 1 - momentum) if momentum else new


def _buffer(b: Builder, like: Var, candidates: tuple[Var, ...], x: Var, serial: int) -> Var:
    """A finite tensor in the shape and dtype of `like`, in memory that no other value uses.

    Momentum 0 makes its elements irrelevant. It must not be constant (the runtime would fold it into an initializer and
    overwrite that), nor equal another value (the runtime would compute both once): so it is a varying value times an
    odd number of its own.
    """
    base = next((c for c in candidates if c.const is None and c.dtype == like.dtype), None)
    if base is None:  # everything is constant: use nodes that depend on the batch
        base = b.cast_like(b.ReduceMax(x, [0, *range(2, x.rank)], keepdims=0), like)
    return b.Mul(base, -0.73 / (serial + 1))
