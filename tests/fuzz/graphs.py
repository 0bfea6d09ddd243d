"""``python -m tests.fuzz.graphs [--seconds 60] [--seed 0] [--only 17] [--kernels]``: gradients of random graphs.

Three to eight random operators on small tensors, each tried out as it is added; some sizes are symbols. The gradient is
held to central differences in float64 along a random direction (the reference evaluator computes both), what ONNX
Runtime gives in float32 to that, and for every third graph the product of the Hessian with a direction to differences
of the gradient. Graphs that are not smooth where they are, or grow large, are dropped.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxgrad import NotDifferentiable, grad, jvp, signature
from onnxgrad.runtime import Options, Session
from tests.fuzz.random_graphs import CORRECTED, OPSET, Graph, Unfit, grown


def model_of(g: Graph, dtype: type) -> onnx.ModelProto:
    """Σ weighted elements of the last value of `g`, some of whose sizes are symbols."""
    rng = np.random.default_rng(len(g.nodes))
    last = next(o for o in g.nodes[-1].output if o in g.values)
    y = g.values[last]
    weights = numpy_helper.from_array(np.cos(np.arange(y.size)).reshape(y.shape), "weights")
    tail = [
        helper.make_node("Mul", [last, "weights"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted"], ["z"], keepdims=0),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = []
    for name, array in g.inputs.items():
        how = rng.integers(3)  # sizes, symbols, or symbols that equal sizes share
        dims = [d if how == 0 else f"S{d}" if how == 1 else f"{name}_{k}" for k, d in enumerate(array.shape)]
        inputs.append(helper.make_tensor_value_info(name, kind, dims))
    held = [numpy_helper.to_array(t) for t in (*g.constants, weights)]
    constants = [
        numpy_helper.from_array(a.astype(dtype) if a.dtype.kind == "f" else a, t.name)
        for a, t in zip(held, (*g.constants, weights))
    ]
    output = helper.make_tensor_value_info("z", kind, [])
    graph = helper.make_graph([*g.nodes, *tail], "random", inputs, [output], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model, new_ops=CORRECTED).run(
            None, {i.name: feeds[i.name] for i in model.graph.input}
        )


def along(f: Callable[[float], np.ndarray], scale: float) -> np.ndarray:
    """The derivative of `f` at 0 by differences, if it is smooth there."""
    h = 1e-5
    up, mid, down = f(h), f(0.0), f(-h)
    central = (up - down) / (2 * h)
    if not np.isfinite(central).all() or np.abs(up - 2 * mid + down).max(initial=0) / h > 1e-3 * scale:
        raise Unfit
    return central


def judge(g: Graph, *, second: bool = False, runtime: bool = True, kernels: bool = False) -> None:
    """Hold the derivatives of `g` to differences.

    Raises:
        Unfit: it is not smooth, or the primal is not the same on both runtimes.
        AssertionError: a derivative is wrong.
    """
    wide, wrt = model_of(g, np.float64), list(g.inputs)
    rng = np.random.default_rng(7)
    way = {n: rng.standard_normal(a.shape) for n, a in g.inputs.items()}

    def at(t: float) -> dict[str, np.ndarray]:
        return {n: a + t * way[n] for n, a in g.inputs.items()}

    if runtime:
        _same_primal(g)
    scale = 1 + float(np.abs(run(wide, g.inputs)[0]))
    want = along(lambda t: run(wide, at(t))[0], scale)
    derived = grad(wide, wrt=wrt)
    onnx.checker.check_model(derived, full_check=True)
    found = run(derived, g.inputs)
    got = sum(float((a * way[n]).sum()) for n, a in zip(wrt, found))
    size = scale + max(float(np.abs(a).max(initial=0)) for a in found)
    assert abs(got - want) < 1e-5 * size, f"gradient: {got}, by differences {want}"
    for n, a in zip(wrt, found):
        assert a.shape == g.inputs[n].shape
    if second:
        turned = jvp(derived, wrt=wrt)
        sig = signature(turned)
        wanted = along(lambda t: np.concatenate([a.ravel() for a in run(derived, at(t))]), size)
        fed = {**g.inputs, **{sig.input_tangents[n]: way[n] for n in wrt}}
        outs = dict(zip([o.name for o in turned.graph.output], run(turned, fed)))
        product = np.concatenate([outs[sig.output_tangents[o.name]].ravel() for o in derived.graph.output])
        np.testing.assert_allclose(product / size, wanted / size, atol=3e-4 * (1 + np.abs(wanted).max() / size))
    if runtime:
        _on_runtime(g, wrt, found)
    if kernels:
        _with_kernels(g, wrt)


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def _same_primal(g: Graph) -> None:
    """Raise Unfit unless both runtimes give the same value."""
    feeds = {n: a.astype(np.float32) for n, a in g.inputs.items()}
    try:
        session = _session(model_of(g, np.float32))
        (z,) = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
    except Exception as e:  # the primal does not run there
        raise Unfit from e
    exact = float(run(model_of(g, np.float64), g.inputs)[0])
    if abs(float(z) - exact) > 1e-3 * (1 + abs(exact)):
        raise Unfit


def _on_runtime(g: Graph, wrt: list[str], found: list[np.ndarray]) -> None:
    session = _session(grad(model_of(g, np.float32), wrt=wrt))
    held = session.run(None, {i.name: g.inputs[i.name].astype(np.float32) for i in session.get_inputs()})
    for n, a, b in zip(wrt, held, found):
        scale = 1 + np.abs(b).max(initial=0)
        np.testing.assert_allclose(a / scale, b / scale, atol=5e-3, err_msg=f"on ONNX Runtime, {n}")


def _with_kernels(g: Graph, wrt: list[str]) -> None:
    """The same numbers with kernels in C in the place of operators."""
    derived = grad(model_of(g, np.float32), wrt=wrt)
    feeds = {n: a.astype(np.float32) for n, a in g.inputs.items()}
    plain, session = _session(derived), Session(derived, Options(target="native", threads=2))
    names = [v.name for v in plain.get_inputs()]
    held, got = plain.run(None, {n: feeds[n] for n in names}), session.run({n: feeds[n] for n in names})
    for o, a in zip(plain.get_outputs(), held):
        scale = 1 + np.abs(a).max(initial=0)
        np.testing.assert_allclose(got[o.name] / scale, a / scale, atol=1e-4, err_msg=f"with kernels, {o.name}")


def case(seed: int, kernels: bool = False) -> str:
    """Judge the graph of `seed`: "judged" or "dropped"."""
    rng = np.random.default_rng(seed)
    try:
        judge(grown(rng), second=seed % 3 == 0, kernels=kernels)
    except Unfit:
        return "dropped"
    except NotDifferentiable as e:
        if "the rank of" in str(e):  # a Squeeze without axes
            return "refused"
        raise
    return "judged"


def main() -> None:
    """Judge graphs until the time is over; print those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--kernels", action="store_true", help="also with kernels in C")
    parser.add_argument("--trace", action="store_true", help="print each seed first: ONNX Runtime may end the process")
    args = parser.parse_args()
    if args.only is not None:
        g = grown(np.random.default_rng(args.only))
        print(onnx.printer.to_text(model_of(g, np.float64)))
        judge(g, second=args.only % 3 == 0, kernels=args.kernels)
        return
    end, seed, counts = time.process_time() + args.seconds, args.seed, Counter[str]()
    while time.process_time() < end:
        if args.trace:
            print(seed, flush=True)
        try:
            counts[case(seed, args.kernels)] += 1
        except Exception as e:
            counts["failed"] += 1
            print(f"{seed}: {type(e).__name__}: {' '.join(str(e).split())[:300]}", flush=True)
        seed += 1
    print(dict(counts), f"next seed {seed}")


if __name__ == "__main__":
    main()
