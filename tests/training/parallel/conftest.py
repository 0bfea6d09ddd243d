"""Simulated ranks train the same model: where its bytes and what is asked are the same, one derives it for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import onnx
import pytest

from onnxgrad.distributed.simulated import Simulated
from onnxgrad.training.loop import trainer
from onnxgrad.training.loop.trainer_setup import Setup, set_up
from onnxgrad.training.parallel.joining import ranks_of


@pytest.fixture(autouse=True, scope="module")
def derived_once() -> Iterator[None]:
    made: dict[Any, Setup] = {}

    def shared(model: Any, asked: dict[str, Any], *, distributed: Any, **how: Any) -> Setup:
        if not isinstance(model, onnx.ModelProto) or not isinstance(distributed, Simulated):
            return set_up(model, asked, distributed=distributed, **how)
        key = model.SerializeToString(deterministic=True), repr((asked, how)), distributed.size
        if key not in made or "0x" in key[1]:  # an address tells nothing about what is there
            made[key] = set_up(model, asked, distributed=distributed, **how)
            return made[key]
        one, ranks = made[key], ranks_of(distributed)
        assert isinstance(one.run_by, partial)
        own = [ranks if one.ranks is not None and a is one.ranks else a for a in one.run_by.args]
        return replace(one, ranks=ranks, run_by=partial(one.run_by.func, *own))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "set_up", shared)
        yield
