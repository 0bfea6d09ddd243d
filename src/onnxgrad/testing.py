"""The public rule checker: a ladder that every rule climbs.

1. the derived models pass the full checker and leave the primal outputs as they were;
2. VJP and JVP agree with central differences in float64;
3. ⟨u, J·t⟩ = ⟨Jᵀ·u, t⟩;
4. second order, forward over reverse and reverse over reverse, agrees with central differences of the VJP;
5. all of it again with every dimension symbolic;
6. the JVP that the class of the rule gives equals the one derived from its VJP;
7. ONNX Runtime gives in float32 what the reference evaluator gives in float64.

Rung 3 is blind where both modes share a formula; rungs 2 and 7 are not. The `NodeCounts` hold node
counts for a golden file, so that bloat shows in review.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnxgrad.model_io import signature
from onnxgrad.model_io.local_functions import infer_types
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Undefined, Zero
from onnxgrad.transforms.first_order import jvp, vjp

Arrays = dict[str, np.ndarray]


@dataclass
class Case:
    """One node to check: operator, operands (a shape stands for random normal values), attributes.

    `wrt` defaults to every float operand, `of` to every float output. Operands are named ``x0, x1, …``,
    outputs ``y0, y1, …``; an operand ``None`` is left out. Integer operands are constants of the graph
    unless they are `fed`; so are float operands listed in `constants`, which keep their dtype. `symbolic` may
    say which axes of which operand become symbolic (default: all).
    `evaluators` (subclasses of ``onnx.reference.op_run.OpRun``) replace what the reference evaluator does wrong, and
    compute operators of other domains; `runtime` says whether ONNX Runtime has a kernel.
    """

    op: str
    inputs: Sequence[Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    wrt: Sequence[int] | None = None
    of: Sequence[int] | None = None
    opset: int = 21
    domain: str = ""
    note: str = ""
    order: int = 2
    symbolic: bool | Mapping[int, Sequence[int]] = True
    runtime: bool = True
    evaluators: Sequence[type] = ()
    fed: bool = False
    constants: Sequence[int] = ()
    atol: float = 1e-6

    @property
    def id(self) -> str:
        """A name for the test."""
        shapes = "-".join("none" if x is None else "x".join(map(str, _shape(x))) or "scalar" for x in self.inputs)
        return "_".join(filter(None, [self.op, shapes, self.note.replace(" ", "_")]))


def _shape(x: Any) -> tuple[int, ...]:
    return x if isinstance(x, tuple) else np.shape(x)


@dataclass
class NodeCounts:
    """The numbers of nodes that each mode adds to the one node of a case."""

    vjp_nodes: int
    jvp_nodes: int


def check_rule(case: Case, seed: int = 0) -> NodeCounts:
    """Climb the ladder for one case.

    Raises:
        AssertionError: a rung fails; the message names it.
    """
    rng = np.random.default_rng(seed)
    feeds = {f"x{i}": _array(x, rng) for i, x in enumerate(case.inputs) if x is not None}
    differences: Arrays = {}
    report = _climb(case, feeds, differences, symbolic=False, rng=deepcopy(rng))
    if case.symbolic and any(a.ndim for a in feeds.values()):
        _climb(case, feeds, differences, symbolic=True, rng=rng)
    return report


def _array(x: Any, rng: np.random.Generator) -> np.ndarray:
    array = rng.standard_normal(x) if isinstance(x, tuple) else np.asarray(x)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def node_model(case: Case, feeds: Arrays, *, symbolic: bool = False, dtype: type = np.float64) -> onnx.ModelProto:
    """A model of the one node of `case`, its float operands of type `dtype`; shape operands are constants."""

    def free(name: str) -> Sequence[int]:
        """The axes of an operand that become symbolic."""
        return range(99) if isinstance(case.symbolic, bool) else case.symbolic.get(int(name[1:]), ())

    inputs, constants = [], []
    for name, array in feeds.items():
        if int(name[1:]) in case.constants:
            constants.append(onnx.numpy_helper.from_array(np.asarray(case.inputs[int(name[1:])]), name))
            continue
        array = array.astype(dtype) if array.dtype.kind == "f" else array
        if array.dtype.kind == "f" or case.fed or not case.symbolic or array.dtype == np.bool_:
            dims = [f"{name}_d{k}" if symbolic and k in free(name) else d for k, d in enumerate(array.shape)]
            inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), dims))
        else:
            constants.append(onnx.numpy_helper.from_array(array, name))
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(case.inputs)]
    outs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, outs, domain=case.domain, **case.attrs)
    opsets = [helper.make_opsetid("", case.opset)]
    if case.domain:
        opsets.append(helper.make_opsetid(case.domain, 1))
    graph = helper.make_graph([node], "case", inputs, [onnx.ValueInfoProto(name=o) for o in outs], constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    typed = onnx.shape_inference.infer_shapes(model, data_prop=True)
    if not _typed(typed):  # onnx has no inference for some functions
        loaded = ir.from_proto(typed)
        infer_types(loaded)
        typed = ir.to_proto(loaded)
    if case.evaluators and not _typed(typed):  # an operator without a schema: the results of its evaluator
        given = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in feeds.items()}
        for out, value in zip(typed.graph.output, reference(model, given, case.evaluators).values()):
            if not out.type.tensor_type.elem_type:
                shape = [None] * value.ndim if symbolic else value.shape
                kind = helper.np_dtype_to_tensor_dtype(value.dtype)
                out.CopyFrom(helper.make_tensor_value_info(out.name, kind, shape))
    for out in typed.graph.output:
        assert out.type.tensor_type.elem_type, f"no inferred type for {out.name}: an operator of your own needs {_OWN}"
    return typed


_OWN = "`evaluators` (docs/add-an-operator.md)"


def _typed(model: onnx.ModelProto) -> bool:
    """True if the type of every output is known."""
    return all(o.type.tensor_type.elem_type for o in model.graph.output)


def reference(model: onnx.ModelProto, feeds: Arrays, evaluators: Sequence[type] = ()) -> Arrays:
    """Run `model` on the reference evaluator of the onnx package, with `evaluators` in place of some of its own."""
    return _Reference(model, evaluators)(feeds)


class _Reference:
    def __init__(self, model: onnx.ModelProto, evaluators: Sequence[type] = ()) -> None:
        self.session = ReferenceEvaluator(model, new_ops=list(evaluators))
        self.inputs = [i.name for i in model.graph.input]
        self.outputs = [o.name for o in model.graph.output]

    def __call__(self, feeds: Arrays) -> Arrays:
        with np.errstate(all="ignore"):
            return dict(zip(self.outputs, self.session.run(None, {n: feeds[n] for n in self.inputs if n in feeds})))


def numeric_gradient(f: Any, x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of a scalar function of an array, element by element."""
    gradient = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        h = step * max(1.0, abs(float(x[i])))
        up, down = x.copy(), x.copy()
        up[i] += h
        down[i] -= h
        gradient[i] = (f(up) - f(down)) / (2 * h)
    return gradient


