"""Files that commands write are loaded and run in a subprocess before success is told."""

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import trial
from onnxgrad.runtime.trial import check_runs
from tests.cli.said import said

GOOD = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x) => (float[N, 3] y) { y = Tanh (x) }'
ENDS = "import os; {}; os.kill(os.getpid(), 11)"


@pytest.fixture
def good(tmp_path):
    onnx.save(onnx.parser.parse_model(GOOD), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("float[N, 3] x", "y = Tanh (x)"),
        ("float[7] x", "y = Reshape (x, two)"),  # no size fits
        ("float[K, M, L] x", "y = Conv (x, x)"),
        ("int64[N] x", "y = Gather (two, x)"),
    ],
)
def test_inputs_that_do_not_fit_refuse_no_file(tmp_path, head, body):
    graph = f"g ({head}) => (y) <int64[1] two = {{2}}> {{ {body} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {graph}')
    proto.graph.output[0].type.tensor_type.elem_type = proto.graph.input[0].type.tensor_type.elem_type
    onnx.save(proto, tmp_path / "m.onnx")
    check_runs(tmp_path / "m.onnx")


@pytest.mark.parametrize("when", ["loads", "runs"])
def test_a_file_that_ends_the_runtime_is_an_error(good, monkeypatch, when):
    monkeypatch.setattr(trial, "_SCRIPT", ENDS.format("print('loaded', flush=True)" if when == "runs" else "0"))
    with pytest.raises(BadInput, match=f"SIGSEGV when it {when} '.*m.onnx'"):
        check_runs(good, good)


def test_a_file_that_is_refused_is_an_error_unless_its_source_is(good, tmp_path):
    bad = onnx.parser.parse_model(GOOD.replace("Tanh", "Bernoulli"))
    bad.graph.node[0].input[0] = "nothing"
    onnx.save(bad, tmp_path / "bad.onnx")
    with pytest.raises(BadInput, match="refuses"):
        check_runs(tmp_path / "bad.onnx", good)
    with pytest.warns(UserWarning, match="cannot run"):
        check_runs(tmp_path / "bad.onnx", tmp_path / "bad.onnx")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "line",
    [
        "grad PLACE/m.onnx --wrt x -o PLACE/o.onnx",
        "lower PLACE/m.onnx -o PLACE/o.onnx",
        "quantize PLACE/w.onnx --data PLACE/d.npz -o PLACE/o.onnx",
        "train PLACE/w.onnx --data PLACE/d.npz --loss mse --epochs 1 -o PLACE/o.onnx",
        "explain PLACE/m.onnx PLACE/d.npz --save-model PLACE/o.onnx -o PLACE/e.npz",
        "export-step PLACE/w.onnx --loss mse -o PLACE/step",
    ],
)
def test_commands_try_what_they_write(good, tmp_path, monkeypatch, line):
    text = GOOD.replace("{ y = Tanh (x) }", "<float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { y = MatMul (x, w) }")
    onnx.save(onnx.parser.parse_model(text), tmp_path / "w.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((32, 3), np.float32), labels=np.ones((32, 3), np.float32))
    monkeypatch.setattr(trial, "_SCRIPT", ENDS.format("0"))
    assert "ONNX Runtime ends with SIGSEGV" in said(tmp_path, line, code=2)
