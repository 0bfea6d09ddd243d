"""Models whose declarations lie are refused, and no rule is blamed for it (see `tests.fuzz.mutants`)."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import BadInput
from onnxgrad.check import check
from onnxgrad.errors import RuleError
from onnxgrad.model_io.read import read_proto
from onnxgrad.runtime import Session
from onnxgrad.training import attach, compile_step
from onnxgrad.training.data.fields import Field
from onnxgrad.training.measure.readiness import readiness
from tests.commands import command
from tests.fuzz import mutants


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 200), marks=pytest.mark.complete)], ids=str)
def test_mutants(seeds):
    models = mutants.sources()
    outcomes = Counter(mutants.judged(mutants.mutant(seed, models)) for seed in seeds)
    assert outcomes["differentiated"] > len(seeds) // 5
    assert outcomes["BadInput"] > len(seeds) // 5


def test_a_failing_rule_is_not_passed_over(monkeypatch):
    """The judge can fail: an error of a rule comes through."""

    def fails(model, **names):
        raise RuleError("the rule failed")

    monkeypatch.setattr(mutants, "vjp", fails)
    models = mutants.sources()
    with pytest.raises(RuleError):
        [mutants.judged(mutants.mutant(seed, models)) for seed in range(20)]
    assert not issubclass(RuleError, BadInput)


HEAD = '<ir_version: 10, opset_import: ["": 18]> '
NO_RESULT = """g (bool c) => (float[5] y) { y = If (c) <
    then_branch = t () => (float[5] a) { a = Constant<value = float[5] {1, 2, 3, 4, 5}>() },
    else_branch = e () => () { b = Constant<value = float[5] {5, 4, 3, 2, 1}>() }> }"""
CONTRADICTS = "g (float[N,5] x) => (float[N,7] y) <float[5,3] w> { y = Gemm(x, w) }"


def _with_weight(text: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(HEAD + text.replace(" <float[5,3] w>", ""))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((5, 3), np.float32), "w"))
    return proto


@pytest.mark.parametrize("judge", [check, readiness, lambda m: attach(m, loss="mse")])
def test_a_branch_without_results(judge):
    with pytest.raises(BadInput, match=r"If node 'y'.*1 results, and its else_branch has 0"):
        judge(onnx.parser.parse_model(HEAD + NO_RESULT))


def test_a_training_step_of_a_model_that_contradicts_itself():
    proto = attach(_with_weight(CONTRADICTS), loss="mse")
    with pytest.raises(BadInput, match=r"the model is not valid: .*Gemm.*\(3\) vs \(7\)"):
        compile_step(proto)
    with pytest.raises(BadInput, match=r"the model is not valid: .*Gemm") as raised:
        readiness(_with_weight(CONTRADICTS))
    assert "\n" not in str(raised.value)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "line",
    ["check", "check --train", "grad --wrt x -o {}/g.onnx", "train --data {}/d.npz --loss mse -o {}/t.onnx"],
)
def test_one_message_of_each_command(tmp_path, line):
    onnx.save(_with_weight(CONTRADICTS), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((4, 5), np.float32), y=np.ones((4, 7), np.float32))
    name, *options = line.split()
    done = command(name, tmp_path / "m.onnx", *(o.replace("{}", str(tmp_path)) for o in options))
    assert done.returncode == 2
    assert done.stderr.startswith("error: the ")
    assert done.stderr.count("Gemm") >= 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("scanned", [-3, 0, 3])
def test_a_scan_of_no_operand_and_of_more_than_it_has(scanned):
    """Mutant 30199: no pass counts the states of a Scan that has fewer than none."""
    proto = onnx.parser.parse_model(
        HEAD
        + f"""g (float[2] h, float[5,2] x) => (float[2] y, float[5,2] s) {{
        y, s = Scan(h, x) <num_scan_inputs = {scanned}, body = b (float[2] a, float[2] e) => (float[2] b, float[2] o) {{
            b = Add(a, e) o = Exp(b) }}> }}"""
    )
    for judge in (lambda m: Session(read_proto(m)), check):
        with pytest.raises(BadInput):
            judge(proto)


def test_a_product_with_one_operand_is_not_loaded():
    proto = onnx.parser.parse_model(HEAD + "g (float[2,3] x) => (float[2,3] y) { t = Transpose(x) y = MatMul(t) }")
    with pytest.raises(BadInput, match="ONNX Runtime cannot load the model"):
        Session(read_proto(proto))


def test_an_input_of_no_type_takes_no_data():
    value = ir.Value(name="ends", type=ir.TensorType(ir.DataType.UNDEFINED), shape=ir.Shape([2]))
    with pytest.raises(BadInput, match="'ends' declares no dtype"):
        Field.of(value)


def test_quantized_numbers_of_other_sizes_are_no_fault_of_a_rule(tmp_path):
    """Mutant 176 of the command: a cotangent of whole numbers is of floats, and its shape still tells of a misfit."""
    text = "g (float[N,3] x) => (float[N,5] y) { h = MatMul(x, w) y = Mul(h, h) }"
    proto = onnx.parser.parse_model(HEAD + text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3), np.float32), labels=np.ones((4, 5), np.float32))
    options = ("--data", tmp_path / "d.npz", "--qat", "--loss", "mse", "--epochs", "1", "-o", tmp_path / "q.onnx")
    done = command("quantize", tmp_path / "m.onnx", *options)
    assert done.returncode == 2, done.stderr
    assert "a bug in a rule" not in done.stderr
    assert "error: the model is not valid: " in done.stderr
