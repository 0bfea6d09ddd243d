"""The setting of a session that its passes depend on: target, layout, provider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx_ir as ir

from onnxgrad.ir.builder import Builder
from onnxgrad.ir.execution_order import places
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.names import Names
from onnxgrad.runtime.kernels_of_provider import CPU

#: The oldest opset whose operators passes know: from here on, axes of reductions and of views are operands.
OLDEST = 13


@dataclass
class Setting:
    """The conditions of a session, and notes of passes for later ones.

    Attributes:
        given: the graph as it was before all passes.
        target: "native" or "portable".
        layout: "auto" or "plain".
        level: how much ONNX Runtime optimizes itself; None: what it does by default.
        providers: the names of the execution providers, in order of preference.
        packs: True if ONNX Runtime keeps packed copies of constants.
        has_kernels: True once a named part has become a call of a kernel.
        is_rewritten: True once a rewrite has changed the graph.
        found: the places that a pass has found in a graph before it changes them.
    """

    given: ir.Graph
    target: str = "portable"
    layout: str = "auto"
    providers: Sequence[str] = (CPU,)
    packs: bool = True
    level: str | None = None
    has_kernels: bool = False
    is_rewritten: bool = False
    found: tuple[ir.Graph | None, Any] = (None, None)
    _scope: tuple[Names, Inference] | None = field(default=None, init=False, repr=False)

    def builder(self, graph: ir.Graph, prefix: str) -> Builder:
        """A builder for `graph`, whose nodes get names that begin with `prefix`; all share the names of the model."""
        if self._scope is None:
            self._scope = Names.of_graph(graph), Inference.of(graph, elements=False)
        return Builder(graph, *self._scope, noting=False, prefix=prefix)

    @cached_property
    def places(self) -> dict[str | None, int]:
        """When the values of the graph before all passes are computed."""
        return places(self.given)

    @property
    def on_cpu(self) -> bool:
        """True if the CPU provider comes first."""
        return self.providers[0] == CPU

    def is_elsewhere(self) -> str:
        """The reason to skip passes for operators that the CPU provider lacks; empty if they run."""
        return "" if self.on_cpu else "the CPU provider is not the first one"

    def is_here(self) -> str:
        """The reason to skip passes for operators that only the CPU provider has; empty if they run."""
        return "the CPU provider is the first one" if self.on_cpu else ""

    def keeps_order(self) -> str:
        """The reason to skip all passes for the CPU provider; empty if they run."""
        if reason := self.is_elsewhere():
            return reason
        opset = self.given.opset_imports.get("", OLDEST)
        return "" if opset >= OLDEST else f"the model is of opset {opset}, and passes know those from {OLDEST} on"

    def keeps_layout(self) -> str:
        """The reason to skip rewrites of standard operators; empty if they run."""
        return self.keeps_order() or ("" if self.layout == "auto" else f"layout is {self.layout!r}")

    def keeps_functions(self) -> str:
        """The reason to skip rewrites of functions that kernels in C compute; empty if they run."""
        return self.keeps_layout() or ("" if self.target == "portable" else "kernels have them")

    def keeps_operators(self) -> str:
        """The reason to skip kernels in C; empty if they run."""
        return self.keeps_order() or ("" if self.target == "native" else f"target is {self.target!r}")

    def lacks_kernels(self) -> str:
        """The reason to skip passes that belong to kernels of named parts; empty if they run."""
        return self.keeps_operators() or ("" if self.has_kernels else "no named part has a kernel")
