"""The pages of the benchmark are written from stored results, also without some of the competitors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks.training.__main__ import regressions
from benchmarks.training.environments import Missing, environment
from benchmarks.training.fractions import Machine, arithmetic, least_time, operations
from benchmarks.training.report import ratio, write

from onnxgrad.runtime.kernels.programs import CODES, KINDS

SETTING = {"threads": 2, "processor": "a processor", "rounds": 2, "date": "2026-01-01", "versions": {"jax": "jax==1.0"}}


def _peer(step, **more):
    timed = {"step_s": step, "forward_s": [0.001], "peak_mb": 100.0, "start_up_s": 1.0, "parts_s": {"session": 0.5}}
    return timed | {"losses": [2.0, 1.0], "notes": []} | more


def test_a_page_with_a_ratio_and_a_reason(tmp_path):
    pytest.importorskip("matplotlib")
    peers = {
        "torch": _peer([0.004, 0.004]),
        "jax": {"unable": "pip cannot install it"},
        "onnxgrad": _peer([0.001, 0.003], losses=[2.0, 1.5], peak_mb=50.0, notes=["a note"]),
    }
    kept = tmp_path / "a-processor"
    kept.mkdir()
    (kept / "mlp.json").write_text(json.dumps({"setting": SETTING, "peers": peers}))
    (kept / "scale.json").write_text(json.dumps({"a chain": "1 s"}))
    (kept / "fractions.json").write_text(json.dumps({"mlp": {"moves": 0.25, "roofline": 0.75}}))
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    write(tmp_path, page)
    text, models = page.read_text(), page.with_name("page-models.md").read_text()
    assert "| onnxgrad | 2.00 | 0.50 | 0.38–0.62 | 1.00 | 50 | 0.50 | 1.0 | 5.0e-01 |" in models
    assert "| jax | – | | | | | | | pip cannot install it |" in models
    assert "- onnxgrad: a note." in models
    assert "| a chain | 1 s |" in text
    assert "| **geometric mean, usual kinds** | 0.50 |" in text
    assert "| moves | roofline |" in text
    assert "| mlp | 25% | 75% |" in text
    assert {p.name for p in (page.parent / "images").iterdir()} == {
        "benchmark-step-a-processor.svg",
        "benchmark-memory-a-processor.svg",
    }


def test_what_became_worse_is_named():
    torch, ours = _peer([0.004]), _peer([0.002])
    kept = {"torch": torch, "onnxgrad": ours, "onnxgrad, portable": _peer([0.004])}
    found = {"torch": _peer([0.008]), "onnxgrad": _peer([0.0042]), "onnxgrad, portable": _peer([0.012])}
    assert regressions("mlp", kept, found) == ["mlp: step_s of onnxgrad, portable is 1.50 × PyTorch, it was 1.00"]
    assert regressions("mlp", {}, found) == []


def test_a_ratio_is_that_of_turns():
    """A machine that is slow for a while is so for both; the medians of each may be from different whiles."""
    peers = {"torch": _peer([0.004, 0.008, 0.004]), "onnxgrad": _peer([0.002, 0.004, 0.004, 0.1])}
    assert ratio(peers, "onnxgrad", "step_s") == pytest.approx(0.5)
    assert ratio(peers, "onnxgrad", "peak_mb") == 1
    assert np.isnan(ratio(peers, "jax", "step_s"))


def test_operations_of_products_and_convolutions():
    assert operations("MatMul", [[5, 2, 3], [3, 4]], [[5, 2, 4]], {}) == pytest.approx(2 * 5 * 2 * 3 * 4)
    assert operations("FusedMatMul", [[5, 2, 3], [5, 3, 4]], [[5, 2, 4]], {}) == pytest.approx(2 * 5 * 2 * 3 * 4)
    assert operations("MatMul", [[1, 2, 3], [5, 3, 4]], [[5, 2, 4]], {}) == pytest.approx(2 * 5 * 2 * 3 * 4)
    assert operations("MatMul", [[5, 2, 3], [1, 3, 4]], [[5, 2, 4]], {}) == pytest.approx(2 * 5 * 2 * 3 * 4)
    assert operations("Product", [[5, 2, 3], [4, 3], [4]], [[5, 2, 4]], {"left": 0}) == pytest.approx(2 * 5 * 2 * 3 * 4)
    assert operations("Product", [[10, 3], [10, 4]], [[3, 4]], {"left": 1}) == pytest.approx(2 * 10 * 3 * 4)
    image, filtered, direct = [2, 3, 9, 9], [2, 8, 7, 7], 2 * (2 * 8 * 7 * 7) * 27
    assert operations("Conv", [image, [8, 3, 3, 3]], [filtered], {}) == direct
    assert operations("Conv3x3", [image, [8, 3, 3, 3]], [filtered], {}) == direct
    assert operations("Conv3x3", [image, [3, 8, 3, 3]], [filtered], {"turned": 1}) == direct
    small, weights = [2, 8, 5, 5], [8, 1, 3, 3]
    assert operations("Depthwise", [[2, 8, 9, 9], weights], [small], {"turned": 0}) == 2 * (2 * 8 * 5 * 5) * 9
    assert operations("Depthwise", [small, weights], [[2, 8, 9, 9]], {"turned": 1}) == 2 * (2 * 8 * 5 * 5) * 9
    assert operations("ConvWeightGrad", [image, filtered], [[8, 3, 3, 3]], {}) == direct
    assert operations("Add", [[2], [2]], [[2]], {}) == 0
    weights = [[3, 4]] * 2
    assert operations("Momentum", [[3, 4], [0], [3, 4], [], [3], [10, 3], [10, 4]], weights, {}) == 2 * 10 * 3 * 4
    assert operations("Momentum", [[3, 4], [3, 4], [3, 4], [], [3]], weights, {}) == 0


def test_operations_of_attention_and_recurrences():
    """Of 2 × 5 heads: 7 queries and 11 keys of 3 columns, values of 4."""
    q, k, v, y = [2, 7, 5, 3], [2, 5, 3, 11], [2, 11, 5, 4], [2, 7, 5, 4]
    order = {"order": [0, 2, 1, 3, 0, 1, 3, 2] + [0, 2, 1, 3] * 6}
    pairs = 2 * 5 * 7 * 11
    assert operations("Attention", [q, k, v, []], [y], order) == 2 * pairs * (3 + 4)
    assert operations("AttentionGrad", [y, q, k, v, []], [q, k, v], order) == 2 * pairs * (3 * 3 + 2 * 4)
    assert operations("Attention", [[5, 11, 3]] * 3, [[5, 11, 3]], {"order": [0, 1, 2, 3] * 4}) == 4 * 5 * 121 * 3
    product, other = CODES.index("PRODUCT"), [0, 900, *[0] * 7, 900]
    program = {"steps": [product, 512, *[0] * 7, 128, *other, product, 32, *[0] * 7, 64]}
    steps = [[50, 32, 512], [512], [512, 128], [32, 64]]
    assert operations("Recurrence", steps, [[50, 32, 128]], program) == 2 * 50 * 32 * (128 * 512 + 64 * 32)


def _program(values, steps):
    """The attributes of a program, of (kind, place) and (operation, written, read …)."""
    numbers = [n for kind, place in values for n in (KINDS.index(kind), 1, place, 0)]
    rows = [(CODES.index(code), 1, *at, *[-1] * (4 - len(at)), 0, 0, 0, 0) for code, *at in steps]
    return {"values": numbers, "steps": [n for row in rows for n in row]}


def test_steps_of_programs_count_by_the_numbers_that_they_give():
    """x·σ(b) and its sum, with one b for each row."""
    values = [("FIXED", 0), ("FIXED", 1), ("REGISTER", 0), ("RESULT", 0), ("RESULT", 1)]
    program = _program(values, [("SIGMOID", 2, 1), ("MUL", 3, 0, 2), ("SUM", 4, 3, 1, 0)])
    assert arithmetic("Elementwise", [[6, 8], [6, 1]], [[6, 8], [6, 1]], program) == (6, 6, 0, 2 * 48)
    assert arithmetic("Exp", [[6, 8]], [[6, 8]], {}) == (48, 0, 0, 0)
    assert arithmetic("Sqrt", [[6, 8]], [[6, 8]], {}) == (0, 0, 48, 0)
    assert arithmetic("Mul", [[6, 8], [8]], [[6, 8]], {}) == (0, 0, 0, 48)
    assert arithmetic("Transpose", [[6, 8]], [[8, 6]], {}) == (0, 0, 0, 0)
    order = {"order": [0, 2, 1, 3, 0, 1, 3, 2] + [0, 2, 1, 3] * 6}
    q, k, v, y = [2, 7, 5, 3], [2, 5, 3, 11], [2, 11, 5, 4], [2, 7, 5, 4]
    assert arithmetic("Attention", [q, k, v, []], [y], order) == (2 * 5 * 7 * 11, 0, 0, 0)
    assert arithmetic("AttentionGrad", [y, q, k, v, []], [q, k, v], order) == (2 * 5 * 7 * 11, 0, 0, 0)


def test_the_least_time_is_that_of_what_takes_longest():
    machine = Machine(rate=100.0, function=3.0, quotient=2.0, root=5.0, bandwidths={1 << 20: 1000.0})

    def least(op, inputs, outputs):
        return least_time(op, *([("float", shape) for shape in some] for some in (inputs, outputs)), {}, machine)

    assert least("MatMul", [[2, 30], [30, 4]], [[2, 4]]) == pytest.approx(2 * 2 * 30 * 4 / 100)
    assert least("Exp", [[5]], [[5]]) == 15
    assert least("Sigmoid", [[5]], [[5]]) == 25
    assert least("Sqrt", [[5]], [[5]]) == 25
    assert least("Add", [[5], [5]], [[5]]) == pytest.approx(5 * 2 / 100)
    assert least("Transpose", [[50, 9]], [[9, 50]]) == pytest.approx(2 * 450 * 4 / 1000)
    assert least("Reshape", [[50, 9]], [[9, 50]]) == 0
    update = [[50, 9], [50, 9], [50, 9], [], [3]]
    assert least("Momentum", update, [[50, 9]] * 2) == least("Momentum", [*update, [90, 90]], [[50, 9]] * 2)
    rows = [[7, 3], [20, 3], [20]]  # added to a table of seven rows
    assert least("GatherGrad", rows, [[7, 3]]) == pytest.approx((20 * 3 + 20 + 7 * 3) * 4 / 1000)


def test_an_environment_that_cannot_be_had_says_why(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(Missing, match=r"needs a C\+\+ compiler"):
        environment("own-compiler")
