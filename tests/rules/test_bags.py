"""Loops over bags become one reduction: against central differences of the formula, and Loops that are none stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad
from tests.control_flow.compare import model, normal, run

#: As PyTorch's older exporter writes EmbeddingBag, with weights of samples.
TEXT = """agraph (int64[N,3] x, float[N,3] share, float[7,2] table) => (float[M,2] y) {{
    zero = Constant <value_int = 0>() first = Constant <value_ints = [0]>() one = Constant <value_ints = [1]>()
    far = Constant <value = int64[1] {{9223372036854775807}}>() flat = Constant <value = int64[1] {{-1}}>()
    yes = Constant <value = bool {{1}}>() three = Constant <value_int = {step}>()
    shape = Shape(x) count = ReduceProd <keepdims = 0>(shape) starts = Range(zero, count, three)
    ids = Reshape(x, flat) parts = Reshape(share, flat) size = Shape(ids) total = Gather(size, zero)
    last = Unsqueeze(total, first) offsets = Concat <axis = 0>(starts, last)
    tail = Constant <value = int64[1] {{{tail}}}>() ends = Slice(offsets, tail, far, first, one)
    steps = Shape(ends) trips = Gather(steps, zero)
    y = Loop <body = bag (int64 i, bool go) => (bool goes, float[2] sum) {{
        goes = Cast <to = 9>(yes) a = Gather(offsets, i) b = Gather(ends, i) c = Unsqueeze(a, first)
        d = Unsqueeze(b, first) own = Slice(ids, c, d, first) part = Slice(parts, c, d, first)
        rows = Gather(table, own) w = Unsqueeze(part, one) scaled = Mul(rows, w)
        sum = {reduction} <keepdims = 0>(scaled, first) }}>(trips, yes) }}"""
#: As the newer one writes it: rows are gathered before the Loop, which collects a sequence.
NEWER = """agraph (int64[R] ids, int64[B] begins, float[R] share, float[7,2] table) => (float[M,2] y) {{
    zero = Constant <value_int = 0>() first = Constant <value_ints = [0]>() one = Constant <value_ints = [1]>()
    two = Constant <value_ints = [2]>() flat = Constant <value_ints = [-1]>()
    all = Gather(table, ids) parts = Unsqueeze(share, one) rows = Mul(all, parts) total = Shape(ids)
    offsets = Concat <axis = 0>(begins, total) bags = Size(begins) begin = Less(zero, bags) empty = SequenceEmpty()
    sums, n = Loop <body = bag (int64 step, bool go, seq(float[1,2]) done, int64 i)
        => (bool goes, seq(float[1,2]) longer, int64 next) {{
        at = Reshape(i, flat) b = Add(at, one) c = Add(at, two) start = Slice(offsets, at, b) end = Slice(offsets, b, c)
        none = Equal(start, end)
        sum = If(none) <then_branch = g () => (float[1,2] z) {{ z = Constant <value = float[1,2] {{0., 0.}}>() }},
            else_branch = h () => (float[1,2] v) {{ {step} }}>
        longer = SequenceInsert(done, sum) single = Squeeze(one) next = Add(i, single) goes = Less(next, bags)
    }}>(, begin, empty, zero)
    y = ConcatFromSequence <axis = 0>(sums) }}"""
STEPS = {
    "ReduceSum": "part = Slice(rows, start, end) v = ReduceSum(part, first)",
    "ReduceMean": """part = Slice(rows, start, end) before = Sub(bags, one) last = Equal(i, before)
        v = If(last) <then_branch = j () => (float[1,2] mean) { all1 = ReduceSum(part, first) left = Sub(total, start)
        over = Cast <to = 1>(left) mean = Div(all1, over) },
        else_branch = k () => (float[1,2] inner) { inner = ReduceMean(part, first) }>""",
    "ReduceMax": """before = Sub(bags, one) last = Equal(i, before)
        part = If(last) <then_branch = j () => (float[K,2] p) { p = Slice(rows, start, total) },
            else_branch = k () => (float[K,2] q) { q = Slice(rows, start, end) }>
        v = ReduceMax(part, first)""",
}
REDUCTIONS = {"ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max}


def _check(reduction: str, step: int, tail: int, batch: int, loops: bool) -> None:
    derived = onnxgrad.grad(model(TEXT.format(reduction=reduction, step=step, tail=tail)), wrt=["table", "share"])
    nodes = [n.op_type for n in ir.from_proto(derived).graph]
    assert ("Loop" in nodes or "Scan" in nodes or "If" in nodes) == loops
    rng = np.random.default_rng(batch)
    x = rng.integers(-7, 7, (batch, 3))
    values = {"table": rng.standard_normal((7, 2)), "share": rng.standard_normal((batch, 3))}

    def loss(table, share):
        offsets = np.array([*range(0, 3 * batch, step), 3 * batch])
        rows = table[x.reshape(-1)] * share.reshape(-1, 1)
        pairs = zip(offsets, offsets[tail:])
        return sum(REDUCTIONS[reduction](rows[a:b], 0).sum() for a, b in pairs)

    _compare(derived, values, loss, {"x": x})


def _compare(derived, values, loss, others) -> None:
    found = run(derived, others | {n: v.astype(np.float32) for n, v in values.items()})
    for name, value in values.items():
        wanted = np.zeros_like(value)
        for place in np.ndindex(*value.shape):
            up, down = (dict(values, **{name: value.copy()}) for _ in range(2))
            up[name][place] += 1e-6
            down[name][place] -= 1e-6
            wanted[place] = (loss(**up) - loss(**down)) / 2e-6
        np.testing.assert_allclose(found[f"{name}_grad"], wanted, atol=2e-6)


@pytest.mark.parametrize("begins", [[0, 3, 3, 4, 6], [0, 5, 3, 6], [2], [0, 8], []], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bags_in_a_sequence(reduction, begins):
    derived = onnxgrad.grad(model(NEWER.format(step=STEPS[reduction])), wrt=["table", "share"])
    assert not {"Loop", "If", "SequenceMap"} & {n.op_type for n in ir.from_proto(derived).graph}
    rng = np.random.default_rng(1)
    ids = rng.integers(-7, 7, 8)
    values = {"table": rng.standard_normal((7, 2)), "share": rng.standard_normal(8)}

    def loss(table, share):
        rows = table[ids] * share[:, None]
        pairs = zip(begins, [*begins[1:], 8])
        return sum((REDUCTIONS[reduction](rows[a:b], 0).sum() for a, b in pairs if a < b), 0.0)

    _compare(derived, values, loss, {"ids": ids, "begins": np.array(begins, np.int64)})


@pytest.mark.parametrize(
    ("reduction", "rows", "is_swapped"),
    [*((r, 1, False) for r in REDUCTIONS), ("ReduceSum", 2, False), ("ReduceSum", 1, True)],
    ids=[*REDUCTIONS, "fewer than the rows", "from the end to the start"],
)
def test_equal_bags_in_a_sequence(reduction, rows, is_swapped):
    text = NEWER.replace("int64[R] ids, int64[B] begins, float[R] share", "int64[N,3] x, float[N,3] w").replace(
        "all = Gather",
        """three = Constant <value_int = 3>() most = Shape <start = 0, end = 1>(x) n1 = Squeeze(most)
        size = Mul(n1, three) begins = Range(zero, size, three) flat_x = Reshape(x, flat) flat_w = Reshape(w, flat)
        ids = Concat <axis = 0>(IDS) share = Concat <axis = 0>(SHARES) all = Gather""",
    )
    text = text.replace("IDS", ", ".join(["flat_x"] * rows)).replace("SHARES", ", ".join(["flat_w"] * rows))
    text = text.replace("total = Shape(ids)", "total = Shape(flat_x)")
    if is_swapped:
        text = text.replace("start = Slice(offsets, at, b) end = Slice(offsets, b, c)", "SWAPPED")
        text = text.replace("SWAPPED", "start = Slice(offsets, b, c) end = Slice(offsets, at, b)")
    derived = onnxgrad.grad(model(text.format(step=STEPS[reduction])), wrt=["table", "w"])
    nodes = {n.op_type for n in ir.from_proto(derived).graph}
    assert "Loop" not in nodes
    assert ("CumSum" in nodes) == (rows > 1 or is_swapped)
    rng = np.random.default_rng(2)
    x = rng.integers(-7, 7, (4, 3))
    values = {"table": rng.standard_normal((7, 2)), "w": rng.standard_normal((4, 3))}

    def loss(table, w):
        return 0.0 if is_swapped else REDUCTIONS[reduction](table[x] * w[..., None], 1).sum()

    _compare(derived, values, loss, {"x": x})


def test_other_operators_stay_a_loop():
    step = STEPS["ReduceSum"].replace("v = ReduceSum(part, first)", "w = ReduceSum(part, first) v = Tanh(w)")
    derived = onnxgrad.grad(model(NEWER.format(step=step)), wrt=["table"])
    assert "Loop" in {n.op_type for n in ir.from_proto(derived).graph}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equal_bags_are_one_reduction(reduction, batch):
    _check(reduction, 3, 1, batch, loops=False)


@pytest.mark.parametrize("batch", ["N", "4"])
def test_equal_bags_are_rows_of_a_matrix(batch):
    text = TEXT.format(reduction="ReduceSum", step=3, tail=1).replace("[N,3]", f"[{batch},3]")
    derived = onnxgrad.grad(model(text), wrt=["table"])
    assert "CumSum" not in {n.op_type for n in ir.from_proto(derived).graph}


@pytest.mark.parametrize(("step", "tail"), [(2, 1), (3, 2)], ids=["of another length", "of two rows of the matrix"])
def test_other_bags(step, tail):
    _check("ReduceSum", step, tail, 4, loops=False)


def test_no_bags():
    derived = onnxgrad.grad(model(TEXT.format(reduction="ReduceSum", step=3, tail=1)), wrt=["table"])
    feeds = {"x": np.zeros((0, 3), np.int64), "share": normal(0, 3), "table": normal(7, 2)}
    np.testing.assert_array_equal(run(derived, feeds)["table_grad"], np.zeros((7, 2)))
