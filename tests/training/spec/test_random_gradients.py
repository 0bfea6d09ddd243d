"""Gradient nodes on random graphs, to third order, at cuts and at other tensors: against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnxgrad.training import lower_gradients
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import run

UNARY = ("Sin", "Tanh", "Sigmoid", "Neg")
BINARY = ("Mul", "Add", "Sub")


def program(rng: np.random.Generator, inputs: list[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """Nodes (operator, operands, result), each of which reads what is there already."""
    known, nodes = list(inputs), []
    for i in range(int(rng.integers(4, 10))):
        unary = rng.random() < 0.4
        operands = tuple(str(v) for v in rng.choice(known[-5:], 1 if unary else 2))
        nodes.append((str(rng.choice(UNARY if unary else BINARY)), operands, f"v{i}"))
        known.append(f"v{i}")
    return nodes


def leaves(nodes, y: str, cut: set[str]) -> set[str]:
    """The values that y is computed from, without paths through `cut`."""
    made, found, todo = {n[2]: n for n in nodes}, set(), [y]
    while todo:
        name = todo.pop()
        if name in cut or name not in made:
            found.add(name)
        else:
            todo += made[name][1]
    return found


def independent(nodes, names: set[str]) -> bool:
    return all(not (leaves(nodes, name, names - {name}) & (names - {name})) for name in names)


def with_torch(torch, nodes, y: str, values: dict):
    """y at the values of its variables."""
    does = {"Sin": torch.sin, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Neg": torch.neg,
            "Mul": torch.mul, "Add": torch.add, "Sub": torch.sub}  # fmt: skip
    made = {n[2]: n for n in nodes}

    def value(name):
        if name not in values:
            op, operands, _ = made[name]
            values[name] = does[op](*map(value, operands))
        return values[name]

    return value(y)


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(40))
def test_random_graph(seed):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    inputs, others = ["a", "b", "c"], ["p", "q", "r"]
    nodes = program(rng, inputs)
    y = nodes[-1][2]
    cuts = {str(c) for c in rng.choice([n[2] for n in nodes[:-1]], int(rng.integers(0, 3)))}
    variables = sorted(leaves(nodes, y, cuts))
    if not independent(nodes, set(variables)):
        variables = sorted(leaves(nodes, y, set()))
    xs = [v for v in variables if rng.random() < 0.7] or variables[:1]
    zs = [v for v in variables if v not in xs]
    free = [*others, *inputs]
    fed = {v: str(rng.choice(free)) if rng.random() < 0.5 else v for v in variables}
    written = [helper.make_node(op, list(operands), [out]) for op, operands, out in nodes]
    orders, target, feeds = [], y, fed
    for order in (1, 2, 3):
        held = {"zs": zs} if zs else {}
        outs = [f"d{order}_{i}" for i in range(len(xs))]
        written.append(
            helper.make_node("Gradient", [feeds[v] for v in [*xs, *zs]], outs, domain=DOMAIN, xs=xs, y=target, **held)
        )
        orders.append(outs)
        if any(fed[v] != v for v in variables):
            break  # what came out is a function of what was fed
        target = outs[0]
    names = [n for outs in orders for n in outs]
    graph = helper.make_graph(
        written,
        "random",
        [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [3]) for n in [*inputs, *others]],
        [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [3]) for n in names],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    arrays = {n: rng.standard_normal(3) for n in [*inputs, *others]}
    found = run(lower_gradients(model), arrays)

    base: dict = {n: torch.tensor(a, dtype=torch.float64) for n, a in arrays.items()}
    for v in variables:
        with_torch(torch, nodes, v, base)  # cuts that are fed with themselves
    at = {v: base[fed[v]].detach().clone().requires_grad_() for v in variables}
    value = with_torch(torch, nodes, y, dict(at))
    for outs in orders:
        if not value.requires_grad:
            wanted = [None] * len(xs)
        else:
            wanted = torch.autograd.grad(value.sum(), [at[v] for v in xs], create_graph=True, allow_unused=True)
        for name, want in zip(outs, wanted):
            expected = np.zeros(3) if want is None else want.detach().numpy()
            np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-11, err_msg=f"{name} of {nodes}")
        if wanted[0] is None:
            break
        value = wanted[0]


def test_the_cases_are_what_they_should_be():
    """Cuts, substitutions and third orders all come up."""
    kinds = {"cut": 0, "independent": 0}
    for seed in range(40):
        rng = np.random.default_rng(seed)
        nodes = program(rng, ["a", "b", "c"])
        cuts = {str(c) for c in rng.choice([n[2] for n in nodes[:-1]], int(rng.integers(0, 3)))}
        chosen = leaves(nodes, nodes[-1][2], cuts)
        kinds["cut"] += bool(chosen & cuts)
        kinds["independent"] += independent(nodes, chosen)
    assert kinds["cut"] > 10
    assert kinds["independent"] > 25
