"""The peak memory of the results of a step, as ONNX Runtime profiles it.

The runtime profiles one step, and records for every node the bytes that its arena has allocated and not freed. State,
batches and results are outside of the arena.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.runtime.options import Options
from onnxgrad.runtime.protocol import StepGraph
from onnxgrad.runtime.resident import StepRunner


def measured_peak(step: StepGraph, batch: Mapping[str, np.ndarray], options: Options | None = None) -> int:
    """The peak of bytes that the results of nodes of `step` use, in a step on `batch`.

    Workspace that a kernel frees before it ends does not count, nor does fragmentation of the arena: the memory of a
    process grows by up to a quarter more.

    Raises:
        BadInput: the runtime refuses the step or the batch, or has no arena.
    """
    options = options or Options()
    with tempfile.TemporaryDirectory(prefix="onnxgrad-") as folder:
        runner = StepRunner(step, options=dataclasses.replace(options, profile=str(Path(folder, "step"))))
        runner.step(batch)
        events = json.loads(Path(runner.session.end_profiling()).read_text())
    amounts = [e.get("args", {}).get("mem_bytes_requested_in_use") for e in events]
    asked = [int(n) for n in amounts if n is not None]
    if not asked:
        raise BadInput("this ONNX Runtime does not report the memory in use: it has no arena")
    return max(asked)
