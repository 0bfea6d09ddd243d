"""The optimizers of ai.onnx.preview.training as operators: steps to differentiate through."""

import numpy as np
from onnx.reference.op_run import OpRun

from onnxgrad.testing import Case
from tests.rules.ladder import ladder

DOMAIN = "ai.onnx.preview.training"
RATE, SQUARES = np.array(0.3), np.abs(np.random.default_rng(1).standard_normal((2, 2))) + 0.1


class Adam(OpRun):
    """The reference evaluator's own takes one tensor only."""

    op_domain = DOMAIN

    def _run(self, r, t, *rest, alpha=None, beta=None, epsilon=None, norm_coefficient=None, norm_coefficient_post=None):
        alpha, beta, epsilon, norm = (float(k) for k in (alpha, beta, epsilon, norm_coefficient))
        kept, n = 1 - float(norm_coefficient_post), len(rest) // 4
        found = []
        for i in range(n):
            x, g, v, h = rest[i::n]
            g = norm * x + g
            v, h = alpha * v + (1 - alpha) * g, beta * h + (1 - beta) * g**2
            rate = r * np.sqrt(1 - beta**t) / (1 - alpha**t) if t > 0 else r
            found.append((kept * (x - rate * v / (np.sqrt(h) + epsilon)), v, h))
        return tuple(result[k] for k in range(3) for result in found)


def case(op, count, states, attrs=None, tensors=1, note="", **more):
    """R, T, then tensors, gradients and states, of which the last is positive where it holds squares."""
    squares = [SQUARES] * tensors if op != "Momentum" else [(2, 2)] * tensors
    operands = [(2, 2)] * (2 * tensors + (states - 1) * tensors) + squares
    attrs = {"norm_coefficient": 0.1, **(attrs or {})}
    return Case(op, [RATE, np.array(count), *operands], attrs, tensors * (1 + states), domain=DOMAIN, note=note, **more)


ADAM = {"norm_coefficient_post": 0.2, "alpha": 0.8, "beta": 0.9, "epsilon": 1e-3}
MOMENTUM = {"alpha": 0.9, "beta": 0.7}
CASES = [
    case("Adagrad", 3, 1, {"decay_factor": 0.1, "epsilon": 1e-3}),
    case("Adagrad", 0, 1, tensors=2, note="two"),
    case("Adam", 3, 2, ADAM, evaluators=[Adam]),
    case("Adam", 0, 2, ADAM, note="first", evaluators=[Adam], order=1),
    case("Adam", 2, 2, {**ADAM, "norm_coefficient_post": 0.0}, tensors=2, note="two", evaluators=[Adam], order=1),
    case("Momentum", 2, 1, {**MOMENTUM, "mode": "standard"}),
    case("Momentum", 0, 1, {**MOMENTUM, "mode": "standard"}, note="first"),
    case("Momentum", 2, 1, {**MOMENTUM, "mode": "nesterov"}, tensors=2, note="two"),
]
test_rule = ladder("optimizers", CASES)
