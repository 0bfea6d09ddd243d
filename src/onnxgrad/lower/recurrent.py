"""RNN, GRU and LSTM as a Scan over time with the weights as operands.

The step contains only the recurrent part: the input's part of all gates is one MatMul over all steps, before it.
Lengths per sequence become a mask that freezes the state, and clears the output, after the end. The specification
leaves the last state of an empty sequence open; here, as in ONNX Runtime, it is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.ir.stops import RECURRENT, name_stop
from onnxgrad.ir.subgraphs import empty, give
from onnxgrad.lower.registry import attribute, lowering

#: Defaults of the activations that take parameters: (alpha, beta).
_DEFAULTS = {
    "Affine": (None, None),
    "LeakyRelu": (0.01, None),
    "ThresholdedRelu": (1.0, None),
    "ScaledTanh": (None, None),
    "HardSigmoid": (0.2, 0.5),
    "Elu": (1.0, None),
}


#: Activations without parameters.
_PLAIN = ("Relu", "Tanh", "Sigmoid", "Softsign", "Softplus")
#: The names of all of them, in which case does not matter.
_NAMES = {n.lower(): n for n in [*_DEFAULTS, *_PLAIN]}


def _activation(name: str, alpha: float | None, beta: float | None) -> Callable[[Var], Var]:
    """An activation function by its name."""
    if name in _PLAIN:
        return lambda x: x.builder.emit(name, x)
    first, second = _DEFAULTS[name]
    alpha, beta = first if alpha is None else alpha, second if beta is None else beta
    if name in ("LeakyRelu", "Elu", "ThresholdedRelu"):
        return lambda x: x.builder.emit(name, x, alpha=alpha)
    if name == "HardSigmoid":
        return lambda x: x.builder.HardSigmoid(x, alpha=alpha, beta=beta)
    if alpha is None or beta is None:
        raise NotDifferentiable(f"its activation {name} needs alpha and beta, which the node does not give")
    if name == "Affine":
        return lambda x: x * alpha + beta
    return lambda x: x.builder.Tanh(x * beta) * alpha


class _Layer:
    """One RNN, GRU or LSTM node: its operands by name, its attributes, and the inputs of its steps."""

    gates: int
    activations: Sequence[str]
    states: Sequence[str] = ("h",)

    def __init__(self, b: Builder, node: ir.Node, *operands: Var | None) -> None:
        self.b, self.node = b, node
        names = ["X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"]
        self.operands: dict[str, Var | None] = dict.fromkeys(names)
        for name, x in zip(names, operands):
            self.operands[name] = x
            if x is not None and x.shape is None:  # the specification fixes the rank
                x.value.shape = ir.Shape([None] * {"B": 2, "P": 2, "sequence_lens": 1}.get(name, 3))
        self.batch_first = bool(self.attr("layout"))
        self.directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[
            self.attr("direction")
        ]
        self.clip = self.attr("clip")
        activations = self.attr("activations") or []
        activations = [g.decode() if isinstance(g, bytes) else g for g in activations] or list(self.activations) * 2
        self.functions = self._functions(activations)

    def attr(self, name: str) -> Any:
        return attribute(self.b, self.node, name)

    def _functions(self, names: Sequence[str]) -> list[Callable[[Var], Var]]:
        alphas, betas = iter(self.attr("activation_alpha") or []), iter(self.attr("activation_beta") or [])
        wanted = len(self.activations) * len(self.directions)
        if len(names) < wanted:
            raise NotDifferentiable(f"it gives {len(names)} activations where it needs {wanted}")
        functions = []
        for called in names[:wanted]:  # parameters are given, in order, to the functions that take them
            name = _NAMES.get(called.lower())
            if name is None:
                raise NotDifferentiable(f"its activation {called!r} is not one that ONNX names")
            alpha = next(alphas, None) if name in _DEFAULTS else None
            beta = next(betas, None) if name in ("Affine", "ScaledTanh", "HardSigmoid") else None
            functions.append(_activation(name, alpha, beta))
        return functions

    def operand(self, name: str) -> Var:
        """An operand that every node has."""
        return not_none(self.operands[name])

    def part(self, name: str, direction: int) -> Var | None:
        """An operand's slice for one direction."""
        x = self.operands[name]
        if x is None:
            return None
        axis = 1 if self.batch_first and name.startswith("initial") else 0
        if len(self.directions) == 1:  # without a copy
            return self.b.Squeeze(x, [axis])
        return self.b.Gather(x, self.b.const(direction), axis=axis)

    def write(self) -> list[Var | None]:
        """The whole layer: all directions, in the layout that is asked for."""
        b, x = self.b, self.operand("X")
        if self.batch_first:
            x = b.Transpose(x, perm=[1, 0, 2])
        every: list[Var] = []
        last: list[list[Var]] = []
        for d, backwards in enumerate(self.directions):
            results = self.run_direction(x, d, backwards)
            last.append(results[: len(self.states)])
            every.append(results[-1])
        join = every[0] if len(every) == 1 else None
        y = b.Unsqueeze(join, [1]) if join is not None else b.Concat(*[b.Unsqueeze(e, [1]) for e in every], axis=1)
        if self.batch_first:
            y = b.Transpose(y, perm=[2, 0, 1, 3])
        axis = 1 if self.batch_first else 0
        ends = []
        for k in range(len(self.states)):
            parts = [b.Unsqueeze(states[k], [axis]) for states in last]
            ends.append(parts[0] if len(parts) == 1 else b.Concat(*parts, axis=axis))
        return [y, *ends]

    def run_direction(self, x: Var, d: int, backwards: bool) -> list[Var]:
        """One direction: the last states, then the output at every step, as [time, batch, hidden]."""
        b = self.b
        w, r, bias = not_none(self.part("W", d)), not_none(self.part("R", d)), self.part("B", d)
        hidden = self._hidden(r)
        columns = b.MatMul(x, b.Transpose(w, perm=[1, 0]))
        wb = rb = None
        if bias is not None:
            wb, rb = b.emit("Split", bias, num_outputs=2, axis=0, outputs=2)
        columns, wb, rb = self.gather_biases(columns, wb, rb, hidden)
        first = []
        batch = b.shape_of(x, 1, 2)
        for name in self.states:
            initial = self.part(f"initial_{name}", d)
            zero = b.const(0, x.dtype)
            first.append(initial if initial is not None else b.Expand(zero, b.join(batch, [hidden])))
        rt = b.Transpose(r, perm=[1, 0])
        shared = self.shared(d, rt, rb, hidden)
        scanned = [columns]
        if self.operands["sequence_lens"] is not None:
            scanned.append(self.mask(x))
        *last, every = self.scan(first, scanned, shared, backwards, d, hidden)
        if self.operands["sequence_lens"] is not None:  # ONNX Runtime ends an empty sequence with zeros
            some = b.Unsqueeze(self.operand("sequence_lens") > 0, [1])
            last = [b.Where(some, v, 0.0) for v in last]
        return [*last, every]

    def mask(self, x: Var) -> Var:
        """1 where a sequence has not ended, else 0: [time, batch, 1]."""
        b = self.b
        steps = b.size_of(x, 0)
        lengths = b.Cast(self.operand("sequence_lens"), to=int(ir.DataType.INT64))
        time = b.Unsqueeze(b.Range(0, steps, 1), [1])
        return b.Unsqueeze(b.Cast(b.Less(time, lengths), to=int(x.dtype or 0)), [2])

    def _hidden(self, r: Var) -> int:
        size = self.attr("hidden_size")
        if size is None and r.shape is not None and isinstance(r.shape[-1], int):
            size = r.shape[-1]
        if size is None:
            raise NotDifferentiable("its hidden size is neither an attribute nor known from R")
        return int(size)

    def scan(
        self, first: list[Var], scanned: list[Var], shared: Any, backwards: bool, d: int, hidden: int
    ) -> list[Var]:
        """Append the Scan over time."""
        b = self.b
        inner, body = empty(b, "step")
        dtype = self.operand("X").value.type
        batch = None if first[0].shape is None else first[0].shape[0]
        for hint in self.states:
            value = ir.Value(name=b.names.fresh(hint), type=dtype, shape=ir.Shape([batch, hidden]))
            body.inputs.append(value)
        for x, hint in zip(scanned, ("gates", "mask")):
            shape = None if x.shape is None else ir.Shape(x.shape[1:])
            body.inputs.append(ir.Value(name=b.names.fresh(hint), type=dtype, shape=shape))
        formals = [inner.var(v) for v in body.inputs]
        n = len(self.states)
        before, column = formals[:n], formals[n]
        after = self.step(inner, column, before, shared, self.functions[d * len(self.activations) :], hidden)
        out = after[0]
        if len(scanned) > 1:  # a sequence that has ended keeps its state, and gives zeros
            going = inner.Cast(formals[n + 1], to=int(ir.DataType.BOOL))
            out = inner.Where(going, after[0], 0.0)
            after = [inner.Where(going, new, old) for new, old in zip(after, before)]
        give(inner, [*after, out])
        attrs: list[ir.Attr] = [
            ir.AttrGraph("body", body),
            ir.AttrInt64("num_scan_inputs", len(scanned)),
        ]
        if backwards:
            attrs.append(ir.AttrInt64s("scan_input_directions", [1] * len(scanned)))
            attrs.append(ir.AttrInt64s("scan_output_directions", [1]))
        node = ir.Node("", "Scan", [v.value for v in [*first, *scanned]], attrs, num_outputs=n + 1)
        steps = None if scanned[0].shape is None else scanned[0].shape[0]
        if not isinstance(steps, int):  # ONNX Runtime fails on a Scan of zero steps, and its message names the node
            node.name = name_stop(b.names, RECURRENT, self.node)
        return list(b.append(node))

    # --- differences between the three ------------------------------------------------------------

    def gather_biases(self, columns: Var, wb: Var | None, rb: Var | None, hidden: int) -> Any:
        """Add the biases that need not be in the step to the columns."""
        del hidden
        if wb is not None and rb is not None:
            columns = columns + (wb + rb)
        return columns, None, None

    def shared(self, d: int, rt: Var, rb: Var | None, hidden: int) -> Any:
        """The values that all steps read, besides the column of each."""
        del d, rb, hidden
        return rt

    def step(self, b: Builder, column: Var, before: list[Var], shared: Any, functions: Any, hidden: int) -> list[Var]:
        """The states after a step."""
        raise NotImplementedError

    def clipped(self, x: Var) -> Var:
        """`x`, before an activation."""
        if self.clip is None:
            return x
        return x.builder.Clip(x, x.builder.const(-self.clip, x.dtype), x.builder.const(self.clip, x.dtype))


