"""Parts of a graph that have a name: values that are a known function of others, whatever operators say it.

A derived graph says everything with standard operators. Where an emitter also names what these amount to
(``builder.named("Adam", outputs, of=inputs, beta=0.999)``), a runtime that has a kernel of that name may put it in
their place. The name is a note on the nodes that give the outputs, in memory only: the graph is the same with and
without it, notes follow nodes into copies, and go with them where nodes are pruned. Nobody has to look at them, and
who does must check that they still hold (see `onnxgrad.native.swapping`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

_KEY = "onnxgrad.part"


@dataclass(frozen=True)
class Part:
    """Outputs that are the function `name` of inputs.

    Attributes:
        name: of the function.
        inputs: what it is a function of; None for one that is left out.
        outputs: what it gives; None for one that nobody asked for.
        attributes: numbers, lists of ints and strings that belong to the function.
    """

    name: str
    inputs: Sequence[ir.Value | None]
    outputs: Sequence[ir.Value | None]
    attributes: Mapping[str, Any]


def name_part(part: Part) -> None:
    """Note `part` on the nodes that give its outputs."""
    for value in part.outputs:
        node = None if value is None else value.producer()
        if node is not None:
            node.meta[_KEY] = part


def named_parts(graph: ir.Graph) -> Iterator[Part]:
    """The parts of `graph` (not of graphs inside it) that were named, each once, in order of their first output.

    Their values may be those of the graph that this one is a copy of: names tell which they are here.
    """
    seen: set[int] = set()
    for node in graph:
        part = node.meta.get(_KEY)
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
