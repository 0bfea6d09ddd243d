"""Attention, and what stands around it in transformers, up the ladder: masks, heads, caches, every version."""

from dataclasses import replace

import numpy as np
import pytest

from onnxgrad import grad
from onnxgrad.testing import Case, node_model
from tests.rules.dtypes import dtypes, session
from tests.rules.ladder import ladder

Q, K, V = (1, 2, 2, 2), (1, 2, 3, 2), (1, 2, 3, 2)
BOOLS = np.array([[True, False, True], [True, True, False]])
DEAD = np.array([[False] * 3, [True, True, False]])
FLAT = {"q_num_heads": 2, "kv_num_heads": 2}
#: the number of heads and their sizes are known in practice
BATCH = {0: (0,), 1: (0,), 2: (0,)}
LENGTHS = {0: (0, 2), 1: (0, 2), 2: (0, 2)}
LENGTHS_3D = {0: (0, 1), 1: (0, 1), 2: (0, 1)}


def attention(operands, attrs=None, note="", opset=23, **more) -> Case:
    return Case("Attention", operands, attrs or {}, opset=opset, note=note or "plain", **{"symbolic": LENGTHS, **more})


CASES = [
    *[attention([Q, K, V], opset=o, note=f"opset {o}") for o in (23, 24, 25)],
    attention([Q, K, V], {"scale": 0.25}, note="scale"),
    attention([Q, K, V], note="all symbolic", symbolic=True),
    attention([(1, 2, 3, 2)] * 3, {"is_causal": 1}, note="causal"),
    attention([Q, K, V, (2, 3)], note="bias"),
    attention([Q, K, V, (1, 2, 2, 3)], {"is_causal": 1}, note="bias of rank 4, causal"),
    attention([Q, K, V, BOOLS], note="mask"),
    attention([Q, K, V], {"softcap": 1.5}, note="softcap"),
    attention([Q, K, V, (2, 3)], {"softcap": 1.5, "scale": 0.25}, note="softcap and bias", opset=24),
    attention([(1, 4, 2, 2), K, (1, 2, 3, 1)], note="grouped queries"),
    attention([(1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 2)], {"is_causal": 1}, note="one head of keys"),
    attention([Q, K, V, None, (1, 2, 1, 2), (1, 2, 1, 2)], outputs=3, note="past"),
    attention(
        [Q, (1, 2, 2, 2), (1, 2, 2, 2), None, (1, 2, 2, 2), (1, 2, 2, 2)],
        {"is_causal": 1},
        outputs=3,
        note="past, causal",
    ),
    *[
        attention(
            [Q, K, V, (2, 3)],
            {"qk_matmul_output_mode": m, **({"softcap": 2.0} if m else {})},
            outputs=4,
            opset=o,
            of=[0, 3],
            symbolic=BATCH,  # the inference of the onnx package takes an unknown length to be 0 in that output
            note=f"scores {m} opset {o}",
        )
        for m, o in ((0, 23), (1, 24), (2, 23), (3, 24), (3, 25))
    ],
    attention([(1, 2, 4), (1, 3, 4), (1, 3, 4)], FLAT, note="flat", symbolic=LENGTHS_3D),
    attention(
        [(1, 2, 4), (1, 3, 2), (1, 3, 2)],
        {"q_num_heads": 2, "kv_num_heads": 1},
        note="flat, grouped",
        symbolic=LENGTHS_3D,
    ),
    attention(
        [(1, 2, 4), (1, 2, 4), (1, 2, 4), None, (1, 2, 1, 2), (1, 2, 1, 2)],
        FLAT,
        outputs=3,
        note="flat, past",
        symbolic=LENGTHS_3D,
    ),
    attention([Q, K, V, None, None, None, np.array([2])], opset=24, note="padding"),
    attention([Q, K, V, (2, 2)], opset=24, note="short bias"),
    attention([(1, 2, 4, 1)] * 3, {"left_window_size": 1}, opset=25, note="window to the left"),
    attention(
        [(1, 1, 3, 2)] * 3, {"left_window_size": 1, "right_window_size": 1}, opset=25, note="window to both sides"
    ),
    attention(
        [(1, 2, 2, 1), (1, 2, 4, 1), (1, 2, 4, 1), None, None, None, np.array([3])],
        {"left_window_size": 1, "is_causal": 1},
        opset=25,
        note="padding, causal window",
    ),
    attention([Q, K, V, DEAD], note="a query that sees nothing", order=1),
    attention([Q, K, V], {"softmax_precision": 11}, note="precision", runtime=False),
]
test_rule = ladder("attention", CASES)
EXACT = {"scale": 0.25}  # ONNX Runtime fuses the scale into the product, as a float32
WIDE = ("opset 23", "causal", "mask", "flat, grouped", "past")
test_dtype = dtypes([replace(c, attrs={**c.attrs, **EXACT}) for c in CASES if c.note in WIDE])


@pytest.mark.parametrize("mode", [0, 3])
def test_a_query_that_sees_nothing_gets_and_gives_nothing(mode: int) -> None:
    """On ONNX Runtime: the row is 0, and so are its gradients, to second order; the other row's are not."""
    case = attention([Q, K, V, DEAD], {"qk_matmul_output_mode": mode}, outputs=4)
    feeds = {f"x{i}": np.random.default_rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate((Q, K, V))}
    first = grad(node_model(case, feeds | {"x3": DEAD}, dtype=np.float32), wrt=["x0", "x1", "x2"], of="y0")
    dq, dk, dv = session(first).run(["x0_grad", "x1_grad", "x2_grad"], feeds | {"x3": DEAD})
    assert np.isfinite(dk).all()
    assert not dq[0, 0, 0].any()
    assert dq[0, 0, 1].any()
    np.testing.assert_allclose(dv[0, 0].sum(0), 1, rtol=1e-5)  # one query's probabilities
    second = grad(first, wrt=["x0", "x1"], of="x0_grad")
    assert all(np.isfinite(g).all() for g in session(second).run(None, feeds | {"x3": DEAD}))
