"""Differentiation is linear in the number of nodes, and needs no recursion."""

from __future__ import annotations

import cProfile
import sys
from collections import Counter

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import helper

from onnxgrad import grad, jvp, vjp
from onnxgrad.engine import activity
from onnxgrad.ir.infer import inference
from onnxgrad.ir.notes import notes, properties
from tests.large_models import float_weights, gpt
from tests.model_io.function_models import transformer
from tests.models import assert_no_traps, chain, model, run, value


def _work(count: int, derive, monkeypatch) -> Counter[str]:
    """The number of costly operations for a chain of `count` nodes."""
    done: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for owner, name in (
            (inference.Inference, "look_up"),
            (inference.Inference, "of"),
            (activity, "rule_of"),
            (activity, "moved_by"),
            (activity, "is_differentiable"),
            (activity, "captured"),
        ):
            original = getattr(owner, name)

            def counted(*args, _name=name, _original=original, **kwargs):
                done[_name] += 1
                return _original(*args, **kwargs)

            patch.setattr(owner, name, counted)
        derive(chain(count), wrt=["x", "w"])
    return done


def test_work_grows_with_the_nodes(monkeypatch):
    for derive in (vjp, jvp):
        small, large = (_work(n, derive, monkeypatch) for n in (100, 400))
        assert small["look_up"] > 100
        for what, count in large.items():
            assert count <= 4.2 * max(small[what], 1), f"{what}: {small[what]} for 100 nodes, {count} for 400"
        assert large["of"] == 0  # the inference of the opened model goes on


def _calls(derive, source, wrt) -> int:
    """The number of Python calls, including those of libraries."""
    profile = cProfile.Profile()
    profile.enable()
    derive(source, wrt=wrt)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("derive", [vjp, jvp, grad])
def test_all_work_grows_with_the_nodes(derive):
    """Everything counted, from reading the model to writing the derivative."""
    derive(chain(50), wrt=["x", "w"])
    small, large = (_calls(derive, chain(n), ["x", "w"]) for n in (300, 1200))
    assert small < 1200 * 300
    assert large < 4.2 * small


def test_all_work_of_a_transformer_grows_with_the_layers():
    small, large = (_calls(grad, m, float_weights(m)) for m in (gpt(layers=2), gpt(layers=8)))
    assert large < 4.2 * small


def test_layers_that_are_calls_of_one_function_are_differentiated_once():
    sources = [transformer(n) for n in (8, 32)]
    small, large = (_calls(grad, m, [t.name for t in m.graph.initializer]) for m in sources)
    assert large < 2 * small


@pytest.mark.parametrize("count", [6_000, pytest.param(20_000, marks=pytest.mark.complete)])
def test_a_long_chain_of_nodes(count):
    """Far beyond any recursion limit; every gradient node is there, and nothing twice."""
    assert sys.getrecursionlimit() < count
    derived = vjp(chain(count), wrt=["x", "w"])
    ops = Counter(n.op_type for n in derived.graph.node)
    assert ops["Cos"] == count // 4
    assert ops["Tanh"] == count // 4
    assert len(derived.graph.node) < 5 * count
    assert_no_traps(derived)


def test_a_long_chain_computes_the_right_thing():
    count, n = 2000, 3
    source = model(
        [helper.make_node("Mul", ["x" if i == 0 else f"v{i - 1}", "w"], [f"v{i}"]) for i in range(count)],
        [value("x", ["N"], onnx.TensorProto.DOUBLE)],
        [value(f"v{count - 1}", ["N"], onnx.TensorProto.DOUBLE)],
        {"w": np.array(1.0005)},
    )
    got = run(vjp(source, wrt=["x", "w"]), {"x": np.arange(n, dtype=float), f"v{count - 1}_cotangent": np.ones(n)})
    np.testing.assert_allclose(got["x_grad"], np.full(n, 1.0005**count), rtol=1e-9)
    np.testing.assert_allclose(got["w_grad"], 3 * count * 1.0005 ** (count - 1), rtol=1e-9)


def test_many_uses_of_one_value():
    """A fan of 3000: cotangents are added once each, not again for every use."""
    count = 3000
    nodes = [helper.make_node("Sin", ["x"], [f"s{i}"]) for i in range(count)]
    nodes.append(helper.make_node("Sum", [f"s{i}" for i in range(count)], ["y"]))
    derived = vjp(model(nodes, [value("x", [2])], [value("y", [2])]), wrt="x")
    assert Counter(n.op_type for n in derived.graph.node)["Add"] <= count


def test_many_weights():
    count = 1500
    nodes = [helper.make_node("Mul", ["x" if i == 0 else f"v{i - 1}", f"w{i}"], [f"v{i}"]) for i in range(count)]
    weights = {f"w{i}": np.ones(2, np.float32) for i in range(count)}
    source = model(nodes, [value("x", [2])], [value(f"v{count - 1}", [2])], weights)
    derived = vjp(source, wrt=list(weights))
    assert len(derived.graph.output) == count + 1
    assert len(derived.graph.node) < 4 * count


def test_nothing_that_a_derivation_writes_has_room_for_notes_that_it_has_not():
    """`onnx_ir` makes an empty store wherever notes are asked for: half of the objects of a derived graph."""
    derived = vjp(onnx_ir.from_proto(chain(20)), wrt=["x", "w"])
    written = [x for node in derived.graph if node.name.startswith("d_") for x in (node, *node.outputs)]
    assert len(written) > 100
    assert sum(held is not None and not held for x in written for held in (notes(x), properties(x))) < 3
