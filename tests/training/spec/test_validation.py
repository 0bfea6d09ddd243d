"""Every rule of the specification for training information, violated one at a time and several at once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper, parser

from onnxgrad.errors import BadInput
from onnxgrad.training import ReferenceTraining, attach, compile_step, lower_gradients, validate
from onnxgrad.training.spec.validation import RULES
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import mlp
from tests.training.spec.test_graph_call import called
from tests.training.step.test_entries import BAD, spoiled, two_entries, with_initialization

FLOAT = onnx.TensorProto.FLOAT


def rules(model) -> list[str]:
    return [p.rule for p in validate(model)]


@pytest.mark.parametrize(
    "model",
    [
        mlp(),
        attach(mlp(), loss="mse", optimizer="adam"),
        spoiled(lambda info: None),
        two_entries(),
        two_entries(("p_", "q_")),
        with_initialization(),
        called(["x_1", "", "z_1"]),
    ],
)
def test_valid_models(model, tmp_path):
    assert validate(model) == []
    onnx.save(model, tmp_path / "m.onnx")
    assert validate(tmp_path / "m.onnx") == []


@pytest.mark.parametrize("case", [c for c in BAD if c != "nothing bound"])  # which is allowed, but nothing to compile
def test_what_compiling_refuses_is_reported(case):
    change, _ = BAD[case]
    problems = validate(spoiled(change))
    assert problems
    assert all("entry 0" in p.where for p in problems)


def _node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, name="bad", **attributes)


def _gradient_says(**said):
    def change(info):
        node = next(n for n in info.algorithm.node if n.op_type == "Gradient")
        for name, value in said.items():
            if name == "inputs":
                del node.input[:]
                node.input.extend(value)
            else:
                for a in [a for a in node.attribute if a.name == name]:
                    node.attribute.remove(a)
                node.attribute.append(helper.make_attribute(name, value))

    return change


def _holds(info, name, array):
    tensor = next(t for t in info.algorithm.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), name))


def _branches(info, name):
    branches = [
        helper.make_graph([_node("Exp", ["y"], [n])], n, [], [helper.make_tensor_value_info(n, FLOAT, ["N", 3])])
        for n in (name, f"not_{name}")
    ]
    info.algorithm.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    info.algorithm.node.append(helper.make_node("If", ["yes"], ["o"], then_branch=branches[0], else_branch=branches[1]))


CHANGES = {
    "key is computed": (lambda i: i.update_binding.add(key="h1", value="Vnew"), "key", "no initializer named 'h1'"),
    "key is an input": (lambda i: i.update_binding.add(key="x", value="Vnew"), "key", "no initializer named 'x'"),
    "value is internal": (lambda i: i.update_binding.add(key="V", value="g"), "value", "no output named 'g'"),
    "twice": (lambda i: i.update_binding.add(key="w2", value="Vnew"), "unique", "'w2' is bound twice, by entry 0"),
    "other shape": (
        lambda i: (
            i.algorithm.output[2].CopyFrom(helper.make_tensor_value_info("Vnew", FLOAT, [8, 2]))
            or i.update_binding.add(key="V", value="Vnew")
        ),
        "type",
        "shape [8, 3] cannot take one of shape [8, 2]",
    ),
    "other type": (lambda i: i.update_binding.add(key="T", value="new"), "type", "INT64 cannot take one of FLOAT"),
    "initialization with inputs": (
        lambda i: i.initialization.input.append(helper.make_tensor_value_info("seed", FLOAT, [])),
        "initialization",
        "it has inputs ('seed')",
    ),
    "initialization binds what is not": (
        lambda i: i.initialization_binding.add(key="w2", value="start"),
        "value",
        "no output named 'start'",
    ),
    "defined in both graphs": (
        lambda i: i.algorithm.node.append(_node("Exp", ["y"], ["h1"])),
        "ssa",
        "'h1' is defined in it and in the inference graph",
    ),
    "defined twice": (lambda i: i.algorithm.node.append(_node("Exp", ["y"], ["d"])), "ssa", "'d' is defined twice"),
    "weight of the same name": (
        lambda i: i.algorithm.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "w1")),
        "ssa",
        "'w1' is defined in it and",
    ),
    "read too early": (
        lambda i: i.algorithm.node.insert(0, _node("Exp", ["d"], ["early"])),
        "order",
        "Exp node 'bad' reads 'd', which is computed only after it",
    ),
    "read from nowhere": (
        lambda i: i.algorithm.node.append(_node("Exp", ["nothing"], ["o"])),
        "visibility",
        "reads 'nothing'",
    ),
    "output of no node": (lambda i: i.algorithm.output.add(name="ghost"), "visibility", "its output 'ghost'"),
    "unknown operator": (
        lambda i: i.algorithm.node.append(_node("Rocket", ["y"], ["o"])),
        "operator",
        "no such operator",
    ),
    "unknown training operator": (
        lambda i: i.algorithm.node.append(_node("Lion", ["y"], ["o"], domain=DOMAIN)),
        "operator",
        "no such operator in opset 1 of ai.onnx.preview.training",
    ),
    "domain that is not imported": (
        lambda i: i.algorithm.node.append(_node("Rocket", ["y"], ["o"], domain="space")),
        "operator",
        "imports no opset of 'space'",
    ),
    "inputs of an optimizer": (lambda i: i.algorithm.node[4].input.pop(), "operator", "it takes R, T and 3 per tensor"),
    "mode of an optimizer": (
        lambda i: next(a for a in i.algorithm.node[4].attribute if a.name == "mode").__setattr__("s", b"fast"),
        "operator",
        "not 'fast'",
    ),
    "attribute of an optimizer": (
        lambda i: i.algorithm.node[4].attribute.remove(
            next(a for a in i.algorithm.node[4].attribute if a.name == "alpha")
        ),
        "operator",
        "lacks the attribute 'alpha'",
    ),
    "attribute that is not": (
        lambda i: i.algorithm.node[0].attribute.append(helper.make_attribute("axis", 1)),
        "operator",
        "no attribute 'axis'",
    ),
    "stale name": (_gradient_says(y="loss_before"), "name", "no value named 'loss_before'"),
    "dependent variables": (
        _gradient_says(xs=["w2", "h3"], zs=["x", "labels"], inputs=["w2", "h3", "x", "labels"]),
        "gradient",
        "'h3' is computed from 'x'",
    ),
    "missing leaf": (_gradient_says(zs=["x"], inputs=["w2", "x"]), "gradient", "'loss' depends on 'labels' too"),
    "inputs of a Gradient": (_gradient_says(inputs=["w2"]), "gradient", "1 inputs for 1 xs and 2 zs"),
    "variable named twice": (
        _gradient_says(xs=["w2", "w2"], inputs=["w2", "w2", "x", "labels"]),
        "gradient",
        "'w2' is named twice in xs and zs",
    ),
    "variable in xs and in zs": (
        _gradient_says(zs=["w2", "x", "labels"], inputs=["w2", "w2", "x", "labels"]),
        "gradient",
        "'w2' is named twice in xs and zs",
    ),
    "nothing fed": (_gradient_says(inputs=["w2", "", "labels"]), "gradient", "nothing is fed for 'x'"),
    "outputs of a Gradient": (
        lambda i: i.algorithm.node[3].output.append("g2"),
        "gradient",
        "has 2 outputs for 1 xs",
    ),
    "y that is no float": (_gradient_says(y="T"), "gradient", "'T' is a tensor of int64; only floats have derivatives"),
    "x that is no float": (
        _gradient_says(xs=["w2", "T"], inputs=["w2", "T", "x", "labels"]),
        "gradient",
        "'T' is a tensor of int64; only floats have derivatives",
    ),
    "fed with another type": (
        _gradient_says(inputs=["T", "x", "labels"]),
        "gradient",
        "'w2' is a tensor of float32, and 'T', which is fed for it, one of int64",
    ),
    "domain of a draft": (
        lambda i: setattr(i.algorithm.node[4], "domain", "ai.onnx.training"),
        "operator",
        "the model imports no opset of 'ai.onnx.training'",
    ),
    "input of an optimizer left out": (
        lambda i: i.algorithm.node[4].input.__setitem__(3, ""),
        "operator",
        "its input 3 is left out",
    ),
    "outputs of an optimizer": (
        lambda i: i.algorithm.node[4].output.append("extra"),
        "operator",
        "it has 3 outputs; it gives 2 per tensor",
    ),
    "count that is no integer": (
        lambda i: _holds(i, "T", np.float32(0)),
        "type",
        "T is INT64, and 'T' is a tensor of FLOAT",
    ),
    "rate that is no float": (
        lambda i: _holds(i, "rate", np.int64(1)),
        "type",
        "R is FLOAT or DOUBLE, and 'rate' is a tensor of INT64",
    ),
    "several rates": (
        lambda i: _holds(i, "rate", np.float32([1, 2])),
        "type",
        "R is one number, and 'rate' has the shape [2]",
    ),
    "momentum of another shape": (
        lambda i: _holds(i, "V", np.zeros((8, 2), np.float32)),
        "type",
        "V is as X is, and 'V' has the shape [8, 2], 'w2' [8, 3]",
    ),
    "momentum of another type": (
        lambda i: _holds(i, "V", np.zeros((8, 3))),
        "type",
        "V is as X is, and 'V' is a tensor of DOUBLE, 'w2' one of FLOAT",
    ),
    "gradient of another tensor": (
        lambda i: i.algorithm.node[4].input.__setitem__(3, "w1"),
        "type",
        "G is as X is, and 'w1' has the shape [4, 8], 'w2' [8, 3]",
    ),
    "branch that hides a name": (lambda i: _branches(i, "h1"), "ssa", "'h1' is defined in it and in a graph around it"),
    "value is an input": (
        lambda i: i.update_binding.add(key="V", value="labels"),
        "value",
        "no output named 'labels'",
    ),
    "value is an initializer": (
        lambda i: i.update_binding.add(key="V", value="rate"),
        "value",
        "no output named 'rate'",
    ),
    "empty key": (lambda i: i.update_binding.add(key="", value="Vnew"), "key", "no initializer named ''"),
    "empty value": (lambda i: i.update_binding.add(key="V", value=""), "value", "no output named ''"),
    "initialization that reads a weight": (
        lambda i: i.initialization.CopyFrom(
            helper.make_graph(
                [_node("Exp", ["w2"], ["s"])], "i", [], [helper.make_tensor_value_info("s", FLOAT, [8, 3])]
            )
        ),
        "visibility",
        "Exp node 'bad' reads 'w2', which is defined nowhere that it can see",
    ),
    "initialization that binds an output of the algorithm": (
        lambda i: i.initialization_binding.add(key="w2", value="new"),
        "value",
        "no output named 'new'",
    ),
    "input that the inference graph has": (
        lambda i: i.algorithm.input.append(helper.make_tensor_value_info("x", FLOAT, ["N", 4])),
        "ssa",
        "'x' is defined in it and in the inference graph",
    ),
    "cycle": (_gradient_says(y="Vnew"), "gradient", "a cycle: 'Vnew' is computed from its own output 'g'"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CHANGES)
def test_one_violated_rule(case):
    change, rule, message = CHANGES[case]
    problems = validate(spoiled(change))
    hits = [p for p in problems if p.rule == rule and message in p.message]
    assert len(hits) == 1, problems
    assert len(problems) == 1, problems
    assert hits[0].where.startswith("entry 0, ")
    assert rule in RULES
    for refuse in (compile_step, lower_gradients, ReferenceTraining):
        with pytest.raises(BadInput) as caught:
            refuse(spoiled(change))
        assert message in str(caught.value)


def test_all_of_them_at_once():
    """One mistake does not hide the next."""

    def change(info):
        for name in ("key is computed", "value is internal", "twice", "initialization with inputs", "read from nowhere",
                     "unknown operator", "defined twice", "stale name"):  # fmt: skip
            CHANGES[name][0](info)

    found = rules(spoiled(change))
    assert set(found) == {"key", "value", "unique", "initialization", "visibility", "operator", "ssa", "name"}


def test_version_of_the_domain():
    """There is one; and it must be imported."""
    for version, message in ((2, "the model imports version 2 of ai.onnx.preview.training; there is only 1"),
                             (None, "the model imports no opset of 'ai.onnx.preview.training'")):  # fmt: skip
        model = spoiled(lambda info: None)
        assert model.opset_import[-1].domain == DOMAIN
        if version is None:
            del model.opset_import[-1]
        else:
            model.opset_import[-1].version = version
        problems = validate(model)
        assert [(p.rule, p.message.partition(": ")[2]) for p in problems] == [("operator", message)] * 2
        for refuse in (compile_step, lower_gradients, ReferenceTraining):
            with pytest.raises(BadInput, match=message):
                refuse(model)


def test_rules_about_several_entries():
    model = two_entries(("p_", "q_"))
    model.training_info[1].update_binding.add(key="w2", value="q_new")
    model.training_info[1].update_binding.add(key="p_V", value="q_Vnew")
    problems = {p.rule: p for p in validate(model)}
    assert "by entry 0, 1" in problems["unique"].message
    assert "'p_V'" in problems["key"].message  # an initializer of another entry's algorithm
    assert problems["key"].where == "entry 1, update binding"


def test_inference_graph_may_not_read_an_algorithm():
    model = spoiled(lambda info: None)
    model.graph.node[0].input[1] = "V"
    (problem,) = validate(model)
    assert (problem.where, problem.rule) == ("inference graph", "visibility")
    assert "reads 'V', which the algorithm of entry 0 defines" in problem.message
    with pytest.raises(BadInput, match="reads 'V'"):
        compile_step(model)
    model.graph.node[0].input[1] = "nothing"
    (problem,) = validate(model)
    assert "reads 'nothing'" in problem.message


def test_binding_the_wrong_way_round():
    """The binding of drafts: from the output to the initializer."""

    def change(info):
        del info.update_binding[:]
        info.update_binding.add(key="new", value="w2")

    assert [(p.rule, p.message.partition("; ")[0]) for p in validate(spoiled(change))] == [
        ("key", "'new' ← 'w2': no initializer named 'new'"),
        ("value", "'new' ← 'w2': no output named 'w2'"),
    ]


def test_call_in_the_graph_that_it_calls():
    """ "The field algorithm.node is the only place the user can use GraphCall operator"."""
    model = called(["x_1", "w", "z_1"])
    model.graph.node.append(helper.make_node("GraphCall", ["x", "w", "z"], ["again"], domain=DOMAIN, graph_name="net"))
    model.graph.output.add().CopyFrom(helper.make_tensor_value_info("again", FLOAT, ["N", 3]))
    problems = validate(model)
    assert ("inference graph", "call", "GraphCall node 'again' stands in the graph that it would call") in {
        (p.where, p.rule, p.message) for p in problems
    }
    with pytest.raises(BadInput, match="stands in the graph that it would call"):
        compile_step(model)


def test_gradient_in_the_inference_graph():
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        g (float[2] a, float[2] b) => (float[2] d) {
            y = Mul (a, b)
            d = ai.onnx.preview.training.Gradient <xs = ["a"], y = "y"> (a)
        }""")
    (problem,) = validate(model)
    assert (problem.where, problem.rule) == ("inference graph", "gradient")
    assert [p.message for p in validate(ir.from_proto(model))] == [problem.message]


def test_call_that_is_not_allowed():
    (problem,) = [p for p in validate(called(["x_1"])) if p.rule == "call"]
    assert "gives nothing for the input 'z'" in problem.message
