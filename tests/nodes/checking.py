"""The requirements on one node test: derivatives are valid, right, executable and adjoint to each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

from onnxgrad import jvp, vjp
from onnxgrad.errors import BadInput, NotDifferentiable
from onnxgrad.model_io import signature
from tests.nodes.cases import FLOATS, NodeTest, in_form, node_tests, widened
from tests.nodes.differences import derivative, excess
from tests.rules import evaluators, test_newest, test_norm, windowed

Feeds = dict[str, Any]
Run = Callable[[Feeds], Feeds]
EVALUATORS = [
    *(evaluators.Erf, evaluators.Gelu, evaluators.Flatten, evaluators.AffineGrid, evaluators.DequantizeLinear),
    test_newest.LinearAttention,
    *(test_norm.LRN, test_norm.LpNormalization, test_norm.GroupNormalization),
    *(windowed.GatherElements, windowed.GlobalLpPool, windowed.LpPool),
]
SAMPLES, SLOW = (
    16,
    0.03,
)  # elements whose derivative is checked, per operand; one if the primal takes more seconds than this
ON_RUNTIME = {np.dtype(np.float16): 2e-2, np.dtype(np.float32): 5e-4, np.dtype(np.float64): 1e-6}

onnxruntime.set_default_logger_severity(4)


@dataclass
class Outcome:
    """The result of one node test in one form."""

    wrong: list[str] = field(default_factory=list)
    refused: str = ""
    oracle: str = ""
    compared: int = 0
    untrusted: int = 0
    executed: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """True if there was something to compare, and it agreed."""
        return self.compared > 0 and not self.wrong

    def blame(self, what: str) -> None:
        self.wrong.append(what)


def _is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.dtype.name in ("float16", "bfloat16", "float32", "float64")


def _double(x: Any) -> Any:
    if isinstance(x, list):
        return [_double(e) for e in x]
    return np.asarray(x, np.float64) if _is_float(x) else x


def typed(model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """Of `feeds` what `model` takes, in the types that it takes them in."""

    def convert(held: onnx.TypeProto, x: Any) -> Any:
        which = held.WhichOneof("value")
        if which in ("sequence_type", "optional_type"):
            inner = getattr(held, which).elem_type
            return [convert(inner, e) for e in x] if isinstance(x, list) else None if x is None else convert(inner, x)
        kind = held.tensor_type.elem_type
        return np.asarray(x, onnx.helper.tensor_dtype_to_np_dtype(kind)) if kind in FLOATS else np.asarray(x)

    return {i.name: convert(i.type, feeds[i.name]) for i in model.graph.input if i.name in feeds}


def reference(model: onnx.ModelProto) -> Run:
    session = ReferenceEvaluator(model, new_ops=EVALUATORS)
    names = [o.name for o in model.graph.output]

    def run(feeds: Feeds) -> Feeds:
        with np.errstate(all="ignore"):
            return dict(zip(names, session.run(None, typed(model, feeds))))

    return run


def on_runtime(model: onnx.ModelProto) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    taken = {i.name for i in session.get_inputs()}

    def run(feeds: Feeds) -> Feeds:
        given = {k: v for k, v in typed(model, feeds).items() if k in taken}
        return dict(zip(names, session.run(None, given)))

    return run


def _tried(make: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return make(), ""
    except Exception as e:
        return None, f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"


def _agrees(got: Feeds, want: Feeds, tolerance: float) -> bool:
    """True if the float outputs equal those of the node test."""
    for name, value in want.items():
        if _is_float(value):
            a, b = (np.asarray(v, np.float64) for v in (got[name], value))
            if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                return False
    return True


def examine(test: NodeTest, form: str) -> Outcome:
    """Derive both modes of `test` in `form` and hold them to all that can be asked.

    What is derived is evaluated by the reference evaluator, or else by ONNX Runtime in float64: an
    operator that one of them gets wrong is of no interest here.
    """
    out = _examine(test, form, [reference, on_runtime])
    if any(w.startswith(_VALUES) for w in out.wrong):
        other = _examine(test, form, [on_runtime])
        if not other.wrong:
            return other
    return out


#: How complaints begin that an error of the evaluator can cause.
_VALUES = ("vjp of", "jvp of", "adjoint", "shape of", "onnxruntime")


def _examine(test: NodeTest, form: str, engines: list[Callable[[onnx.ModelProto], Run]], seed: int = 0) -> Outcome:
    out = Outcome()
    native = in_form(test.model, test.feeds, form)
    wide = widened(native)
    exact = native if wide is None else wide
    wrt, of = test.wrt, test.of
    try:
        back, push = vjp(exact, wrt=wrt, of=of), jvp(exact, wrt=wrt, of=of)
    except (NotDifferentiable, BadInput) as e:
        out.refused = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        if isinstance(e, BadInput) and "cannot raise" not in out.refused:
            out.blame(f"derive: {out.refused}")
        return out
    except Exception as e:
        out.blame(f"derive: {type(e).__name__}: {' '.join(str(e).split())[:400]}")
        return out
    for mode, model in (("vjp", back), ("jvp", push)):
        _, problem = _tried(lambda model=model: onnx.checker.check_model(model, full_check=True))
        if problem:
            out.blame(f"checker, {mode}: {problem}")

    rng = np.random.default_rng(seed)
    feeds = {k: _double(v) for k, v in test.feeds.items()}
    numeric_of = _widest(test, form)
    primal, out.oracle = _oracle(test, numeric_of, feeds)
    body = next((t for t in node_tests() if t.name == f"{test.name}_expanded"), None)
    if primal is None and body is not None:
        primal, out.oracle = _oracle(test, _widest(body, form), feeds)
    if primal is None:
        static = in_form(test.model, test.feeds, "fed" if form == "fed" else "held")
        primal, out.oracle = _oracle(test, widened(static, anyway=True) or static, feeds)
    if primal is None:
        return _without_oracle(out, test, native, wide, form, feeds, rng)
    values = primal(feeds)
    sizes = {w: np.maximum(1.0, np.abs(np.nan_to_num(feeds[w], posinf=1.0, neginf=1.0))) for w in wrt}
    t = {w: rng.standard_normal(feeds[w].shape) * sizes[w] * np.isfinite(feeds[w]) for w in wrt}
    u = {o: rng.standard_normal(np.shape(values[o])) for o in of}
    sig, tan = signature(back), signature(push)
    given = feeds | {sig.cotangents[o]: u[o] for o in of} | {tan.input_tangents[w]: t[w] for w in wrt}
    pulled = pushed = None
    problems = []
    for engine in engines:
        pulled, problem = _tried(lambda engine=engine: engine(back)(given))
        pushed, other = _tried(lambda engine=engine: engine(push)(given))
        if pulled is not None and pushed is not None:
            break
        problems.append(problem or other)
    if pulled is None or pushed is None:
        if len(engines) == 1 or _tried(lambda: on_runtime(exact)(given))[0] is not None:
            out.blame(f"run: {' / '.join(problems)}")
        return out
    gradients = {w: np.asarray(pulled[sig.gradients[w]], np.float64) for w in wrt}
    moved = {o: np.asarray(pushed[tan.output_tangents[o]], np.float64) for o in of}
    for w in wrt:
        if gradients[w].shape != np.shape(feeds[w]):
            out.blame(f"shape of the gradient of {w}: {gradients[w].shape}, not {np.shape(feeds[w])}")
    for o in of:
        if moved[o].shape != np.shape(values[o]):
            out.blame(f"shape of the tangent of {o}: {moved[o].shape}, not {np.shape(values[o])}")
    if out.wrong:
        return out
    kinds = {i.type.tensor_type.elem_type for i in exact.graph.input if i.name in wrt}
    precise = wide is not None and kinds == {onnx.TensorProto.DOUBLE}
    tolerance = 1e-5 if precise else 2e-3 if _bits(test) >= 23 else 5e-2
    _compare(out, primal, feeds, wrt, of, t, u, gradients, moved, tolerance, rng)

    finite = all(np.isfinite(a).all() for a in (*gradients.values(), *moved.values()))
    if finite:
        one = sum(float(np.vdot(u[o], moved[o])) for o in of)
        two = sum(float(np.vdot(gradients[w], t[w])) for w in wrt)
        size = sum(float(np.abs(u[o] * moved[o]).sum()) for o in of)
        size += sum(float(np.abs(gradients[w] * t[w]).sum()) for w in wrt)
        if abs(one - two) > (1e-6 if precise else 1e-4 if _bits(test) >= 23 else 1e-2) * max(1.0, size):
            out.blame(f"adjoint: {one} and {two}")
    _execute(out, test, native, wide, form, given, {**pulled, **pushed})
    return out


def _widest(test: NodeTest, form: str) -> onnx.ModelProto:
    """The primal for differences: in float64 even where the specification does not allow it, as no one checks."""
    static = in_form(test.model, test.feeds, "fed" if form == "fed" else "held")
    return widened(static) or static


def _bits(test: NodeTest) -> int:
    """The precision of the coarsest float type among the operands and results."""
    arrays = [v for v in [*test.feeds.values(), *test.expected.values()] if _is_float(v)]
    return min((7 if v.dtype.name == "bfloat16" else np.finfo(v.dtype).nmant for v in arrays), default=23)


def _is_smooth(run: Run, test: NodeTest, feeds: Feeds) -> bool:
    """True if most results equal those computed in float64, without rounding to float32 in between."""
    rng = np.random.default_rng(1)
    t = {w: rng.standard_normal(np.shape(feeds[w])) for w in test.wrt}
    with np.errstate(all="ignore"), contextlib.suppress(ValueError):  # a shape that depends on the values
        a, b, c = (run(feeds | {w: feeds[w] + s * 1e-7 * t[w] for w in t}) for s in (0, 1, 2))
        bends = [np.abs(a[o] - 2 * b[o] + c[o]) / max(1.0, np.nanmax(np.abs(b[o]), initial=0.0)) for o in a]
        return all(float(np.median(x)) < 1e-10 for x in (x[np.isfinite(x)] for x in bends) if x.size)
    return True


def _oracle(test: NodeTest, model: onnx.ModelProto, feeds: Feeds) -> tuple[Run | None, str]:
    """The evaluator of `model` that agrees with the node test."""
    lowest = _bits(test)
    tolerance = 1e-3 if lowest >= 23 else 2e-2 if lowest >= 10 else 1e-1
    for name, make in (("reference", reference), ("onnxruntime", on_runtime)):
        run, _ = _tried(lambda make=make: make(model))
        if run is None:
            continue

        def arrays(given: Feeds, run: Run = run) -> Feeds:
            try:
                found = run(given)
            except Exception:  # beside a point that has a value there may be none
                return {o: np.full(np.shape(test.expected[o]), np.nan) for o in test.of}
            return {o: np.asarray(found[o], np.float64) for o in test.of}

        got, _ = _tried(lambda arrays=arrays: arrays(feeds))
        if got is None or not _agrees(got, {o: test.expected[o] for o in test.of}, tolerance):
            continue
        if all(a.dtype == np.float64 for a in run(feeds).values() if _is_float(a)) and _is_smooth(arrays, test, feeds):
            return arrays, name
    return None, ""


def _compare(out, primal, feeds, wrt, of, t, u, gradients, moved, tolerance, rng) -> None:
    """Both modes against differences."""
    start = time.perf_counter()
    y = {o: float(np.max(np.abs(np.nan_to_num(v, posinf=0, neginf=0)), initial=0.0)) for o, v in primal(feeds).items()}
    samples = SAMPLES if time.perf_counter() - start < SLOW else 1
    with np.errstate(all="ignore"):
        want, trusted = derivative(lambda s: primal(feeds | {w: feeds[w] + s * t[w] for w in wrt}))
    for o in of:
        out.compared += int(trusted[o].sum())
        out.untrusted += int((~trusted[o]).sum())
        off = excess(moved[o], want[o], y[o], trusted[o], tolerance)
        if off > 1:
            out.blame(f"jvp of {o}: {off:.3g} × tolerance; {_worst(moved[o], want[o], trusted[o])}")
    for w in wrt:
        x = np.asarray(feeds[w])
        places = rng.permutation(x.size)[:samples]
        numeric, sure = np.zeros(len(places)), np.zeros(len(places), bool)
        for k, place in enumerate(places):
            unit = np.zeros(x.size)
            unit[place] = max(1.0, abs(float(x.flat[place]))) if np.isfinite(x.flat[place]) else 0.0
            if not unit[place]:
                continue
            direction = unit.reshape(x.shape)
            with np.errstate(all="ignore"):
                column, known = derivative(lambda s, d=direction, w=w: primal(feeds | {w: feeds[w] + s * d}))
            sure[k] = all(a.all() for a in known.values())
            numeric[k] = sum(float(np.vdot(u[o], np.nan_to_num(column[o]))) for o in of) / unit[place]
        got = gradients[w].reshape(-1)[places]
        out.compared += int(sure.sum())
        out.untrusted += int((~sure).sum())
        off = excess(got, numeric, 1.0, sure, tolerance)
        if off > 1:
            out.blame(f"vjp of {w}: {off:.3g} × tolerance; {_worst(got, numeric, sure)}")


def _worst(got: np.ndarray, want: np.ndarray, trusted: np.ndarray) -> str:
    with np.errstate(all="ignore"):
        off = np.where(trusted, np.abs(got - want), 0)
        off = np.where(np.isnan(off), np.inf, off)
    i = np.unravel_index(int(np.argmax(off)), off.shape)
    return f"{got[i]:.6g}, by differences {want[i]:.6g} (at {tuple(map(int, i))}, {int((off > 1e-4).sum())} off)"


def _execute(out: Outcome, test: NodeTest, native, wide, form: str, given: Feeds, want: Feeds) -> None:
    """If ONNX Runtime runs the primal, it must run its derivatives, with the same results."""
    for label, model in (("native", native), ("float64", wide)):
        if model is None or (
            label == "float64" and all(_is_float(v) and v.dtype == np.float64 for v in test.feeds.values())
        ):
            continue
        plain, _ = _tried(lambda model=model: on_runtime(model)(given))
        if plain is None:
            continue
        floats = [*plain.values(), *typed(model, given).values()]
        kinds = [np.asarray(v).dtype for v in floats if _is_float(v)]
        tolerance = max(ON_RUNTIME.get(k, 2e-2) for k in kinds) if kinds else 5e-4
        if want and not _agrees(plain, {o: np.asarray(want[o]) for o in test.of}, max(tolerance, 1e-3)):
            out.executed.append(f"{label}: primal differs")
            continue
        for mode, derive in (("vjp", vjp), ("jvp", jvp)):
            derived, problem = _tried(lambda d=derive, m=model: d(m, wrt=test.wrt, of=test.of))
            if derived is None:
                out.blame(f"derive {mode} {label}: {problem}")
                continue
            _, problem = _tried(lambda m=derived: onnx.checker.check_model(m, full_check=True))
            if problem:
                out.blame(f"checker, {mode} {label}: {problem}")
            got, problem = _tried(lambda m=derived: on_runtime(m)(given))
            if got is None:
                out.blame(f"onnxruntime, {mode} {label}: {problem}")
                continue
            out.executed.append(f"{label} {mode}")
            sig = signature(derived)
            for name in (*sig.gradients.values(), *sig.output_tangents.values()):
                if not want:
                    continue
                a, b = np.asarray(got[name], np.float64), np.asarray(want[name], np.float64)
                if a.shape != b.shape:
                    out.blame(f"onnxruntime, {mode} {label}: shape of {name} {a.shape}, not {b.shape}")
                    continue
                ok = np.isfinite(b)
                limit = tolerance * max(1.0, float(np.max(np.abs(b[ok]), initial=0.0)))
                with np.errstate(all="ignore"):
                    off = np.where(ok, np.abs(a - b), 0)
                off = np.where(np.isnan(off), np.inf, off)
                if off.size and off.max() > limit:
                    i = np.unravel_index(int(np.argmax(off)), off.shape)
                    out.blame(
                        f"onnxruntime, {mode} {label}: {name} {a[i]:.6g}, not {b[i]:.6g} "
                        f"({int((off > limit).sum())} of {off.size})"
                    )


def _without_oracle(out, test, native, wide, form, feeds, rng) -> Outcome:
    """Only what needs no value to compare with."""
    u = {f"{o}_cotangent": np.ones(np.shape(test.expected[o])) for o in test.of}
    t = {f"{w}_tangent": np.ones(np.shape(feeds[w])) for w in test.wrt}
    _execute(out, test, native, wide, form, feeds | u | t, {})
    return out
