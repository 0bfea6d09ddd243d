"""Model in, model out: grad, value_and_grad, vjp, jvp."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from onnxgrad.custom import CustomRule, custom_rules
from onnxgrad.errors import BadInput
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.keep_functions import Attempt, keeping_functions, transform
from onnxgrad.transforms.select_values import Names

Path = str | os.PathLike
Directions = int | str | None
Rules = Sequence[CustomRule | Path]


@transform
def vjp(
    model: AnyModel, *, wrt: Names, of: Names | None = None, directions: Directions = None, rules: Rules = ()
) -> Any:
    """The model with its pullback: cotangents of `of` in, cotangents of `wrt` out.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of graph inputs, initializers or intermediate float values. Where one depends on
            another, each gets its total derivative.
        of: names of float values, or index expressions on them (``"y[:, 3]"``); default: every float output.
            Cotangents and tangents of a sequence are sequences of the same length, those of an optional are optionals,
            in which nothing stands for zero.
        directions: a number, or a name for one that each run chooses, of cotangents to pull back at once. All of
            them, and all gradients, then have one more axis in front; the primal is computed once.
        rules: custom rules, from `custom_vjp` or `custom_jvp`, or files that hold them.

    Returns:
        A model of the argument's kind (a path gives a ModelProto) with the primal inputs and outputs
        as they are, one more input ``{of}_cotangent`` (shape and dtype of `of`) per `of`, and one more
        output ``{wrt}_grad`` (shape and dtype of `wrt`) per `wrt`; `signature` tells the exact names.
        A `wrt` that `of` does not depend on gets zeros. A model below opset 18 comes back raised to it.

    Warns:
        ZeroDerivative: a derivative is zero, because nothing that has one leads there.

    Raises:
        UnknownName: a name that the model does not have.
        BadInput: a value that is no float, or a model that cannot be read.
        NotDifferentiable: an operator between `wrt` and `of` has no rule or no derivative.
    """
    return _derive_model(Derivation.pull_cotangents, model, wrt, of, directions, rules)


@transform
def jvp(
    model: AnyModel, *, wrt: Names, of: Names | None = None, directions: Directions = None, rules: Rules = ()
) -> Any:
    """The model with its pushforward: tangents of `wrt` in, tangents of `of` out.

    Like `vjp`, with one more input ``{wrt}_tangent`` per `wrt` and one more output ``{of}_tangent`` per `of`. With
    `directions`, all tangents have one more axis in front. The tangent of an intermediate `wrt` is added to the one
    that reaches it from another. Arguments and errors are those of `vjp`.
    """
    return _derive_model(Derivation.push_tangents, model, wrt, of, directions, rules)


@transform
def value_and_grad(model: AnyModel, *, wrt: Names, of: Names | None = None, rules: Rules = ()) -> Any:
    """The model with the gradient of the sum of `of` as further outputs ``{wrt}_grad``.

    For a scalar `of` this is its gradient; for others, that of the sum of all their elements. Arguments, shapes and
    errors are those of `vjp`, but nothing is added to the inputs. The sum of a Softmax is
    constant: its gradient is zero, with a warning.
    """
    return _with_gradients(model, wrt, of, rules, primal=True)


@transform
def grad(model: AnyModel, *, wrt: Names, of: Names | None = None, rules: Rules = ()) -> Any:
    """The gradient model: like `value_and_grad`, with only the outputs ``{wrt}_grad``."""
    return _with_gradients(model, wrt, of, rules, primal=False)


def _derive_model(
    add: Callable[[Derivation, Directions], Any],
    model: AnyModel,
    wrt: Names,
    of: Names | None,
    directions: Directions,
    rules: Rules,
) -> Any:
    """The model to which `add` has added a pullback or a pushforward."""

    def derive(attempt: Attempt | None) -> Any:
        # a call cannot be batched over directions, the nodes of its body can
        with custom_rules(*rules):
            single = directions is None
            d = Derivation(model, wrt, of, containers=single, attempt=attempt if single else None)
            add(d, _check_directions(directions))
            return d.close()

    return keeping_functions(derive)


def _with_gradients(model: AnyModel, wrt: Names, of: Names | None, rules: Rules, primal: bool) -> Any:
    """The model with the gradients of the sum of `of`, and with its own outputs if `primal`."""

    def derive(attempt: Attempt | None) -> Any:
        with custom_rules(*rules):
            d = Derivation(model, wrt, of, containers=True, attempt=attempt)
            seeds = d.ones()
            if not primal:
                d.graph.outputs.clear()
            d.pull_back(seeds)
            return d.close()

    return keeping_functions(derive)


def _check_directions(directions: Directions) -> Directions:
    """`directions`, which is a number from 0 on or a name."""
    wrong = isinstance(directions, bool) or (isinstance(directions, int) and directions < 0) or directions == ""
    if wrong or not isinstance(directions, (int, str, type(None))):
        raise BadInput(f"`directions` is a number or the name of a dimension, not {directions!r}")
    return directions
