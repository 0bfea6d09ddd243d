"""The update graph of one rank, cut out of that of all weights: its part of the bucket, its part of the state.

Of a tensor that is split between ranks, each rank updates a vector: its update is elementwise. Sums over the elements
of gradients (see `Units`) come from another graph and are inputs here, since every rank can only compute those of its
part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder
from onnxgrad.ir.graph import named_values, stand_in
from onnxgrad.ir.match import not_none
from onnxgrad.training.parallel.shares import Shares
from onnxgrad.training.step.accumulate import BUCKET, SplitStep
from onnxgrad.training.step.memory_budget import in_good_order
from onnxgrad.training.step.pieces import taking
from onnxgrad.training.step.step import StateTensor, Step, prune_step


@dataclass
class OwnUpdate:
    """The graphs that a rank runs after gradients were added up.

    Attributes:
        update: means of own gradients, and all sums → its part of the state.
        sums: means of own gradients → the sums over what it has of each, as results. None if the update
            reads none, or this rank has no gradient.
        pieces: the names of the inputs that take its gradients, by the names of these; vectors where they are cut.
    """

    update: Step
    sums: Step | None
    pieces: dict[str, str]


def own_update(split: SplitStep, shares: Shares, rank: int) -> OwnUpdate:
    """The part of `rank` in the update of `split`, whose bucket is in the order of `shares`."""
    cut = _Cut(split, shares, rank)
    update, pieces = cut.update()
    return OwnUpdate(update, cut.sums(), pieces)


class _Cut:
    def __init__(self, split: SplitStep, shares: Shares, rank: int) -> None:
        self.split, self.shares, self.rank = split, shares, rank
        self.shapes = shares.shapes(split.pieces, rank)

    def update(self) -> tuple[Step, dict[str, str]]:
        """The update, and the names of its inputs by those of gradients."""
        step = self.split.update
        model = step.model.clone()
        values = named_values(model.graph)
        reads = dict(step.reads)
        for name in self.shares.sums:
            given = stand_in(values[name])
            model.graph.inputs.append(given)
            reads[name] = ir.tensor(np.zeros((), (given.dtype or ir.DataType.FLOAT).numpy()), name=name)
        values = named_values(model.graph)
        state = {n: replace(t, initial=self._initial(n, t)) for n, t in step.state.items() if self._has(n)}
        ends = [values[t.output] for t in state.values()] + [values[name] for name in step.results]
        results = list(step.results)
        if not ends:  # a rank without any part: the runtime takes no graph without an output
            node = ir.Node("", "Constant", [], [ir.AttrFloat32("value_float", 0.0)])
            (nothing,) = Builder(model.graph).append(node)
            ends, results = [nothing.value], [nothing.name]
        return self._taking(replace(step, model=model, state=state, results=results, reads=reads), ends)

    def sums(self) -> Step | None:
        """The sums."""
        step = self.split.update
        names = [name for name, gradient in self.shares.sums.items() if gradient in self.shapes]
        if not names:
            return None
        model = step.model.clone()
        values = named_values(model.graph)
        reads = dict(step.reads) | {n: t.initial for n, t in step.state.items()}
        found = replace(step, model=model, state={}, results=names, reads=reads)
        return self._taking(found, [values[name] for name in names])[0]

    def _has(self, name: str) -> bool:
        low, high = self.shares.part(name, self.rank) if name in self.shares.ends else (0, 1)
        return high > low

    def _initial(self, name: str, tensor: StateTensor) -> ir.TensorProtocol:
        if name not in self.shares.ends:
            return tensor.initial
        low, high = self.shares.part(name, self.rank)
        if high - low == tensor.initial.size:
            return tensor.initial
        return ir.tensor(tensor.initial.numpy().reshape(-1)[low:high], dtype=tensor.initial.dtype, name=name)

    def _taking(self, step: Step, ends: list[ir.Value]) -> tuple[Step, dict[str, str]]:
        """`step`, pruned to `ends`, with gradients as inputs. Returns also their names, by those of gradients."""
        pieces, values = self.split.pieces, named_values(step.model.graph)
        for unit in self.shares.units:
            shape = self.shapes.get(unit.pieces[0])
            if unit.values is not None and shape not in (None, pieces[unit.pieces[0]]):
                for name in unit.values:
                    values[name].shape = ir.Shape(shape)
        step, names = prune_step(step, ends), dict[str, str]()
        if self.shapes:
            step, names = taking(step, self.shapes, not_none(values[BUCKET].dtype))
        in_good_order(step.model)
        return step, names
