"""Second-order steps, which need the loss as a function: Levenberg-Marquardt and L-BFGS.

Both are written as graphs: they hold the loss once more, at weights that were not reached yet, and decide by it whether
a step is taken. So they are for losses that are the same function at every step: whole data sets, or large batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.control_flow.iteration import loop
from onnxgrad.engine import forward, reverse
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.constants import is_repeatable
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import ancestors, dependents, subgraphs
from onnxgrad.ir.names import described
from onnxgrad.ir.subgraphs import empty, give
from onnxgrad.rules.rule import add
from onnxgrad.training.optim.update import FLOAT, State

#: Bounds of the damping, and its factor after a rejected step.
_LEAST, _MOST, _FACTOR = 1e-10, 1e10, 4.0
#: The share of the decrease along the gradient that a step must reach (Armijo 1966).
_SHARE = 1e-4


class LossOfWeights:
    """The loss as a function of the weights.

    Attributes:
        weights: the weights that train.
        at: the weights, as values of their own.
        loss: the loss there.
        ends: the predictions there.
    """

    def __init__(
        self, b: Builder, loss: ir.Value, predictions: Sequence[ir.Value], weights: Sequence[ir.Value]
    ) -> None:
        self.b = b
        moving = dependents(b.graph, weights)
        self._nodes = [n for n in ancestors(b.graph, [loss]) if any(v in moving for v in n.outputs)]
        self._loss, self.weights = loss, list(weights)
        for node in self._nodes:
            _refuse_random(node, b)
        self.at = [b.copy(w) for w in weights]
        for x, w in zip(self.at, weights):
            x.value.type, x.value.shape = w.type, w.shape
        values = self._copied(b, self.at)
        self.loss = b.var(values[loss])
        self.ends = [values[v] for v in predictions if v in values]

    def __call__(self, b: Builder, weights: Sequence[Var]) -> Var:
        """Write the loss for other weights."""
        return b.var(self._copied(b, weights)[self._loss])

    def _copied(self, b: Builder, weights: Sequence[Var]) -> dict[ir.Value, ir.Value]:
        copies = Copies(dict(zip(self.weights, (w.value for w in weights))), b.names)
        for node in self._nodes:
            b.append(copies.unnamed(node))
        return copies.values

    def gradient(self) -> list[Var]:
        """By every weight."""
        xs = [x.value for x in self.at]
        found = reverse(self.b, list(self.b.graph), {self.loss.value: self.b.full_like(self.loss, 1)}, xs)
        return [found.get(x.value) or self.b.zeros_like(x) for x in self.at]

    def curvature(self, v: Sequence[Var]) -> list[Var]:
        """The product of the Gauss-Newton matrix and `v`: Jᵀ·H·J·v; H is the Hessian of the loss by the predictions."""
        b, xs = self.b, [x.value for x in self.at]
        pushed = forward(b, list(b.graph), dict(zip(xs, v)), self.ends)
        ones = {self.loss.value: b.full_like(self.loss, 1)}
        slopes = reverse(b, list(b.graph), ones, self.ends)
        bent = forward(b, list(b.graph), pushed, [g.value for g in slopes.values()])
        curved = {e: bent[g.value] for e, g in slopes.items() if g.value in bent}
        found = reverse(b, list(b.graph), curved, xs) if curved else {}
        return [found.get(x.value) or b.zeros_like(x) for x in self.at]


def _refuse_random(node: ir.Node, b: Builder) -> None:
    opset = b.infer.context.get_opset_version(node.domain)
    if not subgraphs(node) and not is_repeatable(node.op_type, node.domain, opset):
        raise BadInput(
            f"{described(node)} draws numbers, and this optimizer takes a loss that is the same at every step\n"
            "  hint: train_mode=False, or another optimizer"
        )
    for graph in subgraphs(node):
        for inner in graph:
            _refuse_random(inner, b)


def write_step(name: str, settings: Mapping[str, Any], function: LossOfWeights, state: State) -> None:
    """Bind the next value of every weight, and of the method's memory."""
    weights = function.weights
    dtypes = {w.dtype for w in weights}
    if len(dtypes) != 1 or not dtypes <= {ir.DataType.FLOAT, ir.DataType.DOUBLE}:
        raise BadInput(f"the optimizer {name!r} takes weights of one type, float or double")
    (dtype,) = dtypes
    rate = state.builder.cast_like(
        state.held("learning_rate", np.array(settings["learning_rate"]), FLOAT, fed=True),
        Var(state.builder, weights[0]),
    )
    write = {"lm": _levenberg_marquardt, "lbfgs": _lbfgs}[name]
    for w, new in zip(weights, write(function, settings, rate, state, dtype or FLOAT)):
        state.bind(w, new)