def _dot(a: Arrays, b: Arrays) -> float:
    return float(sum(np.vdot(np.asarray(a[k], np.float64), np.asarray(b[k], np.float64)) for k in a))


def _close(rung: str, got: Any, want: Any, atol: float) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{rung}: shape {got.shape}, expected {want.shape}"
    scale = max(1.0, float(np.max(np.abs(want), initial=0.0)))
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=atol, err_msg=rung)


def _climb(case: Case, feeds: Arrays, differences: Arrays, *, symbolic: bool, rng: np.random.Generator) -> NodeCounts:
    """Climb once; the second climb, in the same directions, is compared with the `differences` of the first."""
    primal = node_model(case, feeds, symbolic=symbolic)
    primal_run = _Reference(primal, case.evaluators)
    values = primal_run(feeds)
    free = [i for i, x in enumerate(case.inputs) if x is not None and i not in case.constants]
    floats = [i for i in free if feeds[f"x{i}"].dtype.kind == "f"]
    wrt = [f"x{i}" for i in (floats if case.wrt is None else case.wrt)]
    outs = [i for i in range(case.outputs) if np.asarray(values[f"y{i}"]).dtype.kind == "f"]
    of = [f"y{i}" for i in (outs if case.of is None else case.of)]
    u = {o: np.asarray(rng.standard_normal(values[o].shape)) for o in of}
    t = {w: np.asarray(rng.standard_normal(feeds[w].shape)) for w in wrt}
    where = "symbolic " if symbolic else ""

    back, push = vjp(primal, wrt=wrt, of=of), jvp(primal, wrt=wrt, of=of)
    sig, tan = signature(back), signature(push)
    for model in (back, push):
        onnx.checker.check_model(model, full_check=True)
    back_feeds = feeds | {sig.cotangents[o]: u[o] for o in of}
    push_feeds = feeds | {tan.input_tangents[w]: t[w] for w in wrt}
    back_run, push_run = (_Reference(model, case.evaluators) for model in (back, push))
    pulled, pushed = back_run(back_feeds), push_run(push_feeds)
    for name, value in values.items():
        _close(f"{where}rung 1, primal output {name}", pulled[name], value, 1e-12)
    gradients = {w: pulled[sig.gradients[w]] for w in wrt}
    moved = {o: pushed[tan.output_tangents[o]] for o in of}

    for w in wrt:
        if w not in differences:
            differences[w] = numeric_gradient(lambda x, w=w: _dot(u, primal_run(feeds | {w: x})), feeds[w])
        _close(f"{where}rung 2, VJP with respect to {w}", gradients[w], differences[w], case.atol)
    h = 1e-5
    up, down = (primal_run(feeds | {w: feeds[w] + s * h * t[w] for w in wrt}) for s in (1, -1))
    for o in of:
        _close(f"{where}rung 2, JVP of {o}", moved[o], (up[o] - down[o]) / (2 * h), case.atol)
    _close(f"{where}rung 3, ⟨u, Jt⟩ = ⟨Jᵀu, t⟩", _dot(u, moved), _dot(gradients, t), 1e-9)

    if case.order > 1:
        _second_order(case, back, back_run, back_feeds, differences, wrt, of, rng, where)
    _derived_jvp(case, primal, push_feeds, wrt, of, moved, where)
    if case.runtime:
        _on_onnxruntime(case, feeds, back_feeds, push_feeds, wrt, of, pulled, pushed, symbolic, where)
    return NodeCounts(len(back.graph.node) - 1, len(push.graph.node) - 1)


