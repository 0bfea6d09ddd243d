"""Every ONNX operator by name: ``op.Conv(x, w, strides=[2, 2])``.

Operands are arrays, numbers (in the dtype of the neighbouring array), lists of ints (axes, shapes and bounds, static)
or None for an omitted optional one. Attributes are keywords; ``outputs=2`` asks for two outputs. Common elementwise
operators of floats run on numpy. All others run in an ONNX Runtime session, cached by operator, attributes and dtypes,
or on onnx's reference evaluator where ONNX Runtime lacks the kernel (Conv of float64, say; it is slow: use float32).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.cache import Cache
from onnxgrad.eager.core.executable import Executable, model_of
from onnxgrad.eager.core.plans import formal, new_builder
from onnxgrad.eager.core.primitives import OPSET, Primitive, VersionedOp
from onnxgrad.eager.core.recording import record, record_several
from onnxgrad.eager.xp.dtypes import cast
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.schemas import schema_of
from onnxgrad.ir.subgraphs import give

#: Operators that numpy computes for floats.
KERNELS: dict[str, Callable[..., np.ndarray]] = {
    "Abs": np.abs, "Add": np.add, "Ceil": np.ceil, "Cos": np.cos, "Cosh": np.cosh, "Div": np.divide, "Equal": np.equal,
    "Exp": np.exp, "Floor": np.floor, "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Less": np.less,
    "LessOrEqual": np.less_equal, "Log": np.log, "MatMul": np.matmul, "Mul": np.multiply, "Neg": np.negative,
    "Reciprocal": np.reciprocal, "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh, "Sqrt": np.sqrt, "Sub": np.subtract,
    "Tan": np.tan, "Tanh": np.tanh,
}  # fmt: skip
#: In float64, for which ONNX Runtime has no kernel and the reference evaluator is exact to 3e-8 only.
KERNELS["Erf"] = lambda x: np.asarray(np.vectorize(math.erf, otypes=[x.dtype])(x)).astype(x.dtype)
_runs = Cache(1024)


def apply(
    op_type: str, *inputs: Any, domain: str = "", outputs: int = 1, opset: int | None = None, **attributes: Any
) -> Any:
    """Apply one ONNX operator; returns an array, or a tuple of `outputs` arrays.

    Args:
        op_type: its name.
        inputs: its operands.
        domain: its domain.
        outputs: the number of outputs.
        opset: the version of the domain. Default: 21, or the first that has the operator; 1 in domains other than
            ONNX's own.
        attributes: its attributes.

    Raises:
        UnknownName: ONNX has no such operator.
        BadInput: the operator fails on these operands or attributes.
    """
    dtypes = [x.dtype for x in inputs if isinstance(x, (Array, np.ndarray, np.generic)) and x.dtype != bool]
    beside = next((d for d in dtypes if d.kind not in "biu"), dtypes[0] if dtypes else None)
    statics: list[tuple[int, Any]] = []
    arrays: list[Array] = []
    for i, x in enumerate(inputs):
        if x is None:
            statics.append((i, None))
        elif isinstance(x, (list, tuple)) and all(isinstance(n, int) for n in x):
            statics.append((i, tuple(x)))
        elif isinstance(x, int) and not isinstance(x, bool) and _asks_for_shape(op_type, i):
            statics.append((i, x))
        elif _is_static(op_type, i, x):
            statics.append((i, tuple(x.tolist()) if x.ndim else int(x)))
        else:
            number = isinstance(x, (int, float)) and not isinstance(x, bool) and beside is not None
            arrays.append(cast(as_array(x, beside), beside) if number else as_array(x))
    opset = opset or (1 if domain else version_of(op_type))
    settings = sorted((k, v) for k, v in attributes.items() if v is not None)
    held = tuple((k, _attribute(domain, op_type, opset, k, v)) for k, v in settings)
    op = _operator(op_type, held, tuple(statics), domain, outputs, opset)
    kernel = None if domain or statics or held else KERNELS.get(op_type)
    floats = beside is not None and beside.kind == "f" and all(x._data.dtype == beside for x in arrays)
    if kernel is not None and floats:
        return record(op, arrays, kernel(*(x._data for x in arrays)))
    made = record_several(op, arrays, run(op, [x._data for x in arrays]))
    return made[0] if outputs == 1 else made


def _attribute(domain: str, op_type: str, opset: int, name: str, value: Any) -> Any:
    """`value` in hashable form; an int becomes a float for a float attribute."""
    schema = schema_of(domain, op_type, opset)
    spec = None if schema is None else schema.attributes.get(name)
    if isinstance(value, (list, tuple)):
        floats = spec is not None and spec.type == onnx.defs.OpSchema.AttrType.FLOATS
        return tuple(map(float, value)) if floats else tuple(value)
    return float(value) if spec is not None and spec.type == onnx.defs.OpSchema.AttrType.FLOAT else value


def _is_static(op_type: str, i: int, x: Any) -> bool:
    """True if operand `i` is static: constant axes, a shape, bounds."""
    if isinstance(x, Array) and (x._node is not None or not _asks_for_shape(op_type, i)):
        return False
    return isinstance(x, (Array, np.ndarray)) and x.dtype == np.int64 and x.ndim < 2 and x.size < 32


@functools.cache
def _asks_for_shape(op_type: str, i: int) -> bool:
    schema = schema_of("", op_type, version_of(op_type)) if op_type in names() else None
    if schema is None or i >= len(schema.inputs):
        return False
    return schema.inputs[i].type_str == "tensor(int64)" or (op_type, i > 0) in (("Slice", True), ("CumSum", True))


@functools.lru_cache(4096)
def _operator(*key: Any) -> VersionedOp:
    op_type, attributes, _, domain, _, opset = key
    schema = schema_of(domain, op_type, opset)
    unknown = [name for name, _ in attributes if schema is not None and name not in schema.attributes]
    if unknown:
        raise UnknownName(unknown[0], schema.attributes if schema else (), f"attribute of {op_type}")
    return VersionedOp(*key)


@functools.cache
def names() -> dict[str, int]:
    """The ONNX operators, each with the opset that introduced it."""
    first: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            first[schema.name] = min(schema.since_version, first.get(schema.name, schema.since_version))
    return first


def version_of(op_type: str) -> int:
    """The default opset of an operator: 21, or the first that has it."""
    if op_type not in names():
        raise UnknownName(op_type, names(), "operator")
    return max(OPSET, names()[op_type])


def run(op: Primitive, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of `op` on `values`, by a session cached for their dtypes and ranks."""
    key = (op, tuple((v.dtype.num, v.ndim) for v in values))

    def make() -> Executable:
        b = new_builder([op])
        operands = [formal(b, v, "x", [f"n{i}_{k}" for k in range(v.ndim)]) for i, v in enumerate(values)]
        made = op.write(b, operands)
        results = made if isinstance(made, tuple) else (made,)
        if any(y.value.type is None for y in results):
            raise BadInput(f"{op} does not take {', '.join(str(v.dtype) for v in values)}")
        give(b, results)
        return Executable(model_of(b.graph))

    return _runs.get(key, make)(values)


def __getattr__(op_type: str) -> Callable[..., Any]:
    if not op_type[:1].isupper():
        raise AttributeError(op_type)
    if op_type not in names():
        raise AttributeError(f"ONNX has no operator {op_type!r}")
    return functools.partial(apply, op_type)
