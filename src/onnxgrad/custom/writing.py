"""Tools for user-defined rules: the pullback of a function, and a fixed point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxgrad.control_flow.iteration import loop
from onnxgrad.engine import reverse
from onnxgrad.engine.activity import prepare
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.subgraphs import empty, formal, give, loop_lead
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import add, as_list


def pullback(function: Callable[..., Any], *xs: Var) -> tuple[Any, Callable[..., list[Var | None]]]:
    """``function(*xs)``, which writes nodes, and its pullback: for use inside a rule.

    ::

        y, pull = pullback(lambda z: op.Tanh(z @ w), z)
        (z_cotangent,) = pull(g)

    Returns:
        What `function` returns (a variable or a tuple of them), and a function from its cotangents to those of `xs`
        (``None``: it does not depend on one). It writes where the cotangents are, which may be inside a Loop.
    """
    b = xs[0].builder
    with b.record() as emitted:
        starts = [b.copy(x) for x in xs]
        for start, x in zip(starts, xs):
            start.value.type, start.value.shape = x.value.type, x.value.shape
        results = function(*starts)
    wrt = [s.value for s in starts]
    ys = [y.value for y in as_list(results)]
    path = list(prepare(emitted, wrt, ys, b, reverse=True))
    ys = [b.now(y) for y in ys]

    def pull(*cotangents: Var | None) -> list[Var | None]:
        seeds: dict[ir.Value, Var] = {}
        for y, g in zip(ys, cotangents):
            if g is not None:
                seeds[y] = add([seeds[y], g]) if y in seeds else g
        if not seeds:
            return [None] * len(wrt)
        found = reverse(next(iter(seeds.values())).builder, path, seeds, wrt)
        return [found.get(v) for v in wrt]

    now = [b.var(y) for y in ys]
    return (tuple(now) if isinstance(results, (tuple, list)) else now[0]), pull


def iterate(op: Op, step: Callable[[Builder, Var], Var], start: Var, *, tolerance: float, most: int = 1000) -> Var:
    """The fixed point of `step`, from `start`, for use inside a rule: a Loop until no element moves by more than
    `tolerance` times the largest, or `most` steps are made.

    ``step(b, x)`` writes nodes into the body of the Loop, as ``b.Mul(x, w)``; `w` may be a variable from outside.
    """
    outer = start.builder
    b, body = empty(outer, "iterate")
    state = formal(b, start.value, "state")
    body.inputs.extend([*(v.value for v in loop_lead(b)), state.value])
    following = step(b, state)
    moved = b.ReduceMax(b.Abs(b.Sub(following, state)), None, keepdims=0)
    if following.value.shape is None:
        following.value.shape = start.value.shape
    largest = b.ReduceMax(b.Abs(following), None, keepdims=0)
    give(b, [b.Greater(moved, largest * tolerance), following])
    return loop(outer, body, outer.const(most).value, outer.const(True).value, [start])[0]
