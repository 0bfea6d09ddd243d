"""Compare a program with what it computes written out: every mode, both ways of second order."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

import onnxgrad

onnxruntime.set_default_logger_severity(3)


def model(text: str, dtype: str = "float") -> onnx.ModelProto:
    """A model from its text, in which ``F`` stands for the float type."""
    import re

    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["":18]>\n' + re.sub(r"\bF\b", dtype, text))


def run(proto: onnx.ModelProto, feeds: dict, checked: bool = True) -> dict[str, np.ndarray]:
    """Outputs by name on ONNX Runtime, after the full check; of `feeds`, what the model asks for."""
    if checked:
        onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, {k: v for k, v in feeds.items() if k in wanted})))


def second(mode: str, wrt, of):
    """A second derivative: `mode` of the gradient of the sum of squares that the pullback of itself gives."""
    del of
    return {
        "grad of grad": lambda m: onnxgrad.grad(onnxgrad.grad(m, wrt=wrt), wrt=wrt),
        "jvp of grad": lambda m: onnxgrad.jvp(onnxgrad.grad(m, wrt=wrt), wrt=wrt),
        "grad of jvp": lambda m: onnxgrad.grad(onnxgrad.jvp(m, wrt=wrt), wrt=wrt),
        "jvp of jvp": lambda m: onnxgrad.jvp(onnxgrad.jvp(m, wrt=wrt), wrt=wrt),
    }[mode]


SECOND = ["grad of grad", "jvp of grad", "grad of jvp", "jvp of jvp"]


def derived_feeds(m, names, rng):
    """Random feeds for the inputs of `m` that are not among `names`, of the shapes in `names`."""
    return {n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in names.items()}


def check(program: onnx.ModelProto, unrolled: onnx.ModelProto, feeds: dict, wrt: list[str], seed: int = 0) -> None:
    """Every derivative of `program` equals that of `unrolled`, on the same random seeds."""
    rng = np.random.default_rng(seed)
    primal = run(program, feeds)
    for name, value in run(unrolled, feeds).items():
        np.testing.assert_allclose(primal[name], value, rtol=1e-5, atol=1e-6, err_msg=f"primal {name}")
    named = {i.name: feeds[i.name] for i in program.graph.input if i.name in feeds}
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in program.graph.initializer}
    every = dict(feeds)
    for n in wrt:
        a = np.asarray(named[n] if n in named else weights[n])
        every[f"{n}_tangent"] = np.asarray(rng.standard_normal(a.shape)).astype(a.dtype)
        every[f"{n}_tangent_1"] = np.asarray(rng.standard_normal(a.shape)).astype(a.dtype)
    for n, a in primal.items():
        if a.dtype.kind == "f":
            every[f"{n}_cotangent"] = np.asarray(rng.standard_normal(a.shape)).astype(a.dtype)
    transforms = {
        "vjp": lambda m: onnxgrad.vjp(m, wrt=wrt),
        "jvp": lambda m: onnxgrad.jvp(m, wrt=wrt),
        **{mode: second(mode, wrt, None) for mode in SECOND},
    }
    for mode, transform in transforms.items():
        got, want = run(transform(program), every), run(transform(unrolled), every)
        assert set(got) == set(want), mode
        for name in want:
            scale = max(1.0, float(np.abs(want[name]).max(initial=0)))
            assert got[name].shape == want[name].shape, f"{mode}: {name}: {got[name].shape} {want[name].shape}"
            np.testing.assert_allclose(
                got[name] / scale, want[name] / scale, rtol=0, atol=2e-5, err_msg=f"{mode}: {name}"
            )
