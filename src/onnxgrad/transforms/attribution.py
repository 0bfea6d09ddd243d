"""Attribution of predictions to inputs, each method as one model.

Integrated and expected gradients, SmoothGrad, Grad-CAM, occlusion, attention rollout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.engine import reverse
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import is_op, only_reader
from onnxgrad.ir.names import identifier
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.derivation import Derivation, check_rank
from onnxgrad.transforms.gradient_lowering import open_lowered
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
def expected_gradients(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """Attributions to the elements of inputs over a background, as in gradient SHAP (Erion et al. 2021).

    The mean over the M rows b of the background of (x − b)·∇f(b + α·(x − b)), where α takes M values evenly between 0
    and 1. Over many rows, the sum of the attributions is f(x) minus the mean of f over the background.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of float inputs.
        of: names of float values, or index expressions on them (``"y[:, 3]"``), whose sum is attributed.

    Returns:
        A model of the argument's kind, with one more input ``{wrt}_background`` per `wrt`, [M, …] for `wrt` [N, …], in
        random order, whose outputs are ``{wrt}_attribution``.

    Raises:
        BadInput: a `wrt` that is no input.
        OnnxGradError: as `vjp`.
    """

    def points(d: Derivation, x: Var, name: str) -> tuple[Var, Var]:
        b = d.builder
        rows = ir.Value(
            name=b.names.exactly(f"{name}_background"), type=x.value.type,
            shape=ir.Shape([identifier(f"{name}_rows"), *(x.shape or ())[1:]]),
        )  # fmt: skip
        d.graph.inputs.append(rows)
        background = b.Unsqueeze(b.var(rows), [1])
        places = b.Cast(b.places_along(background, 0), to=int(x.dtype or ir.DataType.FLOAT))
        count = b.cast_like(b.size_of(background, 0), x)
        along = b.reshape((places + 0.5) / count, [-1, *[1] * x.rank])
        way = x - background
        return background + along * way, way

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
        noisy = many + noise * b.RandomNormalLike(many, seed=float(seed))
        return noisy, None

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
    gradients = reverse(b, d.nodes, d.ones(), [value])
    (slope,) = d.derivatives_of(gradients, d.wrt)
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
    d.refuse_computed()
    for value in d.wrt.values():
        check_rank(value)
    inner = list(d.wrt.values())
    nodes = d.lowered(list(d.of.values()))
    pulled = reverse(b, nodes, d.ones(), inner)
    gradients = d.derivatives_of(pulled, d.wrt)
    whole = [d.replaced(v, "point") for v in inner]
    d.graph.outputs.clear()
    columns, factors = zip(*(points(d, x, name) for x, name in zip(whole, d.wrt)))
    stacks = d.over_slices(inner, columns, gradients, whole)
    for name, x, stack, factor in zip(d.wrt, whole, stacks, factors):
        if factor is not None and factor.rank > x.rank:  # one for each point
            stack, factor = factor * stack, None
        mean = b.ReduceMean(stack, [0], keepdims=0)
        d.output(mean if factor is None else factor * mean, f"{name}_attribution", x.value)
    return d.close()


@transform
def occlusion(
    model: AnyModel,
    *,
    wrt: str,
    of: Names | None = None,
    window: int | Sequence[int] = 1,
    stride: int | Sequence[int] | None = None,
    baseline: float = 0.0,
) -> Any:
    """The loss of output where a window of an input is covered (Zeiler, Fergus 2014).

    Each element gets the mean over the windows that cover it. All windows are one batch, as by `vmap`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: the name of a float input [N, …], whose other sizes are known.
        of: a float value with one number for each row, or an index expression, as ``"y[:, 3]"``.
        window: sizes along the last axes; along the axes before them (channels), a window covers everything.
        stride: steps between windows. Default: `window`.
        baseline: the number in place of what is covered.

    Returns:
        A model of the argument's kind with the same inputs, whose output is ``{wrt}_attribution``.

    Raises:
        BadInput: sizes that are not known, a window that is larger than the input, or several numbers for each row.
    """
    d = Derivation(model, wrt, of)
    b = d.builder
    ((name, value),) = d.wrt.items()
    ((of_name, end),) = d.of.items() if len(d.of) == 1 else [("", None)]
    d.refuse_computed()
    sizes = [n for n in (value.shape or ())[1:] if isinstance(n, int)]
    if value.shape is None or len(sizes) != len(value.shape) - 1 or not sizes:
        raise BadInput(f"occlusion takes an input [N, …] of known sizes, and {name!r} leaves some open")
    if end is None or end.shape is None or len(end.shape) > 1:
        raise BadInput(f'occlusion takes one number for each row; write of="{of_name or "y"}[:, 3]"')
    covers = _windows(sizes, window, stride)
    d.graph.outputs.clear()
    whole = d.replaced(value, "covered")
    # the first variant is not covered
    kept = b.const(np.concatenate([np.ones((1, 1, *sizes)), 1 - covers[:, None]]), whole.dtype)
    column = whole * kept + b.const(baseline, whole.dtype) * b.Sub(1.0, kept)
    (stack,) = d.over_slices([value], [column], [b.var(end)], [b.var(end)])
    lost = b.Slice(stack, [0], [1], [0]) - b.Slice(stack, [1], [np.iinfo(np.int64).max], [0])  # [windows, N]
    shares = covers.reshape(len(covers), -1) / np.maximum(covers.sum(0), 1).reshape(1, -1)
    each = b.Transpose(lost, perm=[1, 0]) @ b.const(shares, whole.dtype)
    d.output(b.reshape(each, [-1, *sizes]), f"{name}_attribution", value)
    return d.close()


def _windows(sizes: Sequence[int], window: int | Sequence[int], stride: int | Sequence[int] | None) -> np.ndarray:
    """A mask of ones for each window over axes of these `sizes`."""
    widths = [window] * min(len(sizes), 2 if len(sizes) > 1 else 1) if isinstance(window, int) else list(window)
    steps = widths if stride is None else [stride] * len(widths) if isinstance(stride, int) else list(stride)
    covered = sizes[len(sizes) - len(widths) :]
    if len(steps) != len(widths) or len(widths) > len(sizes) or min([*steps, *widths]) < 1:
        raise BadInput(
            f"window and stride have one size of at least 1 for each of the last axes, not {widths}, {steps}"
        )
    if any(w > n for w, n in zip(widths, covered)):
        raise BadInput(f"a window of {widths} is larger than the input, {covered}")
    starts = [range(0, -(-(n - w) // s) * s + 1, s) for n, w, s in zip(covered, widths, steps)]
    found = []
    for corner in itertools.product(*starts):
        mask = np.zeros(sizes)
        inside: tuple[Any, ...] = (..., *(slice(c, c + w) for c, w in zip(corner, widths)))
        mask[inside] = 1
        found.append(mask)
    return np.stack(found)


@transform
def attention_rollout(model: AnyModel) -> Any:
    """The share that each token of the last layer draws from each token of the input (Abnar, Zuidema 2020).

    The product over all layers of (A + I)/2, for A the mean over heads of the attention weights. These are the Softmax
    nodes [N, heads, T, T] that a MatMul reads.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.

    Returns:
        A model of the argument's kind with the same inputs, whose only output ``rollout`` is [N, T, T].

    Raises:
        BadInput: no attention of this form was found.
    """
    opened = open_lowered(model)
    graph = opened.model.graph
    b = Builder(graph)
    weights = [
        n.outputs[0] for n in graph
        if is_op(n, "Softmax") and n.outputs[0].shape is not None and len(n.outputs[0].shape) == 4
        and only_reader(n.outputs[0], "MatMul") is not None
    ]  # fmt: skip
    if not weights:
        raise BadInput(
            "the model has no attention written as Softmax and MatMul of [N, heads, T, T]\n  hint: export it with "
            "attention as single operators, as PyTorch's attn_implementation='eager' does"
        )
    rollout: Var | None = None
    for value in weights:
        mean = b.ReduceMean(b.var(value), [1], keepdims=0)
        mixed = b.Mul(mean + b.EyeLike(b.Squeeze(b.Slice(mean, [0], [1], [0]), [0])), 0.5)
        rollout = mixed if rollout is None else mixed @ rollout
    assert rollout is not None
    rollout.value.name = b.names.exactly("rollout")
    graph.outputs[:] = [rollout.value]
    opened.finish(b)
    return opened.close()