def _dot(a: Sequence[Var], b: Sequence[Var]) -> Var:
    return add([x.builder.ReduceSum(x * y, keepdims=0) for x, y in zip(a, b)])


# --- Levenberg-Marquardt ---------------------------------------------------------------------------


def _levenberg_marquardt(
    f: LossOfWeights, settings: Mapping[str, Any], rate: Var, state: State, dtype: ir.DataType
) -> list[Var]:
    """(G + λ)·δ = -g by conjugate gradients; λ follows the share of the promised decrease that came (Nielsen 1999)."""
    b = f.b
    damping = state.held("damping", np.array(settings["damping"]), dtype)
    g = f.gradient()
    steps = _solve_damped(f, g, damping, int(settings["iterations"]), float(settings["tolerance"]))
    moves = [rate * d for d in steps]
    tried = [x + m for x, m in zip(f.at, moves)]
    loss = f(b, tried)
    promised = b.Sub(damping * _dot(steps, steps), _dot(g, steps)) * 0.5
    taken = loss < f.loss
    surplus = b.Div(f.loss - loss, promised) * 2.0 - 1.0
    eased = b.Max(b.Sub(1.0, surplus * surplus * surplus), 1.0 / 3)
    following = damping * b.Where(taken, eased, _FACTOR)
    state.bind(damping.value, b.Min(b.Max(following, _LEAST), _MOST))
    return [b.Where(taken, new, old) for new, old in zip(tried, f.at)]


def _solve_damped(f: LossOfWeights, g: Sequence[Var], damping: Var, iterations: int, tolerance: float) -> list[Var]:
    """δ with (G + λ)·δ = -g, by at most so many iterations, in a Loop whose body computes the product G·p."""
    b, count = f.b, len(g)
    ps = [b.var(ir.Value(name=b.names.fresh("direction"), type=x.value.type, shape=x.value.shape)) for x in f.at]
    product = f.curvature(ps)
    depends = dependents(b.graph, [p.value for p in ps])
    start = [-u for u in g]
    first = _dot(g, g)
    zeros = [b.zeros_like(x) for x in f.at]
    inner, body = empty(b, "conjugate_gradients")
    b.move([n for n in b.graph if any(v in depends for v in n.outputs)], inner)

    def state_like(x: Var, hint: str) -> Var:
        return inner.var(ir.Value(name=b.names.fresh(hint), type=x.value.type, shape=x.value.shape))

    number = inner.var(ir.Value(name=b.names.fresh("i"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([])))
    going = inner.var(ir.Value(name=b.names.fresh("going"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])))
    xs, rs = ([state_like(x, hint) for x in f.at] for hint in ("solution", "rest"))
    size = state_like(first, "size")
    ps = [inner.var(p.value) for p in ps]
    bent = [Var(inner, u.value) + inner.var(damping.value) * p for u, p in zip(product, ps)]
    curvature = _dot(ps, bent)
    curved = curvature > 0.0
    step = inner.Where(curved, size / curvature, 0.0)
    solution = [x + step * p for x, p in zip(xs, ps)]
    rest = [r - step * u for r, u in zip(rs, bent)]
    left = _dot(rest, rest)
    onward = [r + (left / size) * p for r, p in zip(rest, ps)]
    more = inner.And(curved, left > Var(inner, first.value) * tolerance**2)
    body.inputs.extend(v.value for v in (number, going, *xs, *rs, *ps, size))
    give(inner, [more, *solution, *rest, *onward, left])
    some = first > 0.0
    found = loop(b, body, b.const(np.int64(iterations)).value, some.value, [*zeros, *start, *start, first])
    return found[:count]


# --- L-BFGS ----------------------------------------------------------------------------------------


