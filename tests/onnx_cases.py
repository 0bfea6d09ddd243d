"""The node tests of the onnx package, made in a fifth of the time.

They are made when their modules are imported, in every worker: most of that time goes to three pools with a hundred
thousand windows in plain Python, and some to reading their sources, for the documentation of the onnx package.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx.backend.test.case import base
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase
from onnx.reference.ops import op_pool_common

_in_python = op_pool_common.pool


def pool(
    padded: np.ndarray, x_shape: Any, kernel: Any, strides: Any, out_shape: Any, kind: str, *rest: Any, **named: Any
) -> Any:
    """The result of `op_pool_common.pool`; windows of stride 1 without padding are computed all at once."""
    if rest or set(named) - {"p"} or any(s != 1 for s in strides or ()):
        return _in_python(padded, x_shape, kernel, strides, out_shape, kind, *rest, **named)
    axes = tuple(range(-len(kernel), 0))
    windows = sliding_window_view(padded, kernel, axis=axes)
    p = named.get("p", 1)
    match kind:
        case "MAX":
            return windows.max(axes)
        case "AVG":
            return windows.mean(axes)
        case _:
            return (np.sum(np.abs(windows) ** p, axes) ** (1 / p)).astype(padded.dtype)


with (
    warnings.catch_warnings(),
    mock.patch.object(op_pool_common, "pool", pool),
    mock.patch.object(base, "process_snippet", lambda op, name, export: (name, "")),
):
    warnings.simplefilter("ignore")
    NODE_CASES: list[TestCase] = collect_testcases(None)
