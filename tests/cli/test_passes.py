"""``onnxgrad passes``: what is listed, of models and of training steps."""

import dataclasses
import json
import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.cli.app import build
from onnxgrad.ir.passes import LEFT_OUT, NO_SITE
from onnxgrad.runtime import session as sessions
from onnxgrad.runtime.passes import NAMES, OPTIMIZATION, STEP_NAMES
from onnxgrad.training import attach


@pytest.fixture
def model(tmp_path):
    """A Transpose of a product with a transposed operand, and weights."""
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["t", "x"], ["p"]),
        helper.make_node("Transpose", ["p"], ["y"], perm=[1, 0]),
    ]
    ends = (helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in (("x", [4, 5]), ("y", [5, 3])))
    x, y = ends
    weights = [numpy_helper.from_array(np.ones((4, 3), np.float32), "w")]
    between = [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in (("t", [3, 4]), ("p", [3, 5]))]
    graph = helper.make_graph(nodes, "g", [x], [y], weights, value_info=between)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def run(*args):
    with pytest.raises(SystemExit) as end:
        build()([*map(str, args)], prog_name="onnxgrad")
    return end.value.code


def listed(capsys, *args):
    assert run("passes", *args, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    return found, {r["name"]: r for r in found["passes"]}


def test_a_model(model, capsys):
    found, passes = listed(capsys, model, "--target", "portable")
    assert (found["graph"], found["target"]) == ("model", "portable")
    assert (*STEP_NAMES, *passes) == NAMES
    turned = passes["turned_products"]
    assert (turned["places"], turned["reason"]) == (1, "")
    assert turned["nodes_before"] > turned["nodes_after"]
    assert passes["known_rows"]["reason"] == NO_SITE
    assert passes["products"]["reason"] == "target is 'portable'"


def test_a_pass_that_is_left_out(model, capsys):
    _, passes = listed(capsys, model, "--target", "portable", "--without", "turned_products")
    assert (passes["turned_products"]["places"], passes["turned_products"]["reason"]) == (0, LEFT_OUT)
    assert run("passes", model, "--without", "turned") == 2
    assert "there is no pass 'turned'" in capsys.readouterr().err


def test_a_training_step(model, capsys):
    onnx.save(attach(model, loss="mse", optimizer="adam", labels="labels"), model)
    found, passes = listed(capsys, model, "--target", "portable")
    assert found["graph"] == "training step"
    assert tuple(passes) == NAMES
    assert passes["step_order"]["places"] == 1
    assert run("passes", model, "--target", "portable") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in NAMES)
    assert "none found: Scans of blocks of rows" in table


def test_a_pass_that_fails(model, capsys, monkeypatch):
    def fail(model, setting):
        raise ZeroDivisionError("a defect")

    changed = [dataclasses.replace(p, apply=fail) if p.name == "turned_products" else p for p in OPTIMIZATION]
    monkeypatch.setattr(sessions, "OPTIMIZATION", changed)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("passes", model, "--target", "portable", "--json") == 0
    out, err = capsys.readouterr()
    assert "'turned_products' failed" in err
    passes = {r["name"]: r for r in json.loads(out)["passes"]}
    assert passes["turned_products"]["reason"] == "failed: ZeroDivisionError: a defect"


def test_a_pass_that_fails_on_a_model_that_is_not_valid(tmp_path, capsys, monkeypatch):
    """A product with one operand: the pass for products unpacks two."""
    text = "g (float[2,3] x) => (float[2,3] y) { t = Transpose(x) y = MatMul(t) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}'), tmp_path / "m.onnx")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    assert run("passes", tmp_path / "m.onnx", "--target", "native") == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: the model is not valid: ")
    assert "MatMul" in err
    assert "report" not in out + err
