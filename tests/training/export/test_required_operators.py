"""The list of operators for a reduced build of ONNX Runtime, as its own parser reads it."""

from __future__ import annotations

import onnx
from onnxruntime.tools.reduced_build_config_parser import parse_config

from onnxgrad.training import attach, export_step
from tests.training.models import classifier


def test_the_list_has_every_operator_of_every_model(tmp_path):
    export_step(attach(classifier(), loss="cross_entropy", optimizer="adamw", accumulate=True), tmp_path)
    operators, _ = parse_config(str(tmp_path / "required_operators.config"), False)
    listed = {op for by_opset in operators.values() for names in by_opset.values() for op in names}
    for path in tmp_path.glob("*.onnx"):
        assert {n.op_type for n in onnx.load(path).graph.node} <= listed
    assert set(operators) == {"ai.onnx"}
