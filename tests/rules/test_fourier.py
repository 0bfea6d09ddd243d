"""Fourier transforms up the ladder: real, complex, half a spectrum and back from it, cut and filled up, in frames."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference.op_run import OpRun

from onnxgrad import NotDifferentiable, vjp
from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes, session
from tests.rules.ladder import ladder


class STFT(OpRun):
    """The reference evaluator's own knows no window that is left out beside a frame length that is given."""

    op_domain = ""

    def _run(self, x, frame_step, window=None, frame_length=None, onesided=1):
        n = int(frame_length) if frame_length is not None else x.shape[1] if window is None else len(window)
        w = np.ones(n) if window is None else window
        z = x[..., 0] + (1j * x[..., 1] if x.shape[2] == 2 else 0)
        starts = range(0, x.shape[1] - n + 1, int(frame_step))
        framed = np.stack([z[:, s : s + n] * w for s in starts], axis=1)
        y = np.fft.fft(framed, axis=-1)[..., : n // 2 + 1 if onesided else n]
        return (np.stack([y.real, y.imag], axis=-1).astype(x.dtype),)


def whole(number: int) -> np.ndarray:
    return np.array(number, np.int64)


def real_to_half(n: int, **more) -> Case:
    return Case("DFT", [(2, n, 1), None, whole(1)], {"onesided": 1}, opset=20, symbolic=OUTER, note="half", **more)


#: whether an operand is real, and where its numbers lie, is known in practice: the last dimension stays a number
OUTER = {0: (0, 1)}
FRAMES = {"evaluators": [STFT]}
BACK = {"onesided": 1, "inverse": 1}
HALF = {"onesided": 1}  # the default; but the inference of the onnx package takes that to be 0
#: where half a spectrum is cut or filled up on the way back, the kernel of ONNX Runtime is wrong
CUT = {"runtime": False}


def _is_exact(case: Case) -> bool:
    """True without F⁻¹, or if N is a power of two: else that of ONNX Runtime is exact to float32 only."""
    if not case.attrs.get("inverse"):
        return True
    x, *lengths = case.inputs
    axis = case.attrs.get("axis", int(case.inputs[2]) if len(case.inputs) > 2 and case.op == "DFT" else 1)
    given = (lengths[0] if lengths else None) if case.op == "DFT" else (case.inputs[2] or (5,))[0]
    length = int(given if given is not None else x[axis])
    return length & (length - 1) == 0


CASES = [
    Case("DFT", [(2, 5, 1)], opset=20, symbolic=OUTER, note="real"),
    Case("DFT", [(2, 5, 1)], opset=20, note="real, all symbolic"),
    Case("DFT", [(2, 4, 2)], opset=20, note="complex"),
    Case("DFT", [(2, 4, 2)], {"inverse": 1}, opset=20, note="inverse"),
    Case("DFT", [(2, 4, 1)], {"inverse": 1}, opset=20, symbolic=OUTER, note="inverse, real"),
    Case("DFT", [(3, 2, 2), None, whole(0)], opset=20, note="axis 0"),
    Case("DFT", [(2, 3, 2, 1), None, whole(-3)], opset=20, symbolic={0: (0, 1, 2)}, note="axis -3"),
    Case("DFT", [(2, 3, 2), whole(5)], opset=20, note="filled up"),
    Case("DFT", [(2, 5, 2), whole(3)], {"inverse": 1}, opset=20, note="cut, inverse"),
    real_to_half(5),
    real_to_half(4),
    Case("DFT", [(2, 4, 1), whole(6), whole(1)], {"onesided": 1}, opset=20, symbolic=OUTER, note="half, filled up"),
    Case("DFT", [(2, 5, 1), whole(3)], {"onesided": 1}, opset=20, symbolic=OUTER, note="half, cut"),
    Case("DFT", [(2, 3, 2)], {"onesided": 1, "inverse": 1}, opset=20, symbolic=OUTER, note="from half"),
    Case("DFT", [(2, 3, 2), whole(5)], {"onesided": 1, "inverse": 1}, opset=20, symbolic=OUTER, note="from half, odd"),
    *[
        Case("DFT", x, {"onesided": 1, "inverse": 1}, opset=20, symbolic=OUTER, note=f"from half, {note}", **CUT)
        for x, note in (([(2, 5, 2), whole(4)], "cut"), ([(2, 2, 2), whole(6)], "more"))
    ],
    *[
        Case("DFT", [(2, 3, 2), None, whole(a)], {"inverse": i}, opset=20, fed=True, note=f"axis {a}, computed")
        for a, i in ((1, 0), (-3, 1))
    ],
    Case("DFT", [(2, 4, 1), None, whole(1)], HALF, opset=20, fed=True, symbolic=OUTER, note="half, axis computed"),
    Case(
        "DFT",
        [(2, 3, 2), whole(5), whole(-2)],
        BACK,
        opset=20,
        fed=True,
        symbolic=OUTER,
        note="from half, all computed",
    ),
    Case("DFT", [(2, 5, 1)], {"onesided": 1}, opset=18, symbolic=OUTER, note="an attribute"),
    Case("DFT", [(2, 3, 2, 2), whole(4)], {"axis": 2, "inverse": 1}, opset=19, note="an attribute, filled up"),
    Case(
        "DFT",
        [(3, 2, 2)],
        {"axis": -3, "onesided": 1, "inverse": 1},
        opset=18,
        symbolic=OUTER,
        note="an attribute, from half",
    ),
    Case("STFT", [(2, 9, 1), whole(2), (4,)], HALF, symbolic={0: (0, 1), 2: (0,)}, **FRAMES),
    Case("STFT", [(2, 9, 1), whole(3), (4,), whole(4)], {"onesided": 0}, symbolic=OUTER, note="whole", **FRAMES),
    Case("STFT", [(1, 8, 1), whole(2), None, whole(5)], HALF, symbolic=OUTER, note="no window", **FRAMES),
    Case("STFT", [(2, 7, 2), whole(1), (3,)], {"onesided": 0}, note="complex", **FRAMES),
    Case("STFT", [(2, 9, 1), whole(4), (3,)], HALF, opset=18, symbolic=OUTER, note="gaps", **FRAMES),
]
test_rule = ladder("fourier", CASES)
test_dtype = dtypes([c for c in CASES if _is_exact(c)])


def frames(bins: int) -> onnx.ModelProto:
    """An STFT without the attribute, whose output is declared to have `bins` frequencies."""
    nodes = [helper.make_node("STFT", ["x", "step", "w"], ["y"])]
    constants = [numpy_helper.from_array(whole(2), "step"), numpy_helper.from_array(np.ones(4, np.float32), "w")]
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 9, 1])]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, bins, 2])]
    graph = helper.make_graph(nodes, "g", infos, out, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_half_a_spectrum_is_the_default_of_frames() -> None:
    x = np.random.default_rng(0).standard_normal((2, 9, 1)).astype(np.float32)
    model = frames(3)
    u = np.random.default_rng(1).standard_normal((2, 3, 3, 2)).astype(np.float32)
    y, g = session(vjp(model, wrt="x")).run(None, {"x": x, "y_cotangent": u})
    np.testing.assert_allclose(y, session(model).run(None, {"x": x})[0], atol=1e-5)
    np.testing.assert_allclose(np.vdot(g, x), np.vdot(u, y), rtol=1e-4)  # linear: ⟨Jᵀu, x⟩ = ⟨u, Jx⟩


def test_a_wrong_number_of_frequencies_is_refused() -> None:
    with pytest.raises(NotDifferentiable, match="3 frequencies, but the model declares 4"):
        vjp(frames(4), wrt="x")
