"""Attribution of predictions to inputs: integrated gradients, SmoothGrad and Grad-CAM, each as one model."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.batching.directions import Batched, vmapped
from onnxgrad.engine import reverse
from onnxgrad.errors import BadInput
from onnxgrad.ir import Var
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.keep_functions import transform
from onnxgrad.transforms.select_values import Names


@transform
def integrated_gradients(model: AnyModel, *, wrt: Names, of: Names | None = None, steps: int = 32) -> Any:
    """Attributions to the elements of inputs whose sum is the output's gain over a baseline.

    (x − x')·∫₀¹ ∇f(x' + t·(x − x')) dt, by the midpoint rule (Sundararajan, Taly, Yan 2017). Their sum over all `wrt`
    is f(x) − f(x'), up to the error of the rule, which falls with the square of `steps`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of float inputs.
        of: names of float values, or index expressions on them (``"y[:, 3]"``), whose sum is attributed.
        steps: points on the way.

    Returns:
        A model of the argument's kind, with one more input ``{wrt}_baseline`` (x', shape and dtype of `wrt`) per
        `wrt`, whose outputs are ``{wrt}_attribution``.

    Raises:
        BadInput: a `wrt` that is no input, or no step.
        OnnxGradError: as `vjp`.
    """
    if steps < 1:
        raise BadInput(f"`steps` is at least 1, not {steps}")
    along = (np.arange(steps) + 0.5) / steps

    def points(d: Derivation, x: Var, name: str) -> tuple[Var, Var]:
        baseline = d.input(x.value, f"{name}_baseline")
        way = x - baseline
        share = d.builder.const(along.reshape(-1, *[1] * x.rank), x.dtype)
        return baseline + share * way, way

    return _average_gradients(model, wrt, of, points)


@transform
def smooth_grad(
    model: AnyModel, *, wrt: Names, of: Names | None = None, steps: int = 32, noise: float = 0.1, seed: int = 0
) -> Any:
    """The mean gradient at points around an input: x plus normal noise (Smilkov et al. 2017).

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of float inputs.
        of: names of float values, or index expressions on them, whose sum is attributed.
        steps: points.
        noise: standard deviation, in the units of the input.
        seed: of the noise; a session draws other noise in each run.

    Returns:
        A model of the argument's kind with the same inputs, whose outputs are ``{wrt}_attribution``.

    Raises:
        BadInput: a `wrt` that is no input, or no step.
        OnnxGradError: as `vjp`.
    """
    if steps < 1:
        raise BadInput(f"`steps` is at least 1, not {steps}")

    def points(d: Derivation, x: Var, name: str) -> tuple[Var, None]:
        b = d.builder
        many = b.Add(x, b.const(np.zeros((steps, *[1] * x.rank)), x.dtype))
        found = many + noise * b.RandomNormalLike(many, seed=float(seed))
        return found, None

    return _average_gradients(model, wrt, of, points)


@transform
def grad_cam(model: AnyModel, *, layer: str, of: Names | None = None) -> Any:
    """Class activation map of a layer: ReLU(Σ_c w_c·A_c), w_c the mean of ∂of/∂A_c.

    Selvaraju et al. 2017, "Grad-CAM: visual explanations from deep networks".

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        layer: the name of a value A [N, C, …], such as the output of the last convolution.
        of: names of float values, or index expressions on them (``"y[:, 3]"``), whose sum is attributed.

    Returns:
        A model of the argument's kind with the same inputs, whose only output ``{layer}_cam`` is [N, …].

    Raises:
        BadInput: the layer has no axes behind its channels.
        OnnxGradError: as `vjp`.
    """
    d = Derivation(model, layer, of)
    b = d.builder
    ((name, value),) = d.wrt.items()
    found = reverse(b, d.nodes, d.ones(), [value])
    (slope,) = d.derivatives_of(found, d.wrt)
    maps = b.var(b.now(value))
    if maps.rank < 3:
        raise BadInput(f"the layer {name!r} has {maps.rank} axes; Grad-CAM wants [N, C, …]")
    weights = b.ReduceMean(slope, list(range(2, maps.rank)), keepdims=1)
    cam = b.Relu(b.ReduceSum(weights * maps, [1], keepdims=0))
    d.graph.outputs.clear()
    d.output(cam, f"{name}_cam", cam.value)
    return d.close()


def _average_gradients(model: AnyModel, wrt: Names, of: Names | None, points: Any) -> Any:
    """`model` with the mean gradient over the `points` of each `wrt`, times a factor, as its outputs."""
    d = Derivation(model, wrt, of)
    b = d.builder
    for name, value in d.wrt.items():
        if not value.is_graph_input() or value.is_initializer():
            raise BadInput(f"`wrt` {name!r} is no input of the model")
        if value.shape is None:
            raise BadInput(f"the rank of {name!r} is not known")
    inner = list(d.wrt.values())
    nodes = d.lowered(list(d.of.values()))
    found = reverse(b, nodes, d.ones(), inner)
    gradients = d.derivatives_of(found, d.wrt)
    whole = [d.replaced(v, "point") for v in inner]
    d.graph.outputs.clear()
    columns, factors = zip(*(points(d, x, name) for x, name in zip(whole, d.wrt)))

    def write(slices: list[Var]) -> list[Var]:
        for value, piece in zip(inner, slices):
            piece.value.shape = value.shape
            value.replace_all_uses_with(piece.value)
        d.graph.sort()
        return gradients

    stacks = vmapped(b, list(columns), write, [Batched(x) for x in whole])
    d.graph.sort()
    for name, x, stack, factor in zip(d.wrt, whole, stacks, factors):
        mean = b.ReduceMean(stack, [0], keepdims=0)
        d.output(mean if factor is None else factor * mean, f"{name}_attribution", x.value)
    return d.close()
