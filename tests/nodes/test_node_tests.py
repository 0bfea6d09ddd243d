"""Every node test of the onnx package is differentiated; by default a fifth of the forms of one of each kind.

With ``--complete``, all of them in every form, the function bodies that are written out too.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.nodes import checking
from tests.nodes.__main__ import PROVEN
from tests.nodes.cases import NodeTest, forms, node_tests, representatives
from tests.nodes.checking import examine
from tests.nodes.differences import derivative, excess
from tests.nodes.unproven import reasons

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "form" not in metafunc.fixturenames:
        return
    first = representatives()
    usual = [(t, f) for t in first for f in forms(t) if f == "symbolic" or (f == "fed" and len(forms(t)) > 2)][::5]
    complete = metafunc.config.getoption("--complete")
    chosen = [(t, f) for t in node_tests() for f in forms(t)] if complete else usual
    known = {(t.name, f) for t, f in usual}
    metafunc.parametrize(
        ("node_test", "form"),
        [
            pytest.param(t, f, id=f"{t.name}-{f}", marks=() if (t.name, f) in known else pytest.mark.complete)
            for t, f in chosen
        ],
    )


def test_node_test(node_test: NodeTest, form: str) -> None:
    outcome = examine(node_test, form)
    assert not outcome.wrong, "\n".join(outcome.wrong)
    if outcome.refused and node_test.name in known():  # a rule may need to know axes or sizes: then another form does
        others = [examine(node_test, f) for f in forms(node_test) if f != form]
        assert any(o.proven for o in others), f"refused, and was not: {outcome.refused}"


def known() -> set[str]:
    return set(PROVEN.read_text().split())


def test_what_is_proven_exists() -> None:
    names = {t.name for t in node_tests()}
    assert len(known()) > 1300
    assert known() <= names
    assert not [n for n in names - known() if not reasons(n)]


# --- the harness itself -----------------------------------------------------------------------------


def test_differences_at_a_kink_are_not_trusted() -> None:
    x = np.array([0.0, 1e-4, 0.3, -0.0])
    value, trusted = derivative(lambda s: {"relu": np.maximum(x + s, 0), "cube": (x + s) ** 3, "step": np.floor(x + s)})
    np.testing.assert_array_equal(trusted["relu"], [False, False, True, False])
    np.testing.assert_array_equal(trusted["step"], [False, False, True, False])
    assert trusted["cube"].all()
    np.testing.assert_allclose(value["cube"], 3 * x**2, atol=1e-12)


def test_what_is_not_finite_is_no_agreement() -> None:
    sure = np.array([True, True])
    assert excess(np.array([1.0, np.nan]), np.array([1.0, 2.0]), 1.0, sure) == np.inf
    assert excess(np.array([1.0, 2.0]), np.array([1.0, 2.0]), 1.0, sure) == 0


def small(op: str, **attributes: object) -> NodeTest:
    x = np.array([0.3, -0.7, 1.2], np.float32)
    value = helper.make_tensor_value_info
    node = helper.make_node(op, ["x"], ["y"], **attributes)
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, [3])], [value("y", TensorProto.FLOAT, [3])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    expected = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0]
    return NodeTest(op, model, {"x": x}, {"y": expected})


@pytest.mark.parametrize("mode", ["vjp", "jvp"])
def test_a_wrong_derivative_is_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The derivative of Cos stands in for that of Sin."""
    right = getattr(checking, mode)

    def wrong(model: onnx.ModelProto, **names: object) -> onnx.ModelProto:
        other = onnx.ModelProto()
        other.CopyFrom(model)
        other.graph.node[0].op_type = "Cos"
        return right(other, **names)

    assert not examine(small("Sin"), "fed").wrong
    monkeypatch.setattr(checking, mode, wrong)
    found = examine(small("Sin"), "fed").wrong
    assert any(w.startswith(f"{mode} of") for w in found)
    assert any(w.startswith("adjoint") for w in found)
