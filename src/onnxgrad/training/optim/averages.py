"""Averages of weights: the state that has the average of each weight, and states with averages as weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxgrad.training.metadata import AVERAGE
from onnxgrad.training.spec.training_info import Source


def averages(source: Source) -> dict[str, str]:
    """The name of the average of each weight that has one."""
    return {
        prop.value: tensor.name
        for info in source.infos
        for tensor in info.algorithm.initializer
        for prop in tensor.metadata_props
        if prop.key == AVERAGE
    }


def with_averages(source: Source | None, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`state` with weights replaced by their averages, as far as there are any.

    Before the first step, and without averages, the result is `state` itself.
    """
    found = dict(state)
    for weight, average in ({} if source is None else averages(source)).items():
        if average in state and weight in state:
            found[weight] = state[average].astype(state[weight].dtype, copy=False)
    return found
