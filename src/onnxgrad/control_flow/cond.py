"""If: only the branch that ran computes its derivative.

The derivative of an If is an If with the same condition, whose branches contain a copy of the primal branch and its
derivative, built by the engine inside the branch. Captured values of a branch are its operands. A branch returns zeros
for results that it does not depend on, since both branches must have the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxgrad.engine import forward, reverse
from onnxgrad.engine.activity import is_differentiable
from onnxgrad.engine.reverse import add_cotangents
from onnxgrad.ir import Builder, Var, same_shape
from onnxgrad.ir.match import Dim
from onnxgrad.ir.subgraphs import copy_of, give
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import rule
from onnxgrad.rules.rule import Cotangents

Dims = Sequence[Dim]
Branch = Callable[[Builder, ir.Graph], list[Var]]


def _if_jvp(op: Op, tangents: Cotangents) -> list[Var | None]:
    """The taken branch pushes the tangents of its captured values forward."""
    seeds = {c.value: op.tangents[c.value] for c in op.captures if c.value in op.tangents}
    moved = [i for i, v in enumerate(op.node.outputs) if is_differentiable(v)]

    def push(b: Builder, graph: ir.Graph) -> list[Var]:
        outs = [graph.outputs[i] for i in moved]
        pushed = forward(b, list(graph), {v: Var(b, t.value) for v, t in seeds.items()}, outs)
        return [pushed[v] if v in pushed else b.zeros_like(b.var(b.now(v))) for v in outs]

    pushed = _derived_if(op, push, [op.node.outputs[i] for i in moved])
    result: list[Var | None] = [None] * len(op.node.outputs)
    for i, t in zip(moved, pushed):
        result[i] = t
    return result


@rule("If", wrt=(), jvp=_if_jvp, total=True)  # if its branches are
def branch(op: Op, g: object) -> dict[ir.Value, Var]:
    """y = then(c) if condition else other(c), c captured: the taken branch pulls g back to c"""
    cotangents = dict(enumerate(g if isinstance(g, tuple) else (g,)))
    wrt = [c.value for c in op.captures if c.value in op.active]

    def pull(b: Builder, graph: ir.Graph) -> list[Var]:
        here = [(graph.outputs[i], Var(b, u.value)) for i, u in cotangents.items() if u is not None]
        pulled = reverse(b, list(graph), add_cotangents((out, _as_here(u, b.var(out))) for out, u in here), wrt)
        return [pulled[v] if v in pulled else b.zeros_like(b.var(v)) for v in wrt]

    return dict(zip(wrt, _derived_if(op, pull, wrt)))


def _as_here(g: Var, y: Var) -> Var:
    """`g` with the shape that this branch knows for `y`; the other branch may know another."""
    if same_shape(g, y):
        return g
    if _compatible(g.shape, y.shape):
        here = g.builder.Identity(g)
        here.value.shape = y.value.shape
        return here
    return g.builder.reshape(g, g.builder.shape_of(y)) if isinstance(y.value.type, ir.TensorType) else g


def _compatible(a: Dims | None, b: Dims | None) -> bool:
    """True if both shapes are known and can be equal."""
    return (
        a is not None
        and b is not None
        and len(a) == len(b)
        and not any(isinstance(i, int) and isinstance(j, int) and i != j for i, j in zip(a, b))
    )


def _derived_if(op: Op, derive: Branch, like: list[ir.Value]) -> list[Var]:
    """Emit an If on the same condition; each branch returns what `derive` emits into a copy of the primal branch."""
    branches = {}
    for name in ("then_branch", "else_branch"):
        b, graph = copy_of(op.builder, op.node.attributes[name].as_graph())
        give(b, derive(b, graph))
        branches[name] = ir.AttrGraph(name, graph)
    node = ir.Node("", "If", [op.node.inputs[0]], list(branches.values()), num_outputs=len(like))
    for value, model in zip(node.outputs, like):
        value.type, value.shape = model.type, model.shape
    return list(op.builder.append(node))