def _lbfgs(f: LossOfWeights, settings: Mapping[str, Any], rate: Var, state: State, dtype: ir.DataType) -> list[Var]:
    """The two-loop recursion (Nocedal 1980), and halved steps until the loss falls as it should."""
    b, m = f.b, int(settings["history"])
    shapes = [[int(d) for d in x.shape or ()] for x in f.at]  # type: ignore[arg-type]
    sizes = [int(np.prod(s)) for s in shapes]
    n = sum(sizes)
    g = _flat(b, f.gradient())
    last = {k: state.held(f"lbfgs_{k}", np.zeros(n), dtype) for k in ("step", "gradient")}
    held = {k: state.held(f"lbfgs_{k}", np.zeros((m, n)), dtype) for k in ("steps", "changes")}
    change = g - last["gradient"]
    overlap, length = last["step"] @ change, change @ change
    useful = overlap > length * 1e-10
    newest = b.Reshape(b.Where(useful, 1.0 / overlap, 0.0), [1])
    weights = state.held("lbfgs_weights", np.zeros(m), dtype)
    kept = {k: b.Slice(held[k], [1], [m], [0]) for k in held}
    entered = {
        "steps": b.Concat(kept["steps"], b.Unsqueeze(last["step"], [0]), axis=0),
        "changes": b.Concat(kept["changes"], b.Unsqueeze(change, [0]), axis=0),
    }
    steps, changes = (b.Where(useful, entered[k], held[k]) for k in ("steps", "changes"))
    weight = b.Where(useful, b.Concat(b.Slice(weights, [1], [m], [0]), newest, axis=0), weights)
    scale = state.held("lbfgs_scale", np.array(0.0), dtype)
    scale_now = b.Where(useful, overlap / length, scale)
    q, shares = g, []
    for k in reversed(range(m)):
        s, y, w = (b.Gather(v, b.const(np.int64(k)), axis=0) for v in (steps, changes, weight))
        shares.append(w * (s @ q))
        q = q - shares[-1] * y
    norm = b.Sqrt(g @ g)
    q = b.Where(scale_now > 0.0, scale_now, b.Min(1.0 / norm, 1.0)) * q
    for k in range(m):
        s, y, w = (b.Gather(v, b.const(np.int64(k)), axis=0) for v in (steps, changes, weight))
        q = q + (shares[m - 1 - k] - w * (y @ q)) * s
    downhill = (g @ q) > 0.0
    direction = -b.Where(downhill, q, g)
    length_of_step, found = _search_step_length(
        f, direction, rate, g @ direction, shapes, sizes, int(settings["iterations"])
    )
    move = b.Where(found, length_of_step, 0.0) * direction
    state.bind(last["step"].value, move)
    state.bind(last["gradient"].value, g)
    state.bind(held["steps"].value, steps)
    state.bind(held["changes"].value, changes)
    state.bind(weights.value, b.Where(found, weight, weight * 0.0))  # the memory misled: reset it
    state.bind(scale.value, b.Where(found, scale_now, 0.0))
    return [x + d for x, d in zip(f.at, _parts(b, move, shapes, sizes))]


def _search_step_length(
    f: LossOfWeights, direction: Var, rate: Var, slope: Var, shapes: list[list[int]], sizes: list[int], most: int
) -> tuple[Var, Var]:
    """A step length that decreases the loss sufficiently, and True if there is one."""
    b = f.b
    inner, body = empty(b, "line_search")
    scalar = ir.Shape([])
    number = inner.var(ir.Value(name=b.names.fresh("i"), type=ir.TensorType(ir.DataType.INT64), shape=scalar))
    going = inner.var(ir.Value(name=b.names.fresh("going"), type=ir.TensorType(ir.DataType.BOOL), shape=scalar))
    t, before, done = (
        inner.var(ir.Value(name=b.names.fresh(hint), type=like.value.type, shape=scalar))
        for hint, like in (("length", rate), ("last", rate), ("done", slope > 0.0))
    )
    moves = _parts(inner, t * inner.var(direction.value), shapes, sizes)
    loss = f(inner, [inner.var(x.value) + d for x, d in zip(f.at, moves)])
    falls = inner.var(f.loss.value) + t * inner.var(slope.value) * _SHARE
    enough = inner.LessOrEqual(loss, falls)
    body.inputs.extend(v.value for v in (number, going, t, before, done))
    give(inner, [inner.Not(enough), t * 0.5, inner.Identity(t), enough])
    yes = b.const(np.array(True))
    _, length, found = loop(b, body, b.const(np.int64(most)).value, yes.value, [rate, rate * 0.0, b.Not(yes)])
    return length, found


def _flat(b: Builder, parts: Sequence[Var]) -> Var:
    flat = [b.Reshape(p, [-1]) for p in parts]
    return flat[0] if len(flat) == 1 else b.Concat(*flat, axis=0)


def _parts(b: Builder, flat: Var, shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Var]:
    if len(sizes) == 1:
        return [b.Reshape(flat, list(shapes[0]))]
    pieces = b.emit("Split", flat, list(sizes), axis=0, outputs=len(sizes))
    return [b.Reshape(p, list(s)) for p, s in zip(pieces, shapes)]
