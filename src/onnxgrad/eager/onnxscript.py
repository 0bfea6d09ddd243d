"""Differentiating onnxscript functions (needs ``pip install onnxscript``).

::

    from onnxgrad.eager.onnxscript import on_tape

    f = on_tape(my_onnxscript_function)  # takes and returns arrays, and is differentiated like any function
    grad(lambda x: np.sum(f(x)))(x)

onnxscript runs its functions as Python and passes every operator to an evaluator; this one runs and records it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.op import apply
from onnxgrad.errors import BadInput


class TapeEvaluator:
    """An evaluator of onnxscript that records on the tape."""

    def eval_op(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator."""
        attributes = {k: _attribute(op.name, k, v) for k, v in kwargs.items() if v is not None}
        if op.name == "Constant":
            (value,) = attributes.values()
            return Array(numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value))
        inputs = [x if x is None or isinstance(x, (bool, int, float, list)) else _array(x) for x in args]
        outputs = attributes.pop("_outputs", None) or _outputs(op, inputs, attributes)
        domain = op.op_schema.domain
        return apply(op.name, *inputs, domain=domain, outputs=outputs, opset=op.opset.version, **attributes)

    def eval_function(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function: as Python."""
        return function.function(*map(_array, args), **kwargs)


def _array(x: Any) -> Any:
    value = getattr(x, "value", None)  # onnxscript's own tensors
    return Array(value) if isinstance(value, np.ndarray) else x if x is None else as_array(x)


def _attribute(op_type: str, name: str, value: Any) -> Any:
    if callable(value) or type(value).__name__ in ("OnnxClosure", "GraphProto"):
        raise BadInput(
            f"{op_type} with a graph as {name!r} does not run on the tape\n"
            "  hint: write the loop or the branch in Python; in an onnxscript function it runs as Python"
        )
    return _array(value)._data.tolist() if isinstance(value, Array) else value


def _outputs(op: Any, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> int:
    if op.name == "Split":
        return attributes.get("num_outputs") or len(inputs[1])
    if op.name == "BatchNormalization" and not attributes.get("training_mode"):
        return 1
    required = [o for o in op.op_schema.outputs if o.option == onnx.defs.OpSchema.FormalParameterOption.Single]
    return max(1, len(required))


def on_tape(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, an onnxscript function (or a Python function that calls some), recorded on the tape."""
    from onnxscript import evaluator

    @functools.wraps(getattr(f, "function", f))
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with evaluator.default_as(TapeEvaluator()):
            return f(*args, **kwargs)

    return wrapped