class _Rnn(_Layer):
    activations = ("Tanh",)

    def step(self, b: Builder, column: Var, before: list[Var], shared: Any, functions: Any, hidden: int) -> list[Var]:
        """h' = f(x·Wᵀ + h·Rᵀ + b)"""
        del hidden
        return [functions[0](self.clipped(column + b.MatMul(before[0], b.var(shared.value))))]


class _Gru(_Layer):
    activations = ("Sigmoid", "Tanh")

    def gather_biases(self, columns: Var, wb: Var | None, rb: Var | None, hidden: int) -> Any:
        if wb is None or rb is None:
            return columns, None, None
        b = self.b
        gates, last = b.Slice(rb, [0], [2 * hidden], [0]), b.Slice(rb, [2 * hidden], [3 * hidden], [0])
        if not self.attr("linear_before_reset"):
            return columns + (wb + rb), None, None
        zeros = b.Expand(b.const(0, columns.dtype), b.join([hidden]))
        return columns + (wb + b.Concat(gates, zeros, axis=0)), None, last

    def shared(self, d: int, rt: Var, rb: Var | None, hidden: int) -> Any:
        del d
        gates, last = self.b.emit("Split", rt, [2 * hidden, hidden], axis=1, outputs=2)
        return gates, last, rb

    def step(self, b: Builder, column: Var, before: list[Var], shared: Any, functions: Any, hidden: int) -> list[Var]:
        """z, r = f(…), n = g(x·Wᵀ + (r∘h)·Rᵀ + b), h' = (1 - z)∘n + z∘h"""
        h = before[0]
        rg, rh, rb = (None if v is None else b.var(v.value) for v in shared)
        xg, xh = b.emit("Split", column, [2 * hidden, hidden], axis=1, outputs=2)
        both = functions[0](self.clipped(xg + b.MatMul(h, rg)))
        z, r = b.emit("Split", both, [hidden, hidden], axis=1, outputs=2)
        if self.attr("linear_before_reset"):
            inside = b.MatMul(h, rh)
            n = functions[1](self.clipped(xh + r * (inside if rb is None else inside + rb)))
        else:
            n = functions[1](self.clipped(xh + b.MatMul(r * h, rh)))
        return [n + z * (h - n)]


