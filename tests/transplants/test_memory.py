"""The memory of a transplant: weights are read when they are needed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

WIDTH, LAYERS = 1024, 20
_PROGRAM = """
import re, sys
from pathlib import Path
import onnxgrad
from onnxgrad.training import Trainer
import onnxgrad.transplants.transplant

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e3

before = peak()
onnxgrad.transplant("trained.onnx", "into.onnx", base="base.onnx", output="out.onnx")
print(peak() - before)
"""


def chain(path, seed=None, turned=False):
    """A chain of layers; `seed` moves its weights, and `turned` stores them the other way."""
    random, moved = np.random.default_rng(0), np.random.default_rng(seed)
    nodes, held, x = [], [], "x"
    for i in range(LAYERS):
        array = random.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
        if seed is not None:
            array += 0.003 * moved.standard_normal((WIDTH, WIDTH), np.float32)
        held.append(numpy_helper.from_array(np.ascontiguousarray(array.T if turned else array), f"w{i}"))
        kernel = f"w{i}"
        if turned:
            nodes.append(helper.make_node("Transpose", [kernel], [f"t{i}"], perm=[1, 0]))
            kernel = f"t{i}"
        nodes += [helper.make_node("MatMul", [x, kernel], [f"p{i}"]), helper.make_node("Tanh", [f"p{i}"], [f"y{i}"])]
        x = f"y{i}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", WIDTH]) for n in ("x", x)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_a_transplant_needs_less_than_its_files(tmp_path):
    """Three files of 84 MB: the largest memory is that of reading one of them."""
    chain(tmp_path / "base.onnx")
    chain(tmp_path / "trained.onnx", seed=1)
    chain(tmp_path / "into.onnx", turned=True)
    size = sum(Path(tmp_path / f"{n}.onnx").stat().st_size for n in ("base", "trained", "into")) / 1e6
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.2 * size
