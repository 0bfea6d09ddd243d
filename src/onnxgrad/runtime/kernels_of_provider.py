"""The types that an execution provider has kernels for, as ONNX Runtime lists them."""

from __future__ import annotations

import functools
from collections.abc import Collection

import onnx
import onnx_ir as ir
from onnxruntime.capi import _pybind_state

from onnxgrad.ir.match import normal_domain


@functools.cache
def _kernels(provider: str) -> dict[tuple[str, str], list[tuple[tuple[int, int], dict[str, list[str]]]]]:
    """Versions and type constraints of the kernels of `provider`, by domain and operator."""
    kernels: dict[tuple[str, str], list[tuple[tuple[int, int], dict[str, list[str]]]]] = {}
    for kernel in _pybind_state.get_all_opkernel_def():
        if kernel.provider == provider:
            key = (normal_domain(kernel.domain), kernel.op_name)
            kernels.setdefault(key, []).append((tuple(kernel.version_range), dict(kernel.type_constraints)))
    return kernels


@functools.cache
def takes(provider: str, domain: str, op_type: str, opset: int, dtype: ir.DataType, names: Collection[str]) -> bool:
    """True if `provider` has a kernel of an operator in which all its type variables `names` are `dtype`."""
    wanted = f"tensor({dtype.name.lower()})"
    return any(
        low <= opset <= high and all(wanted in allowed.get(name, [wanted]) for name in names)
        for (low, high), allowed in _kernels(provider).get((domain, op_type), ())
    )


@functools.cache
def _variables(domain: str, op_type: str, opset: int) -> tuple[list[str], list[str], int] | None:
    """The type variables of inputs and outputs of an operator, and the version of it; None if it has no schema."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    return [p.type_str for p in schema.inputs], [p.type_str for p in schema.outputs], schema.since_version


def has_kernel(provider: str, node: ir.Node, opset: int, dtype: ir.DataType) -> bool:
    """True if `provider` runs `node` with its float tensors as tensors of `dtype`.

    Args:
        provider: its full name.
        node: typed; what in it is a float tensor now tells which of its type variables are meant.
        opset: the version of its domain that the model imports.
        dtype: a float type.
    """
    variables = _variables(node.domain, node.op_type, opset)
    if variables is None:
        return False
    inputs, outputs, version = variables
    meant = set()
    for values, formal in ((node.inputs, inputs), (node.outputs, outputs)):
        for i, value in enumerate(values):
            if value is not None and value.dtype is not None and value.dtype.is_floating_point() and formal:
                meant.add(formal[min(i, len(formal) - 1)])
    return takes(provider, node.domain, node.op_type, version, dtype, frozenset(meant))
