"""Holds the VJP of a family's cases to every float type: float16 and float64 on ONNX Runtime, bfloat16 typed.

Wherever ONNX Runtime loads the primal node at a dtype, it must load the VJP at that dtype too, and give
what the reference evaluator gives in float64 for the same (rounded) operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import vjp
from onnxgrad.model_io import signature
from onnxgrad.testing import Case, _array, node_model, reference

TOLERANCE = {np.float16: 1e-2, np.float64: 1e-8}


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def loads(model: onnx.ModelProto) -> bool:
    """True if ONNX Runtime has the kernels that the model needs."""
    try:
        session(model)
    except Exception:
        return False
    return True


def runs(model: onnx.ModelProto, feeds: dict) -> bool:
    """True if ONNX Runtime runs `model`: some kernels load, and then refuse a type."""
    try:
        run = session(model)
        run.run(None, _fed(run, feeds))
    except Exception:
        return False
    return True


def _fed(run: onnxruntime.InferenceSession, feeds: dict) -> dict:
    """`feeds` in the types that the inputs of `run` have."""
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}
    return {i.name: feeds[i.name].astype(types.get(i.type, feeds[i.name].dtype)) for i in run.get_inputs()}


def dtypes(cases: Sequence[Case]) -> Callable[..., None]:
    """The test of a family at the other float types."""

    @pytest.mark.sweep(4)  # not 3, the number of types
    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda d: d.__name__)
    @pytest.mark.parametrize("case", cases, ids=[c.id for c in cases])
    def test_dtype(case: Case, dtype: type, record_property: Callable[[str, object], None]) -> None:
        rng = np.random.default_rng(0)
        feeds = {f"x{i}": _array(x, rng) for i, x in enumerate(case.inputs) if x is not None}
        feeds = {k: v.astype(dtype).astype(np.float64) if v.dtype.kind == "f" else v for k, v in feeds.items()}
        wrt = [n for n, v in feeds.items() if v.dtype.kind == "f"]
        wrt = wrt if case.wrt is None else [f"x{i}" for i in case.wrt]
        exact = node_model(case, feeds)
        floats = {o.name for o in exact.graph.output if o.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE}
        of = sorted(floats if case.of is None else {f"y{i}" for i in case.of})
        try:
            primal = node_model(case, feeds, dtype=dtype)
            onnx.checker.check_model(primal, full_check=True)
        except (AssertionError, onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
            pytest.skip("the operator does not take this type")
        derived = vjp(primal, wrt=wrt, of=of)
        onnx.checker.check_model(derived, full_check=True)
        for value in derived.graph.output:
            if value.name in signature(derived).gradients.values():
                assert value.type.tensor_type.elem_type == onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        if dtype is ml_dtypes.bfloat16:
            record_property("ran", "bfloat16")  # typed and checked: there are no kernels to speak of
        if dtype is ml_dtypes.bfloat16 or not case.runtime or not runs(primal, feeds):
            return

        values = reference(exact, feeds, case.evaluators)
        u = {o: rng.standard_normal(values[o].shape).astype(dtype).astype(np.float64) for o in of}
        precise = vjp(exact, wrt=wrt, of=of)
        seeds = {signature(precise).cotangents[o]: u[o] for o in of}
        want = reference(precise, feeds | seeds, case.evaluators)
        given = feeds | {signature(derived).cotangents[o]: u[o] for o in of}
        run = session(derived)
        names = list(signature(derived).gradients.values())
        for name, got in zip(names, run.run(names, _fed(run, given))):
            exactly = np.asarray(want[name], np.float64)
            scale = max(1.0, float(np.max(np.abs(exactly), initial=0.0)))
            got = np.asarray(got, np.float64)
            np.testing.assert_allclose(got / scale, exactly / scale, rtol=0, atol=TOLERANCE[dtype], err_msg=name)
        record_property("ran", dtype.__name__)

    return test_dtype
