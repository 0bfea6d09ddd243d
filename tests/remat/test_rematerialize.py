"""Derived models within a budget of memory."""

from __future__ import annotations

import json
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.remat import amount, sizes, value_sizes
from tests.commands import command
from tests.large_models import gpt
from tests.models import assert_no_traps
from tests.training.step.test_memory_budget import deep

ROWS, WIDTH, LAYERS = 256, 16, 10


def peak(proto: onnx.ModelProto, feeds, folder: Path, reuse: bool) -> tuple[int, list[np.ndarray]]:
    """The peak memory of results in a stock session, and the outputs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_mem_pattern = False
    options.enable_mem_reuse = reuse
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "run")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, feeds)
    told = [
        e.get("args", {}).get("mem_bytes_requested_in_use")
        for e in json.loads(Path(session.end_profiling()).read_text())
    ]
    return max(int(n) for n in told if n is not None), outputs


def test_sizes_by_shapes_are_those_that_inference_finds(monkeypatch):
    model = ir.from_proto(onnxgrad.value_and_grad(gpt(1), wrt=["w3", "w4"], of="y"))
    found = value_sizes._declared_sizes(model, {}, 64)
    monkeypatch.setattr(value_sizes, "_declared_sizes", lambda *_: None)
    assert found is not None
    assert found == sizes(model, {}, 64)
    assert len(found) > 50
    assert all(size > 0 for value, size in found.items() if value.dtype == ir.DataType.FLOAT)


def least(model: onnx.ModelProto) -> int:
    with pytest.raises(BadInput, match="use at least") as refused:
        onnxgrad.rematerialize(model, 64, dims={"N": ROWS})
    return amount(str(refused.value).split("at least ")[1].split(" at a time")[0])


@pytest.mark.parametrize("how", ["grad", "value_and_grad", "vjp"])
def test_stock_sessions_take_less(how, tmp_path):
    """With and without the reuse of memory that sessions have by default: the same bits in 55 % of the memory."""
    derived = getattr(onnxgrad, how)(deep(LAYERS, WIDTH), wrt=[f"w{i}" for i in range(LAYERS)])
    before = derived.SerializeToString()
    model, plan = onnxgrad.rematerialize(derived, least(derived), dims={"N": ROWS})
    assert derived.SerializeToString() == before
    assert onnxgrad.signature(model) == onnxgrad.signature(derived)
    onnx.checker.check_model(model, full_check=True)
    assert_no_traps(model)
    names = onnxgrad.signature(model).cotangents
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((ROWS, WIDTH)).astype(np.float32) for n in ["x", *names.values()]}
    for reuse in (True, False):
        most, expected = peak(derived, feeds, tmp_path, reuse)
        taken, found = peak(model, feeds, tmp_path, reuse)
        assert taken < 0.55 * most
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got, want)
    handed_out = sum(array.nbytes for array in expected)
    assert taken - handed_out <= plan.predicted * 1.15


def test_it_can_be_differentiated_again():
    proto = deep(4, 4)
    gradient = onnxgrad.grad(proto, wrt="x")
    model, plan = onnxgrad.rematerialize(gradient, least(gradient), dims={"N": ROWS})
    assert plan.nodes
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    found = [
        onnxruntime.InferenceSession(onnxgrad.grad(m, wrt="x", of="x_grad").SerializeToString()).run(None, {"x": x})[0]
        for m in (gradient, model)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_kinds_of_models(tmp_path):
    derived = onnxgrad.grad(deep(3, 4), wrt="x")
    onnx.save(derived, tmp_path / "m.onnx")
    for given, kind in (
        (derived, onnx.ModelProto),
        (tmp_path / "m.onnx", onnx.ModelProto),
        (ir.from_proto(derived), ir.Model),
    ):
        model, plan = onnxgrad.rematerialize(given, "1GB", dims={"N": 8})
        assert isinstance(model, kind)
        assert not plan.nodes
    model, plan = onnxgrad.rematerialize(deep(3, 4), "1GB", dims={"N": 8})  # no derivative: nothing is lost
    assert not plan.nodes


def test_dimensions_must_be_known():
    derived = onnxgrad.grad(deep(3, 4), wrt="x")
    with pytest.raises(BadInput, match=r"dims=\{'N': 64\}"):
        onnxgrad.rematerialize(derived, "1GB")


def test_control_flow_runs_once():
    """A Loop is one node, which is not run again; what is around it is."""
    proto = deep(8, 8)
    body = onnx.parser.parse_graph("""
        body (int64 i, bool p, float[N, 8] a) => (bool q, float[N, 8] b) { q = Identity(p) b = Tanh(a) }""")
    proto.graph.node[12].input[0] = "looped"
    before = proto.graph.node[11].output[0]
    count = onnx.numpy_helper.from_array(np.array(3), "count")
    proto.graph.initializer.append(count)
    proto.graph.node.insert(12, onnx.helper.make_node("Loop", ["count", "", before], ["looped"], body=body))
    derived = onnxgrad.grad(proto, wrt=["w0", "w7"])
    model, plan = onnxgrad.rematerialize(derived, least(derived), dims={"N": ROWS})
    assert plan.nodes
    loops = [sum(n.op_type in ("Loop", "Scan") for n in m.graph.node) for m in (derived, model)]
    assert loops[0] == loops[1]
    x = np.random.default_rng(0).standard_normal((ROWS, 8)).astype(np.float32)
    one, other = (onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x}) for m in (derived, model))
    for got, want in zip(other, one):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_branches_read_what_was_made_anew():
    """An If whose branches read values of around it, forward and backward: they read the same numbers."""
    proto = deep(8, 8)
    graph = proto.graph
    then = onnx.parser.parse_graph("t () => (float[N, 8] r) { r = Mul(a2, a2) }")
    other = onnx.parser.parse_graph("e () => (float[N, 8] s) { s = Tanh(a2) }")
    at = next(k for k, n in enumerate(graph.node) if n.name == "mul3")
    graph.node[at].input[0] = "picked"
    graph.node.insert(at, onnx.helper.make_node("If", ["which"], ["picked"], then_branch=then, else_branch=other))
    graph.input.append(onnx.helper.make_tensor_value_info("which", onnx.TensorProto.BOOL, []))
    derived = onnxgrad.grad(proto, wrt=["w0", "w5"])
    model, plan = onnxgrad.rematerialize(derived, least(derived), dims={"N": ROWS})
    assert plan.nodes
    assert sum(n.op_type == "If" for n in model.graph.node) == sum(n.op_type == "If" for n in derived.graph.node)
    x = np.random.default_rng(0).standard_normal((ROWS, 8)).astype(np.float32)
    for which in (True, False):
        feeds = {"x": x, "which": np.array(which)}
        one, two = (onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds) for m in (derived, model))
        for got, want in zip(two, one):
            np.testing.assert_array_equal(got, want)


def test_by_the_command(tmp_path):
    onnx.save(deep(8, 8), tmp_path / "m.onnx")
    derived = onnxgrad.grad(deep(8, 8), wrt=["w0"])

    def run(*how: str) -> subprocess.CompletedProcess[str]:
        return command("grad", "m.onnx", "--wrt", "w0", "-o", "g.onnx", "--memory", *how, cwd=tmp_path)

    done = run(str(least(derived)), "--dim", f"N={ROWS}")
    assert done.returncode == 0, done.stderr
    assert "recomputed" in done.stdout
    for wrong, message in ((["100", "--dim", "N=64"], "at least"), (["1GB", "--dim", "N"], "N=64"), (["1GB"], "'N'")):
        done = run(*wrong)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_elements_of_long_vectors_are_not_followed():
    """An inference that notes the elements of vectors, in case they are sizes, takes gigabytes for long ones."""
    net = """<ir_version: 10, opset_import: ["": 21]> g (float[N] x, float[N] w) => (int64[1, K] y)
        { v = Mul (x, w)  whole = Cast <to = 7> (v)  double = Add (whole, whole)  y = NonZero (double) }"""
    model = ir.from_proto(onnx.parser.parse_model(net))
    tracemalloc.start()
    known = {v.name: size for v, size in sizes(model, {"N": 1 << 20}).items()}
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert known == {"v": 4 << 20, "whole": 8 << 20, "double": 8 << 20, "y": 0}
    assert most < 1 << 20
