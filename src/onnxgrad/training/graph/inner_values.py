"""Values inside a model: runs of its graph that return results of any of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import named_values, prune
from onnxgrad.runtime import Options, Session


def inner_values(
    model: ir.Model,
    names: Iterable[str],
    batches: Iterable[Mapping[str, np.ndarray]],
    options: Options | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """The values of `model` with these `names`, inputs among them, for each of `batches`; nothing else is computed.

    Args:
        model: stays unchanged.
        names: of inputs and of results of nodes.
        batches: inputs by name. Inputs that no value depends on may be missing, and other arrays are not read.
        options: how ONNX Runtime runs the graph.

    Raises:
        BadInput: ONNX Runtime fails.
    """
    names = list(dict.fromkeys(names))
    graph = (copy := model.clone()).graph
    values = named_values(graph)
    graph.outputs[:] = [values[name] for name in names if not values[name].is_graph_input()]
    prune(graph)
    graph.inputs[:] = [v for v in graph.inputs if v.uses()]
    session = Session(copy, options) if graph.outputs else None
    for batch in batches:
        found = {} if session is None else session.run({n: batch[n] for n in session.inputs if n in batch})
        yield {name: found[name] if name in found else batch[name] for name in names}