def _second_order(
    case: Case,
    back: onnx.ModelProto,
    run: _Reference,
    feeds: Arrays,
    differences: Arrays,
    wrt: list[str],
    of: list[str],
    rng: np.random.Generator,
    where: str,
) -> None:
    sig = signature(back)
    grads = [sig.gradients[w] for w in wrt]
    through = [*wrt, *(sig.cotangents[o] for o in of)]
    first = run(feeds)
    v = {g: np.asarray(rng.standard_normal(first[g].shape)) for g in grads}
    s = {w: np.asarray(rng.standard_normal(feeds[w].shape)) for w in through}
    h = 1e-5
    up, down = (run(feeds | {w: feeds[w] + sign * h * s[w] for w in through}) for sign in (1, -1))

    forward = jvp(back, wrt=through, of=grads)
    onnx.checker.check_model(forward, full_check=True)
    names = signature(forward)
    got = reference(forward, feeds | {names.input_tangents[w]: s[w] for w in through}, case.evaluators)
    for g in grads:
        numeric = (np.asarray(up[g]) - down[g]) / (2 * h)
        _close(f"{where}rung 4, forward over reverse, {g}", got[names.output_tangents[g]], numeric, 10 * case.atol)

    reverse = vjp(back, wrt=through, of=grads)
    onnx.checker.check_model(reverse, full_check=True)
    names = signature(reverse)
    got = reference(reverse, feeds | {names.cotangents[g]: v[g] for g in grads}, case.evaluators)
    for w in through:
        key = f"second {w}"
        if key not in differences:
            differences[key] = numeric_gradient(lambda x, w=w: _dot(v, run(feeds | {w: x})), feeds[w])
        _close(f"{where}rung 4, reverse over reverse, {w}", got[names.gradients[w]], differences[key], 10 * case.atol)


def _derived_jvp(
    case: Case, primal: onnx.ModelProto, feeds: Arrays, wrt: list[str], of: list[str], moved: Arrays, where: str
) -> None:
    """Derive forward mode from the VJP instead of the rule's own form; both must agree."""
    rule = registry.get(case.domain, case.op, case.opset)
    if rule is None or isinstance(rule, (Zero, Undefined)) or not rule.has_jvp:
        return
    with rule.without_jvp():
        derived = jvp(primal, wrt=wrt, of=of)
    got = reference(derived, feeds, case.evaluators)
    for o, name in signature(derived).output_tangents.items():
        _close(f"{where}rung 6, derived JVP of {o}", got[name], moved[o], 1e-9)


def _on_onnxruntime(
    case: Case,
    feeds: Arrays,
    back_feeds: Arrays,
    push_feeds: Arrays,
    wrt: list[str],
    of: list[str],
    pulled: Arrays,
    pushed: Arrays,
    symbolic: bool,
    where: str,
) -> None:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    primal = node_model(case, feeds, symbolic=symbolic, dtype=np.float32)
    for mode, model, given, want in (
        ("VJP", vjp(primal, wrt=wrt, of=of), back_feeds, pulled),
        ("JVP", jvp(primal, wrt=wrt, of=of), push_feeds, pushed),
    ):
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        held = {i.name: given[i.name] for i in session.get_inputs()}
        single = {k: a.astype(np.float32) if a.dtype.kind == "f" else a for k, a in held.items()}
        for out, got in zip(session.get_outputs(), session.run(None, single)):
            _close(f"{where}rung 7, {mode} on ONNX Runtime, {out.name}", got, want[out.name], 2e-4)