class _Lstm(_Layer):
    activations = ("Sigmoid", "Tanh", "Tanh")
    states = ("h", "c")

    def shared(self, d: int, rt: Var, rb: Var | None, hidden: int) -> Any:
        del rb
        p = self.part("P", d)
        holes = [] if p is None else list(self.b.emit("Split", p, [hidden] * 3, axis=0, outputs=3))
        return [rt, *holes]

    def step(self, b: Builder, column: Var, before: list[Var], shared: Any, functions: Any, hidden: int) -> list[Var]:
        """i, o, f = s(…), c' = f∘c + i∘t(…), h' = o∘t(c'); with P, the gates see c as well"""
        h, c = before
        rt, *holes = (b.var(v.value) for v in shared)
        total = column + b.MatMul(h, rt)
        if not holes and not self.attr("input_forget"):  # three gates in one
            gates, n = b.emit("Split", total, [3 * hidden, hidden], axis=1, outputs=2)
            i, o, f = b.emit("Split", functions[0](self.clipped(gates)), [hidden] * 3, axis=1, outputs=3)
            after = f * c + i * functions[1](self.clipped(n))
            return [o * functions[2](after), after]
        i, o, f, n = b.emit("Split", total, [hidden] * 4, axis=1, outputs=4)
        if holes:
            i, f = i + holes[0] * c, f + holes[2] * c
        i = functions[0](self.clipped(i))
        f = 1 - i if self.attr("input_forget") else functions[0](self.clipped(f))
        after = f * c + i * functions[1](self.clipped(n))
        if holes:
            o = o + holes[1] * after
        o = functions[0](self.clipped(o))
        return [o * functions[2](after), after]


@lowering("RNN")
def rnn(b: Builder, node: ir.Node, *operands: Var | None) -> Sequence[Var | None]:
    """hₜ = f(xₜ·Wᵀ + hₜ₋₁·Rᵀ + b)"""
    return _Rnn(b, node, *operands).write()


@lowering("GRU")
def gru(b: Builder, node: ir.Node, *operands: Var | None) -> Sequence[Var | None]:
    """The gated recurrent unit, with the reset before or after the product"""
    return _Gru(b, node, *operands).write()


@lowering("LSTM")
def lstm(b: Builder, node: ir.Node, *operands: Var | None) -> Sequence[Var | None]:
    """The long short-term memory, peepholes and coupled gates included"""
    return _Lstm(b, node, *operands).write()
