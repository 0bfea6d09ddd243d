"""Gradients of a loss with respect to weights, over rows of data, without a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data import Data, Field, split
from onnxgrad.training.data.sources import source_name
from onnxgrad.training.loop.evaluation import Evaluation
from onnxgrad.training.spec.training_info import Source
from onnxgrad.training.step.compile import compile_step


def gradients(
    source: Source, data: Any, rows: int, held_out: tuple[float, int] | None = None, **preparation: Any
) -> Iterator[dict[str, np.ndarray]]:
    """The gradient of each trained weight of `source` by name, batch by batch of the first `rows` of `data`.

    Those of the share of the data, by a seed, that is `held_out` are left out.
    """
    node = next(n for n in source.infos[0].algorithm.node if n.op_type == "Gradient")
    names = next([x.decode() for x in a.strings] for a in node.attribute if a.name == "xs")
    results = dict(zip(names, node.output))
    step = compile_step(source, outputs=list(results.values()))
    inputs = {v.name: v for v in step.model.graph.inputs}
    fed = data
    if not isinstance(data, Data):
        field: Callable[..., Field] = Field.of
        with contextlib.suppress(BadInput):  # a loss without a value outside of training
            field = Evaluation.of(step).field
        fed = Data(data, [field(inputs[name]) for name in step.batch], source_name(data), **preparation)
    if held_out is not None:
        fed, _ = split(fed, *held_out)
    session = Session(step.model, options=Options(target="portable"))
    fixed = {t.input: t.initial.numpy() for t in step.state.values()}
    fixed |= {n: t.numpy() for n, t in {**step.rates, **step.reads}.items()}
    for batch in fed.first_batches(rows):
        found = session.run({**{n: batch[n] for n in step.batch}, **fixed})
        yield {name: found[result] for name, result in results.items()}
