"""The derivative at a point as a model of its own: the primal runs once, the linear map as often as wanted.

A derived graph is cut where its linear part, which depends on a tangent or cotangent, reads the rest: the values that
cross the cut are the residuals. Values that depend on weights only (a transposed matrix) stay in the linear part: there
they are constants, which a runtime folds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.control_flow.unread_results import drop_unread
from onnxgrad.engine.partial_eval import residuals, seedless_values
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.constants import is_repeatable
from onnxgrad.ir.graph import dependents, named_values, prune, subgraphs
from onnxgrad.ir.match import is_op
from onnxgrad.ir.outline import restrict
from onnxgrad.model_io import AnyModel, Signature
from onnxgrad.model_io.read import TRAINING
from onnxgrad.rules.double_where import settle_products, take_settled_factors
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.keep_functions import Attempt, keeping_functions, transform
from onnxgrad.transforms.select_values import Names


class Split(NamedTuple):
    """Two models: the primal with residuals as further outputs, and a linear map with them as inputs."""

    forward: Any
    linear: Any


@transform
def linearize(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Split:
    """The primal and, as a model of its own, its Jacobian at that point as a linear map of tangents.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of graph inputs, initializers or intermediate float values.
        of: names of float values; default: every float output.

    Returns:
        `forward`: the model with the residuals as further outputs. `linear`: a model of the residuals, of those
        inputs of the primal that it reads, and of ``{wrt}_tangent``; its outputs are ``{of}_tangent``. Residuals have
        the same names in both, and ``signature(…).residuals`` lists them in both.

    Raises:
        BadInput: the type or the rank of a residual is not known.
        OnnxGradError: as `vjp`.
    """
    return _split(model, wrt, of, Derivation.push_tangents)


@transform
def split_vjp(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Split:
    """The primal and, as a model of its own, the backward pass: as `linearize`, for cotangents.

    Returns:
        `forward`: the model with the residuals as further outputs. `linear`: a model of the residuals, of those
        inputs of the primal that it reads, and of ``{of}_cotangent``; its outputs are ``{wrt}_grad``.

    Raises:
        OnnxGradError: as `linearize`.
    """
    return _split(model, wrt, of, Derivation.pull_cotangents)


@transform
def transpose(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """The transpose of a model that is linear in its inputs `wrt`: cotangents of `of` in, those of `wrt` out.

    Unlike the graph of a `vjp`, this one has no inputs for `wrt` and does not compute `of`. Terms that do not depend on
    `wrt` (the bias of an affine map) have no effect.

    Raises:
        BadInput: `of` is not linear in `wrt`, or a shape is known from `wrt` only.
    """
    d = Derivation(model, wrt, of)
    d.graph.outputs.clear()
    dropped = list(d.wrt.values())
    factors = take_settled_factors(d.graph, dropped)
    d.pull_cotangents()
    d.opened.finish(d.builder)
    for name, value in d.wrt.items():
        if not value.is_graph_input():
            raise BadInput(f"`wrt` {name!r} is no input of the model, which a transpose takes the place of")
    settle_products(d.graph, factors, d.builder)
    drop_unread(d.graph)
    _take_shapes_elsewhere(d, dropped)
    drop_unread(d.graph)
    for name, value in d.wrt.items():
        if any(not is_op(use.node, "Shape") for use in value.uses()):
            hint = f"if it is, a size in a loop or branch is computed from {name!r}: declare the sizes there"
            raise BadInput(f"the model is not linear in {name!r}: its transpose depends on it\n  hint: {hint}")
        if value.uses():
            hint = "declare its sizes, or name them in the shape of another input"
            raise BadInput(f"a size that the transpose needs is known from {name!r} only\n  hint: {hint}")
        d.graph.inputs.remove(value)
    return d.close()


def _split(model: AnyModel, wrt: Names, of: Names | None, derive: Callable[[Derivation], list[Var]]) -> Split:
    """Both halves of the graph that `derive` writes, whose results are the seeds."""

    def attempt_split(attempt: Attempt | None) -> Split:
        d = Derivation(model, wrt, of, attempt=attempt)
        return _cut(d, derive(d))

    return keeping_functions(attempt_split)


def _cut(d: Derivation, seeds: list[Var]) -> Split:
    """The two halves of the derived graph of `d`."""
    graph, made = d.graph, d.signature
    d.opened.finish(d.builder)
    results = {*made.gradients.values(), *made.output_tangents.values()}
    starts = {s.value for s in seeds}
    moving = dependents(graph, starts)
    for i, v in enumerate(graph.outputs):
        if v.name in results and v not in moving:
            _hand_through(d, i)
    ends = [v for v in graph.outputs if v.name in results]
    drawn = {v for node in graph if _is_random(node, d.builder) for v in node.outputs}
    known = seedless_values(graph, starts, {*graph.inputs, *drawn} - starts)
    needed = residuals(ends, lambda v: v not in ends and known(v))
    saved = [v for v in needed if not v.is_graph_input()]
    for v in saved:
        if v.shape is None or v.type is None:
            hint = "declare it in the model's value_info"
            raise BadInput(f"the type or rank of the residual {v.name!r} is not known\n  hint: {hint}")
    names = [v.name or "" for v in saved]
    read = {v.name for v in needed if v.is_graph_input()} | {s.name for s in seeds}

    linear = replace(d.opened, model=d.opened.model.clone(), training=frozenset())
    linear.model.meta[TRAINING] = []
    part = linear.model.graph
    values = named_values(part)
    inputs = [*(v for v in part.inputs if v.name in read), *(values[name] for name in names)]
    restrict(part, inputs, [v for v in part.outputs if v.name in results], d.builder.names)
    prune(part)
    replace(made, residuals=names).store(linear.model)

    for v in [v for v in graph.outputs if v.name in results]:
        graph.outputs.remove(v)
    graph.outputs.extend(v for v in saved if not v.is_graph_output())
    for s in seeds:
        graph.inputs.remove(s.value)
    d.signature = Signature(residuals=names)
    return Split(d.close(), linear.close())


def _hand_through(d: Derivation, i: int) -> None:
    """Have output `i`, which depends on no tangent, computed by the linear half from a residual."""
    value, name = d.graph.outputs[i], d.graph.outputs[i].name
    value.name = d.builder.names.fresh("residual")
    d.graph.outputs[i] = out = d.builder.copy(value).value
    out.name = name


def _is_random(node: ir.Node, builder: Builder) -> bool:
    """True if `node`, or one inside it, may differ between runs: both halves need the same result."""
    opset = builder.infer.context.get_opset_version(node.domain)
    return not is_repeatable(node.op_type, node.domain, opset) or any(
        _is_random(inner, builder) for graph in subgraphs(node) for inner in graph
    )


def _take_shapes_elsewhere(d: Derivation, dropped: list[ir.Value]) -> None:
    """Read sizes from other inputs than those `dropped`, or values that depend on these."""
    builder = Builder(d.graph, d.builder.names, d.builder.infer)
    sizes: dict[str, tuple[ir.Value, int]] = {}
    for v in d.graph.inputs:
        if v not in dropped:
            for axis, dim in enumerate(v.shape or ()):
                if not isinstance(dim, int) and dim.value:
                    sizes.setdefault(dim.value, (v, axis))
    moving = dependents(d.graph, dropped)
    for node in [n for n in d.graph if is_op(n, "Shape") and n.inputs[0] in moving]:
        value = node.inputs[0]
        if value is None or value.shape is None:
            continue
        start, end = (node.attributes.get_int(k, None) for k in ("start", "end"))
        dims = list(value.shape)[start:end]
        if all(isinstance(n, int) or n.value in sizes for n in dims):
            parts: list[Any] = []
            for n in dims:
                if isinstance(n, int):
                    parts.append([n])
                else:
                    other, axis = sizes[n.value]  # type: ignore[index]
                    parts.append(builder.shape_of(builder.var(other), axis, axis + 1))
            node.outputs[0].replace_all_uses_with(builder.join(*parts).value)
    d.graph.sort()
