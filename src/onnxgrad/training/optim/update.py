"""From gradients to the next weights: groups of parameters, clipping, the optimizer, averages.

Values that tensors share (rates, corrections, the norm of all gradients) are scalars computed once: a builder reuses
what it has emitted. Parameters of one group and type that an operator of the training domain updates share one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import HALF, not_none
from onnxgrad.training.optim.config import Optimizer
from onnxgrad.training.optim.formulas import Formula
from onnxgrad.training.optim.optimizers import OPTIMIZERS, OperatorNode, Settings, completed_settings
from onnxgrad.transforms.gradient_node import DOMAIN

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


class State:
    """The storage of values that an algorithm updates, provided by `attach`.

    Attributes:
        held: makes an initializer: ``held(name, array, dtype, fed=False)``.
        bind: makes a value the next one of an initializer.
    """

    def __init__(self, builder: Builder, held: Callable[..., Var], bind: Callable[[ir.Value, Var], None]) -> None:
        self.builder, self.held, self.bind = builder, held, bind
        self._count: tuple[Var, Var] | None = None

    def count(self) -> tuple[Var, Var]:
        """The numbers of steps without and with this one."""
        if self._count is None:
            finished = self.held("steps", np.array(0), ir.DataType.INT64)
            present = self.builder.Add(finished, self.builder.const(np.int64(1)))
            self.bind(finished.value, present)
            self._count = finished, present
        return self._count


class Update:
    """The update of all parameters, written into a graph."""

    def __init__(self, optimizer: Optimizer, state: State) -> None:
        self.optimizer, self.state, self.b = optimizer, state, state.builder
        self.norm: Var | None = None
        #: weights of 16 bits, by the float32 ones that are updated in their place
        self._halves: dict[ir.Value, ir.Value] = {}

    def write(
        self,
        parameters: Sequence[ir.Value],
        gradients: Sequence[Var],
        owners: Mapping[str, int | None],
        norm: bool = False,
    ) -> None:
        """Bind the next value of every parameter and of all state; `norm`: also compute that of all gradients."""
        gradients = self._clipped(list(gradients), norm)
        schedule = self.optimizer.schedule
        factor = None if schedule is None else schedule.write(self.b, self.state.count()[0])
        for k in (None, *range(len(self.optimizer.groups))):
            chosen = [self._wide(x, g) for x, g in zip(parameters, gradients) if owners[x.name or ""] == k]
            if chosen:
                own = {} if k is None else self.optimizer.groups[k].settings
                settings = completed_settings(self.optimizer.name, {**self.optimizer.settings, **own})
                self._group(settings, self._rate(settings, factor), *map(list, zip(*chosen)))

    def _wide(self, x: ir.Value, g: Var) -> tuple[ir.Value, Var]:
        """A 16-bit weight as float32, which the state stores in addition, and its gradient likewise.

        A step may be smaller than the resolution of 16 bits; many such steps would have no effect.
        """
        if x.dtype not in HALF:
            return x, g
        held = self.state.held(f"{x.name}_master", not_none(x.const_value).numpy().astype(np.float32), FLOAT)
        self._halves[held.value] = x
        return held.value, self.b.Cast(g, to=int(FLOAT))

    def _rate(self, settings: Settings, factor: Var | None) -> Var:
        """The learning rate of a group: fed, and scaled by the schedule."""
        rate = self.state.held("learning_rate", np.array(settings["learning_rate"]), FLOAT, fed=True)
        if factor is None:
            return rate
        return self.b.Cast(self.b.Cast(rate, to=int(DOUBLE)) * factor, to=int(FLOAT))

    # --- clipping ------------------------------------------------------------------------------

    def _clipped(self, gradients: list[Var], norm: bool) -> list[Var]:
        """Elements first, then the norm: min(1, c/(‖all G‖ + 10⁻⁶))·G, as PyTorch has it."""
        b = self.b
        if self.optimizer.clip_value is not None:
            bound = float(self.optimizer.clip_value)
            gradients = [b.Clip(g, -bound, bound) for g in gradients]
        if self.optimizer.clip_norm is not None or norm:
            wide = [b.Cast(g, to=int(FLOAT)) if g.dtype != FLOAT else g for g in gradients]
            squares = [b.ReduceSumSquare(g, keepdims=0) for g in wide]
            self.norm = b.Sqrt(squares[0] if len(squares) == 1 else b.Sum(*squares))
        if self.optimizer.clip_norm is not None:
            factor = b.Min(b.Div(float(self.optimizer.clip_norm), b.Add(not_none(self.norm), 1e-6)), 1.0)
            gradients = [g * b.cast_like(factor, g) for g in gradients]
        return gradients

    # --- the optimizer -------------------------------------------------------------------------

    def _group(self, settings: Settings, rate: Var, xs: list[ir.Value], gs: list[Var]) -> None:
        rule = OPTIMIZERS[self.optimizer.name]
        operator = rule.operator(settings)
        self._kept: dict[str, Var] = {}
        if operator is None:
            for x, g in zip(xs, gs):
                self._formula(settings, rate, Var(self.b, x), g)
            return
        for dtype in dict.fromkeys(x.dtype for x in xs):
            chosen = [(Var(self.b, x), g) for x, g in zip(xs, gs) if x.dtype == dtype]
            self._operator(operator, settings, rate, *map(list, zip(*chosen)))

    def _states(self, settings: Settings, x: Var, dtype: ir.DataType) -> list[Var]:
        shape = tuple(int(d) for d in x.shape or ())  # type: ignore[arg-type]
        wanted = OPTIMIZERS[self.optimizer.name].states(settings, shape)
        name = self._halves.get(x.value, x.value).name
        return [
            self.state.held(f"{name}_{suffix}", np.zeros(dims, dtype.numpy()), dtype) for suffix, dims in wanted.items()
        ]

    def _operator(self, operator: OperatorNode, settings: Settings, rate: Var, xs: list[Var], gs: list[Var]) -> None:
        b = self.b
        count = self.state.count()[1 if operator.present else 0]
        per_tensor = [self._states(settings, x, x.dtype or FLOAT) for x in xs]
        states = [list(group) for group in zip(*per_tensor)]
        old = xs
        if operator.shrinks:
            shrink = b.Sub(1.0, b.Mul(b.cast_like(rate, xs[0]), settings["weight_decay"]))
            xs = [x * shrink for x in xs]
        outputs = b.emit(
            operator.type, rate, count, *xs, *gs, *(s for group in states for s in group),
            domain=DOMAIN, outputs=len(xs) * (1 + len(states)), **operator.attributes,
        )  # fmt: skip
        held = [x for group in (old, *states) for x in group]
        for out, like in zip(outputs, held):
            out.value.type, out.value.shape = like.value.type, like.value.shape
        for k, out in enumerate(outputs):
            self._bind(held[k], out, average=k < len(xs))

    def _formula(self, settings: Settings, rate: Var, x: Var, g: Var) -> None:
        """Update one tensor by the formula."""
        b, dtype = self.b, x.dtype or FLOAT
        o = Formula(b, settings, rate, lambda: self.state.count()[1], dtype, self._keep)
        states = self._states(settings, x, dtype)
        new = OPTIMIZERS[self.optimizer.name].update(o, x, g, *states)
        self._bind(x, new[0], average=True)
        for old, value in zip(states, new[1:], strict=True):
            self._bind(old, value)

    def _keep(self, name: str, initial: float, following: Callable[[Var], Var]) -> Var:
        """A double that all tensors of a group share: its next value, made and bound once."""
        if name not in self._kept:
            held = self.state.held(name, np.array(initial), DOUBLE)
            self._kept[name] = following(held)
            self.state.bind(held.value, self._kept[name])
        return self._kept[name]

    # --- after the update ----------------------------------------------------------------------

    def _bind(self, old: Var, new: Var, average: bool = False) -> None:
        """The next value of `old`; of a parameter also the average: share·old + (1 - share)·new."""
        weight = self._halves.get(old.value, old.value)
        if weight is not old.value:
            self.state.bind(weight, self.b.Cast(new, to=int(weight.dtype or FLOAT)))
        if average and (self.optimizer.ema is not None or self.optimizer.swa is not None):
            start = not_none(old.value.const_value).numpy()
            held = self.state.held(f"{weight.name}_average", start, new.dtype or FLOAT, average=weight.name)
            kept = self.b.cast_like(self._kept_share(), new)
            self.state.bind(held.value, held * kept + new * self.b.Sub(1.0, kept))
        self.state.bind(old.value, new)

    def _kept_share(self) -> Var:
        """The share that this step keeps of an average: `ema`, at first 0; or with `swa`, n/(n + 1) of n weights.

        Up to the first weight that counts, the average is a copy; a step whose weights do not count keeps all of it.
        """
        b, (finished, present) = self.b, self.state.count()
        start, every = self.optimizer.swa, self.optimizer.swa_every
        if start is None:
            return b.Where(b.Equal(finished, b.const(np.int64(0))), b.const(0.0, DOUBLE), self.optimizer.ema)
        since = present - start
        counted = b.Cast(b.Div(since, b.const(np.int64(every))), to=int(DOUBLE))
        share = counted / (counted + 1.0)
        if every > 1:
            share = b.Where(b.Equal(b.Mod(since, b.const(np.int64(every))), b.const(np.int64(0))), share, 1.0)
        return b.Where(b.LessOrEqual(since, b.const(np.int64(0))), b.const(0.0, DOUBLE), share)
