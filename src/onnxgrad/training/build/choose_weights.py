"""The choice of the weights that train: those asked for, or those that look like weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.engine.activity import on_path
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import reads
from onnxgrad.training.adapters.record import Record
from onnxgrad.training.graph.exported_constants import INFINITE, Sorted, sort_out
from onnxgrad.training.graph.rounding import is_quantized, is_rounding
from onnxgrad.training.graph.trainable import EVERYTHING, is_pattern, matching, named_weight, without
from onnxgrad.training.graph.training_mode import statistics
from onnxgrad.training.optim.config import Optimizer
from onnxgrad.training.quantization.scales import LearnedScale


@dataclass
class WeightChoice:
    """Chooses the initializers of a model that train.

    Attributes:
        model: the inference model, with the loss behind it.
        nodes: those of the inference graph.
        held: names of its initializers.
        scales: scales of quantizers that can train, by name.
        adapter: the adapter that trains beside frozen weights.
        trainable: names and patterns that are asked for; None: the usual weights.
        freeze: names and patterns of weights that do not train.
        tied: pairs of an output and the table that it reads (see `tie_weights`).
        note: the choice in words, once it is made.
    """

    model: ir.Model
    nodes: Sequence[ir.Node]
    held: Set[str]
    scales: Mapping[str, LearnedScale]
    adapter: Record | None
    trainable: Sequence[str] | None
    freeze: Sequence[str]
    tied: Sequence[tuple[str, str]]
    note: str = ""

    def choose(
        self, builder: Builder, loss: ir.Value, optimizer: Optimizer
    ) -> tuple[list[ir.Value], dict[str, int | None]]:
        """Choose the weights that `loss` depends on. Returns them, and the number of the group of each, by name.

        Raises:
            BadInput: there is nothing to train.
        """
        graph = self.model.graph
        initializers = {n: v for n, v in graph.initializers.items() if n in self.held}
        nodes = list(graph)
        running = statistics(nodes)
        floats = [v for v in initializers.values() if v.dtype in FLOATS]
        reached = {v for node in on_path(nodes, floats, [loss], builder) for v in reads(node)}
        candidates = {v.name or "": v for v in floats if v in reached and v not in running}
        scales = {n: candidates.pop(n) for n in self.scales if n in candidates and not optimizer.takes_loss}
        own = self._factors(candidates)
        asked = self.trainable if self.adapter is None else [*(self.trainable or ()), *self.adapter.also]
        sorted_out = Sorted(own, {})  # frozen weights, which need no classification
        if self.adapter is None or any(is_pattern(text) for text in asked or ()):
            sorted_out = sort_out(candidates, nodes)
        usual = sorted_out.weights
        if asked is None:
            if not usual:
                raise BadInput(
                    "the loss depends on no float initializer that looks like a weight: there is nothing to train"
                    + self._way_out()
                )
            found = usual | scales
        else:
            found = dict(own)
            usual = usual | scales
            for text in dict.fromkeys(asked):
                if text == EVERYTHING and text not in initializers:
                    found |= {n: v for n, v in candidates.items() if sorted_out.constants.get(n) != INFINITE} | scales
                    continue
                for name in matching(text, usual, self.nodes) if is_pattern(text) else [text]:
                    found[name] = named_weight(name, initializers, reached, running)
            if not found:
                raise BadInput("`trainable` is empty: there is nothing to train")
        owners = optimizer.owners(found, self.nodes)
        names = without(owners, self.freeze, found, self.nodes)
        if not names:
            raise BadInput("every weight is frozen: there is nothing to train")
        if self.adapter is not None:
            self.adapter.also = [name for name in names if name not in own]
            self.adapter.write(self.model)
        if asked is not None:
            sorted_out = Sorted(usual, {})
        self.note = sorted_out.describe(names, found)
        for output, table in self.tied:
            self.note += f"; {output!r} is tied to {table!r}, its equal (--untie keeps them apart)"
        if self.adapter is not None:
            size = sum(v.const_value.size for v in floats if v.const_value is not None)
            trained = sum(t.size for n in names if (t := found[n].const_value) is not None)
            self.note += (
                f", {100 * trained / size:.2g} % of all; adapts {len({e.weight for e in self.adapter.entries})} weights"
            )
        return [found[name] for name in names], owners

    def _way_out(self) -> str:
        """A hint for weights that are integers of operators that compute with them."""
        kinds = sorted({n.op_type for n in self.model.graph if is_quantized(n) and not is_rounding(n)})
        if not kinds:
            return ""
        return (
            f"\n  hint: the weights of {', '.join(kinds)} are integers, which do not train; those of models "
            "with QuantizeLinear and DequantizeLinear nodes do"
        )

    def _factors(self, candidates: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """The factors of the adapter that the loss depends on."""
        if self.adapter is None:
            return {}
        own = {n: candidates[n] for n in self.adapter.own if n in candidates}
        if not own:
            raise BadInput("the loss depends on none of the weights that are adapted\n  hint: choose other targets")
        return own
