"""onnx_ir and onnx_shape_inference are imported without sympy, and use it like sympy itself when they need it."""

import sys

from onnxgrad import subprocesses

DERIVED = """
import sys
import onnx
import onnxgrad
model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 4] x, float[4, 3] w) => (float[N, 3] y) { h = MatMul (x, w) y = Tanh (h) }''')
onnxgrad.vjp(model, wrt=["x", "w"])
assert "sympy" not in sys.modules, "sympy was imported"
"""

TRAINED = """
import sys
import numpy as np
import onnx
import onnxgrad
model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    g (float[N, T, 12] x) => (float[N, T, 12] y) <float[12, 12] w = {WEIGHTS}, int64[4] heads = {0, 0, 3, -1},
        int64[3] merged = {0, 0, 12}, int64[1] last = {12}, int64[2] times = {2, 1}> {
        h = MatMul (x, w) a = Reshape (h, heads) b = Mul (a, a) rows = Reshape (b, merged)
        n = Shape <start = 0, end = 1> (x) t = Shape <start = 1, end = 2> (x) m = Mul (n, t)
        flat = Concat <axis = 0> (m, last) f = Reshape (rows, flat) z = Tanh (f) s = Shape (x) u = Reshape (z, s)
        twice = Concat <axis = 0> (f, f) tiled = Tile (f, times)
        y = Add (u, h) }'''.replace("WEIGHTS", ", ".join(["0.1"] * 144)))
trainer = onnxgrad.Trainer(model, loss="cross_entropy")
trainer.machine.step({"x": np.ones((2, 3, 12), np.float32), "labels": np.zeros((2, 3), np.int64)})
assert "sympy" not in sys.modules, "sympy was imported"
"""

OPTIMIZED = """
import sys
import onnx
from onnxgrad.runtime import Session
Session(onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 32, 8, 8] x, float[32, 32, 4, 4] w) => (float[N, 32, 16, 16] y) {
        y = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w) }'''))
assert "sympy" not in sys.modules, "sympy was imported"
"""

COMPUTED = """
import onnx_ir as ir
dim = ir.SymbolicDim("max(n, 3) // 2") + ir.SymbolicDim("m")
assert dim.evaluate({"n": 8, "m": 2}) == 6
import sympy
assert sys.modules["sympy"] is sympy and isinstance(dim._expr, sympy.Expr)
assert ir.SymbolicDim(sympy.Symbol("k") + 1).value == "k + 1"
import onnx_shape_inference as osi
from onnx_shape_inference import _constraints
assert _constraints.sympy is sympy
osi.infer_symbolic_shapes(ir.from_proto(model))
from onnxgrad._lazy_sympy import SympyFunction
for name, module in list(sys.modules.items()):
    if name.startswith(("onnx_ir", "onnx_shape_inference")):
        left = {key for key, held in vars(module).items() if isinstance(held, SympyFunction)}
        tables = {key for key, held in vars(module).items() if isinstance(held, (set, frozenset, tuple, list))
                  and any(isinstance(each, SympyFunction) for each in held)}
        assert not left | tables, (name, left, tables)
"""


def run(code):
    found = subprocesses.run([*subprocesses.PYTHON, "-c", code], text=True)
    assert found.returncode == 0, found.stderr


def test_a_derivation_does_without_sympy():
    run(DERIVED)


def test_a_step_does_without_sympy():
    run(TRAINED)


def test_a_transposed_convolution_in_blocks_does_without_sympy():
    run(OPTIMIZED)


def test_symbolic_dimensions_are_computed_by_sympy():
    run(DERIVED + COMPUTED)


def test_a_version_that_needs_more_of_it_gets_sympy(tmp_path):
    (tmp_path / "onnx_ir.py").write_text("import sympy\nzero = sympy.S.Zero\nloaded = True\n")
    run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import onnxgrad, onnx_ir; assert onnx_ir.zero == 0")


def test_sympy_comes_first_where_it_was_imported_first():
    run("import sympy, sys, onnxgrad; import onnx_ir; assert onnx_ir._core.sympy is sympy is sys.modules['sympy']")


def test_this_process_has_no_finder_that_waits():
    assert sys.modules["onnx_ir"].__spec__.loader.__class__.__name__ == "SourceFileLoader"
