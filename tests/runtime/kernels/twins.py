"""One graph on both targets: kernels in C against the operators that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad.ir import Builder, Var
from onnxgrad.runtime import Options, Session
from onnxgrad.runtime.kernels import installed
from onnxgrad.runtime.kernels.substitute import DOMAIN
from tests.runtime.passes import with_kernels

needs_kernels = pytest.mark.skipif(installed().place is None, reason="this installation has no kernels")


def graph_of(
    write: Callable[..., Sequence[Var]], arrays: Mapping[str, np.ndarray], opset: int = 20
) -> tuple[ir.Model, list[str]]:
    """A model with an input for each array; `write(builder, *inputs)` emits it, names its parts, gives the outputs."""
    graph = ir.Graph([], [], nodes=[], name="twins", opset_imports={"": opset})
    b = Builder(graph)
    for name, array in arrays.items():
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        value = ir.Value(name=b.names.exactly(name), type=kind, shape=ir.Shape(array.shape))
        graph.inputs.append(value)
    results = write(b, *(Var(b, v) for v in list(graph.inputs)))
    graph.outputs.extend(v.value for v in results)
    return ir.Model(graph, ir_version=9), [v.name for v in results]


def calls(model: ir.Model) -> list[str]:
    """The kernels that `model` runs with the native target."""
    return [node.op_type for node in with_kernels(model).graph if node.domain == DOMAIN]


def compare(
    write: Callable[..., Sequence[Var]],
    arrays: Mapping[str, np.ndarray],
    kernels: Sequence[str],
    rtol: float = 0.0,
    atol: float = 0.0,
    threads: Sequence[int] = (1, 2),
) -> None:
    """Both targets give the same numbers, NaN and infinities in the same places, and the native one runs `kernels`."""
    model, names = graph_of(write, arrays)
    assert calls(model) == list(kernels)
    expected = Session(model, Options(threads=1, target="portable")).run(arrays)
    for count in threads:
        found = Session(model, Options(threads=count, target="native")).run(arrays)
        for name in names:
            assert found[name].dtype == expected[name].dtype
            np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=atol, err_msg=name)
