"""Tensors of ONNX Runtime and arrays of numpy that share memory."""

from __future__ import annotations

import ctypes

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from onnxgrad.errors import BadInput
from onnxgrad.runtime.failures import one_line
from onnxgrad.wording import type_text


def ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    """`array` as a tensor of the runtime that shares its memory (also for types that numpy lacks).

    For types of less than eight bits, which the runtime packs into bytes, the value is a copy.
    """
    if array.dtype == object:
        raise BadInput("text cannot be bound to an input of numbers")
    dtype = ir.DataType.from_numpy(array.dtype)
    if dtype.bitwidth < 8:
        packed = np.frombuffer(ir.tensor(array).tobytes(), np.uint8)
        array = np.zeros(array.shape, np.uint8)  # as many bytes as elements: more than the runtime reads
        array.reshape(-1)[: len(packed)] = packed
    try:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(dtype))
    except RuntimeError as error:
        raise BadInput(f"ONNX Runtime takes no tensor of {type_text(array.dtype)}: {one_line(error)}") from error


def array_of(value: onnxruntime.OrtValue) -> np.ndarray:
    """A tensor of the runtime as an array, of a type of ml_dtypes where numpy lacks it."""
    dtype = ir.DataType(value.element_type())
    if dtype.numpy().isbuiltin != 2:  # numpy's own
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    proto = onnx.TensorProto(data_type=int(dtype), dims=value.shape(), raw_data=raw)
    return onnx.numpy_helper.to_array(proto).copy()


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose memory starts on a cache line, as the runtime's own tensors do."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)
