"""Products of second derivatives with vectors, at the price of a few gradients: no matrix is formed."""

from __future__ import annotations

from typing import Any

from onnxgrad.engine import forward, reverse
from onnxgrad.errors import BadInput
from onnxgrad.ir import Var
from onnxgrad.ir.graph import named_values
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.jacobians import gradients_of
from onnxgrad.transforms.keep_functions import keeping_functions, transform
from onnxgrad.transforms.select_values import Names, float_values


@transform
def hvp(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """The model with the product of the Hessian of the sum of `of` and a vector: forward mode over the gradient.

    Returns:
        A model of the argument's kind, with the primal inputs and outputs unchanged, one more input
        ``{wrt}_tangent`` and one more output ``{wrt}_hvp`` (both of the shape and dtype of `wrt`) for each `wrt`:
        ``hvp_a = Σ_b ∂²(Σ of)/∂a∂b · tangent_b``. ``signature(derived)`` has the exact names in `input_tangents` and
        `products`.

    Raises:
        OnnxGradError: as `vjp`.
    """
    return keeping_functions(lambda attempt: _hvp(Derivation(model, wrt, of, attempt=attempt)))


def _hvp(d: Derivation) -> Any:
    gradients = gradients_of(d)
    tangents = forward(d.builder, list(d.graph), d.tangent_inputs(), list(gradients.values()))
    d.add_products({v: tangents[g] for v, g in zip(d.wrt.values(), gradients.values()) if g in tangents}, "hvp")
    return d.close()


@transform
def gauss_newton_vp(model: AnyModel, *, wrt: Names, of: Names | None = None, loss: str | None = None) -> Any:
    """The model with the product of the Gauss-Newton matrix and a vector: Jᵀ·H·J·v.

    J is the Jacobian of `of` with respect to `wrt`; H is the Hessian of the sum of the value `loss` with respect to
    `of`, or the identity if no `loss` is named (least squares, ½‖of‖²). Where `loss` is convex in `of` the matrix is
    positive semidefinite. No `of` may depend on another.

    Returns:
        As `hvp`, with outputs ``{wrt}_gnvp``.

    Raises:
        UnknownName: there is no value `loss`.
        BadInput: `loss` is also an `of`.
        OnnxGradError: as `vjp`.
    """
    return keeping_functions(lambda attempt: _gnvp(Derivation(model, wrt, of, attempt=attempt), loss))


def _gnvp(d: Derivation, loss: str | None) -> Any:
    of_values = list(d.of.values())
    pushed = forward(d.builder, d.nodes, d.tangent_inputs(), of_values)
    if loss is None:
        curved = pushed
    else:
        (target,) = float_values(loss, named_values(d.graph), "loss").values()
        if target in of_values:
            raise BadInput(f"`loss` {loss!r} is also `of`; name the values that the loss is a function of")
        ones = {target: d.builder.full_like(Var(d.builder, d.builder.now(target)), 1)}
        slopes = reverse(d.builder, list(d.graph), ones, of_values)
        bent = forward(d.builder, list(d.graph), pushed, [g.value for g in slopes.values()])
        curved = {v: bent[g.value] for v, g in slopes.items() if g.value in bent}
    d.add_products(reverse(d.builder, list(d.graph), curved, list(d.wrt.values())) if curved else {}, "gnvp")
    return d.close()
