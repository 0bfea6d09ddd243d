"""Operators of the newest opsets that have a function body in the specification, up the ladder."""

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference.op_run import OpRun

from onnxgrad import jvp, signature, vjp
from onnxgrad.testing import Case, node_model, numeric_gradient, reference
from tests.rules.dtypes import session
from tests.rules.ladder import ladder


class CausalConvWithState(OpRun):
    """The reference evaluator's own rounds to float32 where there is an activation."""

    op_domain = ""

    def _run(self, x, w, c=None, past=None, activation="none"):
        kept = w.shape[2] - 1
        whole = np.concatenate([np.zeros((*x.shape[:2], kept)) if past is None else past, x], axis=2)
        y = sum(w[:, 0, i, None] * whole[:, :, i : i + x.shape[2]] for i in range(kept + 1))
        y = y if c is None else y + c[:, None]
        return y if activation == "none" else y / (1 + np.exp(-y)), whole[:, :, x.shape[2] :]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def rotary(operands, attrs=None, note="", **more) -> Case:
    return Case("RotaryEmbedding", operands, attrs or {}, opset=23, note=note, **more)


def conv(operands, attrs=None, note="", **more) -> Case:
    """The number of channels is known, unless `symbolic` says otherwise."""
    options = {"runtime": False, "evaluators": [CausalConvWithState], "symbolic": {0: (0, 2), 3: (0,)}}
    return Case("CausalConvWithState", operands, attrs or {}, outputs=2, opset=27, note=note, **options | more)


def modifier(*op_types: str) -> onnx.GraphProto:
    """A function of the scores or probabilities: `op_types` of one operand, one after the other."""
    names = [f"m{i}" for i in range(len(op_types) + 1)]
    nodes = [helper.make_node(op, [names[i]], [names[i + 1]]) for i, op in enumerate(op_types)]
    ends = [onnx.ValueInfoProto(name=names[0]), onnx.ValueInfoProto(name=names[-1])]
    return helper.make_graph(nodes, "modifier", ends[:1], ends[1:])


def flex(shapes, attrs=None, note="") -> Case:
    lengths = dict.fromkeys(range(3), (0, 2))
    return Case("FlexAttention", shapes, attrs or {}, domain="ai.onnx.preview", note=note, symbolic=lengths)


Q, K = (1, 2, 2, 2), (1, 2, 3, 2)
PLACES = ints(0, 2, 1)[None]
CASES = [
    rotary([(1, 2, 3, 4), (5, 2), (5, 2), PLACES]),
    rotary([(1, 2, 3, 4), (1, 3, 2), (1, 3, 2)], note="no places"),
    rotary([(1, 2, 3, 4), (5, 2), (5, 2), PLACES], {"interleaved": 1}, note="interleaved"),
    rotary([(1, 2, 3, 6), (5, 2), (5, 2), PLACES], {"rotary_embedding_dim": 4}, note="partial"),
    rotary(
        [(1, 2, 6), (1, 2, 1), (1, 2, 1)],
        {"num_heads": 2, "interleaved": 1, "rotary_embedding_dim": 2},
        note="flat",
        symbolic={0: [0, 1], 1: [0, 1], 2: [0, 1]},
    ),
    flex([Q, K, K]),
    flex([(1, 4, 2, 1), (1, 2, 3, 1), K], {"scale": 0.25}, "grouped"),
    flex([Q, K, K], {"score_mod": modifier("Tanh", "Sin")}, "scores"),
    flex([Q, K, K], {"score_mod": modifier("Tanh"), "prob_mod": modifier("Sqrt")}, "both"),
    Case("SwiGLU", [(2, 3), (2, 3)], opset=28, runtime=False),
    Case("SwiGLU", [(2, 3), (2, 3)], {"alpha": 0.5}, opset=28, runtime=False, note="alpha"),
    conv([(2, 3, 4), (3, 1, 2), (3,), (2, 3, 1)], note="all symbolic", symbolic=True),
    conv([(1, 2, 3), (2, 1, 3)], {"activation": "silu"}, note="all symbolic", symbolic=True),
    conv([(1, 2, 4), (2, 1, 3)]),
    conv([(1, 2, 4), (2, 1, 2), (2,)], {"activation": "silu"}, note="silu"),
    conv([(1, 2, 3), (2, 1, 3), (2,), (1, 2, 2)], {"activation": "swish"}, note="past"),
    conv([(1, 2, 1), (2, 1, 3), None, (1, 2, 2)], note="one step"),
]
test_rule = ladder("newest", CASES)


