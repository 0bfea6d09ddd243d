"""Simulated ranks train the same model: where its bytes and what is asked are the same, one derives it for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import onnx
import pytest

from onnxgrad.training.loop import trainer
from onnxgrad.training.loop.recipe import Recipe
from onnxgrad.training.loop.trainer_setup import Setup, set_up
from onnxgrad.training.parallel.joining import ranks_of
from onnxgrad.training.parallel.strategy import choose_strategy
from tests.distributed.simulated import Simulated


@pytest.fixture(autouse=True, scope="module")
def derived_once() -> Iterator[None]:
    made: dict[Any, Setup] = {}

    def shared(model: Any, recipe: Recipe, batch_size: int | None) -> Setup:
        processes = recipe.processes
        if not isinstance(model, onnx.ModelProto) or not isinstance(processes.distributed, Simulated):
            return set_up(model, recipe, batch_size)
        alike = replace(recipe, processes=replace(processes, distributed=None))
        key = model.SerializeToString(deterministic=True), repr((alike, batch_size)), processes.distributed.size
        if key not in made or "0x" in key[1]:  # an address tells nothing about what is there
            made[key] = set_up(model, recipe, batch_size)
            return made[key]
        return replace(made[key], strategy=choose_strategy(ranks_of(processes.distributed), processes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "set_up", shared)
        yield
