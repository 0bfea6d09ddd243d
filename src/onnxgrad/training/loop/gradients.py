"""Gradients of a loss with respect to weights, over rows of data, without a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxgrad.runtime import Options, Session
from onnxgrad.training.data import Data, Field
from onnxgrad.training.data.sources import source_name
from onnxgrad.training.spec.training_info import Source
from onnxgrad.training.step.compile import compile_step


def gradients(source: Source, data: Any, rows: int, **preparation: Any) -> Iterator[dict[str, np.ndarray]]:
    """The gradient of each trained weight of `source` by name, batch by batch of the first `rows` of `data`."""
    node = next(n for n in source.infos[0].algorithm.node if n.op_type == "Gradient")
    names = next([x.decode() for x in a.strings] for a in node.attribute if a.name == "xs")
    results = dict(zip(names, node.output))
    step = compile_step(source, outputs=list(results.values()))
    inputs = {v.name: v for v in step.model.graph.inputs}
    fed = data
    if not isinstance(data, Data):
        fed = Data(data, [Field.of(inputs[name]) for name in step.batch], source_name(data), **preparation)
    session = Session(step.model, options=Options(target="portable"))
    fixed = {t.input: t.initial.numpy() for t in step.state.values()}
    fixed |= {n: t.numpy() for n, t in {**step.rates, **step.reads}.items()}
    for batch in fed.first_batches(rows):
        found = session.run({**{n: batch[n] for n in step.batch}, **fixed})
        yield {name: found[result] for name, result in results.items()}