def linear_attention(q, k, v, state=None, decay=None, beta=None, *, heads, of_keys, scale):
    """The recurrence, step by step, in float64."""
    rows, steps, _ = q.shape
    q, (k, v) = q.reshape(rows, steps, heads, -1), (x.reshape(rows, steps, of_keys, -1) for x in (k, v))
    s = np.zeros((rows, of_keys, k.shape[3], v.shape[3])) if state is None else state
    found = []
    for i in range(steps):
        if decay is not None:
            s = s * np.exp(decay.reshape(rows, steps, of_keys, -1)[:, i])[..., None]
        u = v[:, i]
        if beta is not None:
            u = beta[:, i, :, None] * (u - np.einsum("bhdm,bhd->bhm", s, k[:, i]))
        s = s + k[:, i, :, :, None] * u[:, :, None, :]
        shared = np.repeat(s, heads // of_keys, axis=1)
        found.append(np.einsum("bhd,bhdm->bhm", q[:, i], shared) * (scale or q.shape[3] ** -0.5))
    return np.stack(found, axis=1).reshape(rows, steps, -1), s


class LinearAttention(OpRun):
    """The reference evaluator's own computes in float32."""

    op_domain = ""

    def _run(self, q, k, v, past=None, decay=None, beta=None, q_num_heads=0, kv_num_heads=0, scale=0.0, **_):
        y, state = linear_attention(q, k, v, past, decay, beta, heads=q_num_heads, of_keys=kv_num_heads, scale=scale)
        return y.astype(q.dtype), state.astype(q.dtype)


PAST = (1, 2, 2, 2)
QKV = [(1, 3, 4)] * 3
WAYS = {
    "linear": (QKV, 2),
    "linear past": ([*QKV, PAST], 2),
    "linear grouped": ([(1, 2, 4), (1, 2, 2), (1, 2, 2)], 1),
    "gated": ([*QKV, PAST, (1, 3, 4)], 2),
    "gated per head": ([*QKV, None, (1, 3, 2)], 2),
    "delta": ([*QKV, PAST, None, (1, 3, 2)], 2),
    "gated_delta": ([*QKV, PAST, (1, 3, 4), (1, 3, 1)], 2),
    "gated_delta one step": ([(2, 1, 4)] * 3 + [(2, 2, 2, 2), (2, 1, 2), (2, 1, 2)], 2),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scale", [0.0, 0.25])
@pytest.mark.parametrize("way", WAYS)
def test_linear_attention(way: str, scale: float) -> None:
    """Its body is a Scan, whose derivative runs on ONNX Runtime; that has no opset 27, but all of the operators."""
    shapes, of_keys = WAYS[way]
    rng = np.random.default_rng(0)
    arrays = [None if s is None else rng.standard_normal(s) for s in shapes]
    feeds = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
    attrs = {"q_num_heads": 2, "kv_num_heads": of_keys, "scale": scale, "update_rule": way.split()[0]}
    model = node_model(Case("LinearAttention", shapes, attrs, outputs=2, opset=27), feeds, dtype=np.float32)

    def f(values: dict) -> list[np.ndarray]:
        operands = [values.get(f"x{i}") for i in range(6)]
        return list(linear_attention(*operands, heads=2, of_keys=of_keys, scale=scale))

    ys = f(feeds)
    u = [rng.standard_normal(y.shape) for y in ys]
    t = {n: rng.standard_normal(a.shape) for n, a in feeds.items()}
    back, push = vjp(model, wrt=list(feeds)), jvp(model, wrt=list(feeds))
    got = run_below(back, feeds | {f"y{i}_cotangent": a for i, a in enumerate(u)})
    for i, y in enumerate(ys):
        np.testing.assert_allclose(got[f"y{i}"], y, atol=1e-5)
    for n, a in feeds.items():
        want = numeric_gradient(lambda x, n=n: sum(np.vdot(c, y) for c, y in zip(u, f(feeds | {n: x}))), a)
        np.testing.assert_allclose(got[signature(back).gradients[n]], want, atol=1e-4, err_msg=n)
    moved = run_below(push, feeds | {f"{n}_tangent": a for n, a in t.items()})
    up, down = (f({n: a + h * t[n] for n, a in feeds.items()}) for h in (1e-6, -1e-6))
    for i in range(2):
        np.testing.assert_allclose(moved[f"y{i}_tangent"], (up[i] - down[i]) / 2e-6, atol=1e-4)
    second = vjp(back, wrt=["x0", "x1"], of="x2_grad")
    onnx.checker.check_model(second, full_check=True)
    assert session(below(second))


def below(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, in which only operators are left that opset 26 has too, as one of opset 26."""
    model.opset_import[0].version = 26
    return model


def run_below(model: onnx.ModelProto, feeds: dict) -> dict[str, np.ndarray]:
    run = session(below(model))
    held = {i.name: feeds[i.name].astype(np.float32) for i in run.get_inputs()}
    return dict(zip([o.name for o in run.get_outputs()], run.run(None, held)))


@pytest.mark.parametrize("case", [c for c in CASES if not c.runtime], ids=lambda c: c.id)
def test_what_opset_27_and_28_become_runs(case: Case) -> None:
    """ONNX Runtime has no kernel for the primal; the derivative needs none."""
    rng = np.random.default_rng(0)
    feeds = {f"x{i}": rng.standard_normal(s) for i, s in enumerate(case.inputs) if s is not None}
    exact, model = (vjp(node_model(case, feeds, dtype=d), wrt=list(feeds)) for d in (np.float64, np.float32))
    feeds |= {
        i.name: np.ones([d.dim_value for d in i.type.tensor_type.shape.dim])
        for i in exact.graph.input
        if i.name not in feeds
    }
    want = reference(exact, feeds, case.evaluators)
    for name, got in run_below(model, feeds).items():
        np.testing.assert_allclose(got, want[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("size", ["10", "N"])
def test_the_remainder_with_the_sign_of_the_divisor(size):
    """Opset 28: a - b·⌊a/b⌋ of floats; where b is infinite and of the other sign it is a + b."""
    a = np.array([-3, 3, -1, 1, 0, 5, -5, 5, -5, -1e-20])
    b = np.array([np.inf, np.inf, -np.inf, -np.inf, np.inf, 3, 3, -3, -3, 3])
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 28]> g (double[{size}] a, double[{size}] b) => (double[{size}] y) {{'
        "y = Mod (a, b) }"
    )
    derived = vjp(model, wrt=["a", "b"])
    found = reference(derived, {"a": a, "b": b, signature(derived).cotangents["y"]: np.full(10, 2.0)})
    np.testing.assert_array_equal(found["a_grad"], np.full(10, 2.0))
    np.testing.assert_array_equal(found["b_grad"], 2.0 * np.array([1, 0, 0, 1, 0, -1, 2, 2, -1, 1]))
