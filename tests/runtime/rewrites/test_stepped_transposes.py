"""Transposes of several axes in two steps, and of short rows by a Gather: the same numbers."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized

#: Shapes (N: open) and permutations that are written in two steps.
STEPPED = {
    "columns, rows, channels": (("N", 35, 7, 9), (0, 3, 2, 1)),
    "back": (("N", 7, 9, 35), (0, 3, 2, 1)),
    "blocks of pixels": ((3, 5, 3, 2, 25, 29), (0, 1, 4, 2, 5, 3)),
    "their channels": ((3, 5, 25, 3, 29, 2), (0, 1, 3, 5, 2, 4)),
    "reversed": ((37, 29, 31), (2, 1, 0)),
    "both matrices": ((3, "N", 31, 29), (1, 0, 3, 2)),
}
#: Those that are a Gather.
GATHERED = {
    "heads": (("N", 35, 4, 16), (0, 2, 1, 3)),
    "and back": (("N", 4, 750, 3), (0, 2, 1, 3)),
    "all rows": ((40, 100, 9), (1, 0, 2)),
    "more axes": ((2, "N", 5, 31, 16), (0, 1, 3, 2, 4)),
}
CASES = [(2, *case) for case in STEPPED.values()] + [(0, *case) for case in GATHERED.values()]
LEFT = {
    "a matrix": ((270, 180), (1, 0)),
    "one axis": (("N", 35, 7, 9), (0, 2, 3, 1)),
    "rows": ((17, 15, 17, 9), (2, 1, 0, 3)),
    "few numbers": ((31, 29, 31), (2, 1, 0)),
    "longer rows": (("N", 35, 8, 17), (0, 2, 1, 3)),
    "an open axis": (("N", "M", 64, 16), (0, 2, 1, 3)),
    "others": (("N", 35, 8, 16), (1, 0, 2, 3)),
    "few rows": ((31, 66, 16), (1, 0, 2)),
    "pairs": (("N", 4, 750, 2), (0, 2, 1, 3)),
    "too many": ((9, 500, 16), (1, 0, 2)),
}


def _model(shape, perm):
    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float[{",".join(map(str, shape))}] x) => (float[] z)
        {{ a = Abs (x) y = Transpose <perm = [{",".join(map(str, perm))}]> (a) z = Neg (y) }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def _transposes(model):
    return [n.op_type for n in optimized(model).graph].count("Transpose")


@pytest.mark.parametrize("n", [0, 2, 3])
@pytest.mark.parametrize(("steps", "shape", "perm"), CASES, ids=[*STEPPED, *GATHERED])
def test_numbers_of_numpy(steps, shape, perm, n):
    model = _model(shape, perm)
    assert _transposes(model) == steps
    x = np.random.default_rng(0).standard_normal([n if d == "N" else d for d in shape]).astype(np.float32)
    got = Session(model, Options(threads=1)).run({"x": x})["z"]
    np.testing.assert_array_equal(got, -abs(x).transpose(perm), strict=True)


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_what_stays(case):
    assert _transposes(_model(*case)) == 1
