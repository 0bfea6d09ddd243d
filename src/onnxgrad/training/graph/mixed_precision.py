"""Mixed precision: products in 16 bits, weights and everything else in float32, and a loss that is scaled.

- Operators that spend their time on products (`PRODUCTS`) take 16-bit operands where the provider has a kernel for
  that; operators that only move numbers (`FOLLOWING`) stay in 16 bits between them. All others take float32: softmax,
  normalization, losses, exponentials, sums. Every change of type is a Cast, whose derivative is one, so the way back of
  a product is one in 16 bits; weights and their gradients are float32.
- The loss is multiplied by ``loss_scale`` before it is differentiated, gradients are divided by it, so that small ones
  are not lost in float16 (Micikevicius et al. 2018, arXiv:1710.03740).
- Where a gradient is not finite, no state moves, and the scale is halved; after `growth` steps without such a one it is
  doubled. All this is in the graph: the host need not look.
- Of a batch in parts, running statistics move before all gradients are known: with every part whose own are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import ancestors, dependents, named_values
from onnxgrad.ir.match import is_standard, not_none
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.transforms.gradient_node import is_gradient

FLOAT = ir.DataType.FLOAT
#: State of a step: the loss scale, and the number of steps since its last change.
SCALE, GOOD = "loss_scale", "good_steps"

#: The scale grows no further, also where gradients are 0: half of infinity would be infinite.
_MOST = 2.0**126

#: Operators that are worth 16 bits.
PRODUCTS = frozenset(["MatMul", "Gemm", "Conv", "ConvTranspose"])
#: Operators, besides those that select elements, that stay in 16 bits between such operators: they round little.
FOLLOWING = frozenset(["Relu", "LeakyRelu", "MaxPool"])

#: Names of `precision`, with their types.
NAMES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Precision:
    """The settings of a step that computes in 16 bits.

    Attributes:
        dtype: FLOAT16 or BFLOAT16.
        runs: returns True if a node may take operands of that type.
        scale: the first loss scale.
        growth: after so many good steps the scale is doubled; 0: never.
        in_parts: the step is to be cut at its gradients (see `split_step`).
    """

    dtype: ir.DataType
    runs: Callable[[ir.Node], bool]
    scale: float
    growth: int = 2000
    in_parts: bool = False

    @classmethod
    def named(cls, name: str, runs: Callable[[ir.Node], bool]) -> Precision:
        """The precision called `name`: "fp16" starts from a loss scale of 2¹⁶, "bf16" has no loss scale.

        bfloat16 has the range of float32.
        """
        if name not in NAMES:
            raise BadInput(f"precision is fp32, {' or '.join(NAMES)}, not {name!r}")
        return cls(NAMES[name], runs, 2.0**16, 2000) if name == "fp16" else cls(NAMES[name], runs, 1.0, 0)

    def apply(self, graph: ir.Graph, bound: dict[str, str], taken: Iterable[str]) -> dict[str, tuple[str, np.ndarray]]:
        """Rewrite `graph`, in which Gradients are bound, in place.

        Args:
            graph: the executed graph of a training entry, typed.
            bound: what is the next value of each state; the values of these names become others.
            taken: names that new inputs must not have.

        Returns:
            Further state, by the names of new graph inputs: the name of its next value, and the first value.
        """
        gradients = [n for n in graph if is_gradient(n)]
        if len(gradients) != 1:
            raise BadInput(f"mixed precision takes a training entry with one Gradient; there are {len(gradients)}")
        for name in (SCALE, GOOD):
            if name in set(taken) or name in named_values(graph):
                raise BadInput(f"mixed precision keeps a state {name!r}, and the model has a value of that name")
        (gradient,) = gradients
        b = Builder(graph)
        loss = not_none(gradient.inputs[-1])
        self._narrow(b, ancestors([n for n in graph if is_standard(n)], [loss]))
        loss = not_none(gradient.inputs[-1])
        scale, good = (
            ir.Value(name=n, type=ir.TensorType(t), shape=ir.Shape([]))
            for n, t in ((SCALE, FLOAT), (GOOD, ir.DataType.INT64))
        )
        graph.inputs.extend([scale, good])
        scaled = _insert_before(b, gradient, lambda: b.var(loss) * b.cast_like(b.var(scale), b.var(loss)))
        gradient.replace_input_with(len(gradient.inputs) - 1, scaled.value)
        lost = None
        for value in [v for v in gradient.outputs if v.uses()]:
            whole = b.var(value) / b.cast_like(b.var(scale), b.var(value))
            wrong = _is_lost(b, whole)
            _take_over(value, whole.value, besides=gradient)
            lost = wrong if lost is None else b.Or(lost, wrong)
        assert lost is not None
        graph.sort()
        values, behind = named_values(graph), dependents(graph, gradient.outputs)
        for name, following in bound.items():
            new = values[following]
            early = self.in_parts and new not in behind and new.dtype in FLOATS
            kept = b.Where(_is_lost(b, b.var(new)) if early else lost, b.var(values[name]), b.var(new))
            kept.value.type, kept.value.shape = values[name].type, values[name].shape
            bound[name] = kept.value.name = b.names.exactly(f"{following}_or_kept")
        after = b.Add(b.var(good), b.const(np.int64(1)))
        grown, ready = b.var(scale), None
        if self.growth:
            ready = b.GreaterOrEqual(after, b.const(np.int64(self.growth)))
            grown = b.Where(ready, b.Min(b.var(scale) * 2.0, _MOST), b.var(scale))
        following_scale = b.Where(lost, b.var(scale) * 0.5, grown) if self.growth else b.Identity(b.var(scale))
        none = b.const(np.int64(0))
        following_good = b.Where(lost, none, after if ready is None else b.Where(ready, none, after))
        ends = {SCALE: (following_scale, np.float32(self.scale)), GOOD: (following_good, np.int64(0))}
        graph.sort()
        for name, (end, _) in ends.items():
            end.value.name = b.names.exactly(f"{name}_next")
            graph.outputs.append(end.value)
        return {name: (end.name, np.asarray(start)) for name, (end, start) in ends.items()}

    def _narrow(self, b: Builder, nodes: list[ir.Node]) -> None:
        """Run the supported ones of `nodes` with operands of 16 bits, between Casts."""
        wide: dict[ir.Value, ir.Value] = {}  # float32 results of Casts, with their operands
        cast: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            floats = [i for i, v in enumerate(node.inputs) if v is not None and v.dtype == FLOAT]
            narrow = node.op_type in FOLLOWING or traits_of(node).moves_at_most(Moves.SELECTION)
            follows = narrow and bool(floats) and node.inputs[0] in wide
            if not floats or not (node.op_type in PRODUCTS or follows) or len(node.outputs) != 1:
                continue
            if node.outputs[0].dtype != FLOAT or not self.runs(node):
                continue
            for i in floats:
                value = not_none(node.inputs[i])
                if value not in cast:
                    source = wide.get(value)
                    if source is None:
                        source = _insert_before(b, node, lambda v=value: b.Cast(b.var(v), to=int(self.dtype))).value  # type: ignore[misc]
                    cast[value] = source
                node.replace_input_with(i, cast[value])
            (out,) = node.outputs
            out.type = ir.TensorType(self.dtype)
            back = b.Cast(b.var(out), to=int(FLOAT)).value
            back.shape = out.shape
            _take_over(out, back, besides=back.producer())
            wide[back] = out
        b.graph.sort()


def _is_lost(b: Builder, x: Var) -> Var:
    """True if some element of `x` is not finite."""
    return b.IsNaN(b.ReduceSum(x - x, keepdims=0))


def _insert_before(b: Builder, node: ir.Node, write: Callable[[], Var]) -> Var:
    """Emit `write` before `node`."""
    with b.record() as made:
        result = write()
    b.graph.remove(made)
    b.graph.insert_before(node, made)
    return result


def _take_over(old: ir.Value, new: ir.Value, besides: ir.Node | None) -> None:
    """Replace `old` by `new`, under its name, in all readers except `besides` and the producers of `new`."""
    own = {besides, new.producer()}
    for user, i in tuple(old.uses()):
        if user not in own:
            user.replace_input_with(i, new)
    graph = new.producer().graph if new.producer() is not None else None  # type: ignore[union-attr]
    if isinstance(graph, ir.Graph):
        for i, end in enumerate(graph.outputs):
            if end is old:
                graph.outputs[i] = new
    name = old.name
    old.name = new.name
    new.name = name
