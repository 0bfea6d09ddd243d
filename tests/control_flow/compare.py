"""Compare a program with what it computes written out: every mode, both ways of second order."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime

import onnxgrad

onnxruntime.set_default_logger_severity(3)


def model(text: str, dtype: str = "float", opset: int = 18) -> onnx.ModelProto:
    """A model from its text, in which ``F`` stands for the float type, and ``local`` is a domain of functions."""
    local = ', "local":1' if "local" in text else ""
    head = f'<ir_version: 8, opset_import: ["":{opset}{local}]>\n'
    return onnx.parser.parse_model(head + re.sub(r"\bF\b", dtype, text))


def run(proto: onnx.ModelProto, feeds: dict) -> dict[str, np.ndarray]:
    """Outputs by name on ONNX Runtime, after the full check; of `feeds`, what the model asks for."""
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, {k: v for k, v in feeds.items() if k in wanted})))


RNG = np.random.default_rng(1)


def normal(*shape: int) -> np.ndarray:
    """Random values."""
    return np.asarray(RNG.standard_normal(shape)).astype(np.float32)


def seeds(program: onnx.ModelProto, feeds: dict, wrt: list[str], primal: dict) -> dict:
    """Random tangents of `wrt` and cotangents of the outputs."""
    rng = np.random.default_rng(0)
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in program.graph.initializer}
    found = {}
    for n in wrt:
        a = np.asarray(feeds[n] if n in feeds else weights[n])
        for name in (f"{n}_tangent", f"{n}_tangent_1"):
            found[name] = np.asarray(rng.standard_normal(a.shape)).astype(a.dtype)
    for n, a in primal.items():
        if a.dtype.kind == "f":
            found[f"{n}_cotangent"] = np.asarray(rng.standard_normal(a.shape)).astype(a.dtype)
    return found


def transforms(wrt: list[str]) -> dict:
    """Both modes, and both of each."""
    return {
        "vjp": lambda m: onnxgrad.vjp(m, wrt=wrt),
        "jvp": lambda m: onnxgrad.jvp(m, wrt=wrt),
        "grad of grad": lambda m: onnxgrad.grad(onnxgrad.grad(m, wrt=wrt), wrt=wrt),
        "jvp of grad": lambda m: onnxgrad.jvp(onnxgrad.grad(m, wrt=wrt), wrt=wrt),
        "grad of jvp": lambda m: onnxgrad.grad(onnxgrad.jvp(m, wrt=wrt), wrt=wrt),
        "jvp of jvp": lambda m: onnxgrad.jvp(onnxgrad.jvp(m, wrt=wrt), wrt=wrt),
    }


def close(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    """Equal in shape, and in value relative to the largest."""
    assert got.shape == want.shape, f"{what}: {got.shape} {want.shape}"
    scale = max(1.0, float(np.abs(want).max(initial=0)))
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=tolerance, err_msg=what)


def check(program: onnx.ModelProto, unrolled: onnx.ModelProto, feeds: dict, wrt: list[str]) -> None:
    """Every derivative of `program` equals that of `unrolled`, on the same random seeds."""
    primal = run(program, feeds)
    for name, value in run(unrolled, feeds).items():
        close(primal[name], value, 1e-5, f"primal {name}")
    every = feeds | seeds(program, feeds, wrt, primal)
    for mode, transform in transforms(wrt).items():
        got, want = run(transform(program), every), run(transform(unrolled), every)
        assert set(got) == set(want), mode
        for name in want:
            close(got[name], want[name], 2e-5, f"{mode}: {name}")


def differences(program: onnx.ModelProto, feeds: dict, wrt: list[str], tolerance: float = 1e-7) -> None:
    """Both modes of a float64 `program` agree with its central differences."""
    feeds = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in feeds.items()}
    wrt = [n for n in wrt if n in feeds]
    primal = run(program, feeds)
    every = feeds | seeds(program, feeds, wrt, primal)
    session = onnxruntime.InferenceSession(program.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    floats = [n for n in names if primal[n].dtype.kind == "f"]

    def along(direction: dict) -> dict:
        up, down = (
            dict(
                zip(
                    names,
                    session.run(names, feeds | {k: np.asarray(feeds[k] + s * 1e-6 * d) for k, d in direction.items()}),
                )
            )
            for s in (1, -1)
        )
        return {n: (up[n] - down[n]) / 2e-6 for n in floats}

    pushed = run(onnxgrad.jvp(program, wrt=wrt), every)
    numeric = along({n: every[f"{n}_tangent"] for n in wrt})
    for n in floats:
        close(pushed[f"{n}_tangent"], numeric[n], tolerance, f"tangent of {n}")
    pulled = run(onnxgrad.vjp(program, wrt=wrt), every)
    for n in wrt:
        want = np.zeros(feeds[n].shape)
        for at in np.ndindex(want.shape):
            unit = np.zeros(want.shape)
            unit[at] = 1
            moved = along({n: unit})
            want[at] = sum(np.vdot(every[f"{o}_cotangent"], moved[o]) for o in floats)
        close(pulled[f"{n}_grad"], want, tolerance, f"cotangent of {n}")
