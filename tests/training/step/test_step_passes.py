"""Optimizations of a step that fail while it is compiled: they are left out with a warning."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad import Options, Trainer
from onnxgrad.errors import BadInput, PassWarning
from onnxgrad.ir.passes import LEFT_OUT
from onnxgrad.runtime.passes import STEP_NAMES
from onnxgrad.training import compile_step
from onnxgrad.training.step import compile as steps
from onnxgrad.training.step import memory_budget, passes
from tests.training.graph.test_pool_order import net, order


def fails(defect):
    def apply(model, setting):
        if defect == "raises":
            raise IndexError("a defect")
        node = next(n for n in model.graph if n.op_type == "Relu")
        if defect == "leaves a reader":
            model.graph.meta["kept"] = ir.Node("", "Identity", [node.outputs[0]], num_outputs=1)
        elif defect == "changes a type":
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
        else:
            model.graph.remove(node)
            model.graph.append(node)
        return 1

    return apply


@pytest.mark.parametrize("defect", ["raises", "leaves a reader", "changes a type", "breaks the order"])
def test_a_pass_that_fails_is_left_out(defect, monkeypatch):
    plain = compile_step(net(), without=["pool_first"])
    monkeypatch.setattr(steps, "POOL_FIRST", dataclasses.replace(passes.POOL_FIRST, apply=fails(defect)))
    with pytest.warns(PassWarning, match="'pool_first' failed") as told:
        step = compile_step(net())
    assert len(told) == 1
    assert order(step) == ["Relu", "MaxPool"]
    assert ir.to_proto(step.model).SerializeToString() == ir.to_proto(plain.model).SerializeToString()


def test_an_order_that_fails_is_not_taken(monkeypatch):
    plain = compile_step(net(), without=["step_order"])

    def reverse(graph, size):
        nodes = list(graph)
        graph.remove(nodes)
        graph.extend(nodes[::-1])

    monkeypatch.setattr(memory_budget, "settle", reverse)
    with pytest.warns(PassWarning, match="'step_order' failed"):
        step = compile_step(net())
    assert [n.name for n in step.model.graph] == [n.name for n in plain.model.graph]


def test_reports():
    step = compile_step(net(), without=["row_results"])
    reports = {r.name: r for r in step.passes}
    assert reports["pool_first"].places == 1
    assert reports["row_results"].reason == LEFT_OUT
    assert reports["step_order"].places == 1
    assert tuple(reports) == STEP_NAMES


def test_the_switch_is_in_the_options():
    """Trainer(options=…) compiles its step without the passes that it leaves out."""
    options = Options(threads=1, without=("pool_first",))
    trainer = Trainer(net(), options=options)
    assert order(trainer.step) == ["Relu", "MaxPool"]
    assert order(Trainer(net(), options=Options(threads=1)).step) == ["MaxPool", "Relu"]


def test_a_number_of_queries_is_checked_first():
    with pytest.raises(BadInput, match="attention_rows is a number"):
        compile_step(net(), attention_rows=-1)
    assert np.isfinite(compile_step(net(), attention_rows=0).state["w"].initial.numpy()).all()
