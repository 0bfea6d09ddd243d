"""The gradient of every example of a batch: a Scan over the examples, each a batch of one."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.shapes import move_axis
from onnxgrad.model_io import AnyModel
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.jacobians import check_axis, gradients_of
from onnxgrad.transforms.keep_functions import transform
from onnxgrad.transforms.select_values import Names


@transform
def per_example_grad(
    model: AnyModel, *, wrt: Names, of: Names | None = None, batch: int = 0, shared: Names = ()
) -> Any:
    """For each example, the gradient of the sum of `of` when that example is the whole batch.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of what all examples share: initializers, or inputs named in `shared`.
        of: names of float values; default: every float output.
        batch: the axis of every input along which the examples lie.
        shared: inputs that do not hold examples.

    Returns:
        A model of the argument's kind with the same inputs, whose only outputs are ``{wrt}_grad``, of shape
        ``[examples] + wrt.shape``. Where examples do not influence each other, their sum is the gradient.

    Raises:
        BadInput: a `wrt` that is not shared, an input without an axis `batch`, inputs of several batch sizes.
        OnnxGradError: as `vjp`.
    """
    check_axis(batch)
    common = {shared} if isinstance(shared, str) else set(shared)
    shapes: dict[str, ir.Shape] = {}
    d = Derivation(model, wrt, of, lambda private: shapes.update(_as_batch_of_one(private, batch, common)))
    for name, value in d.wrt.items():
        if name in shapes or not (value.is_initializer() or value.is_graph_input()):
            raise BadInput(
                f"`wrt` {name!r} is not shared by the examples\n  hint: its gradient by `grad` has a row each"
            )
        if value.shape is None:
            raise BadInput(f"the rank of {name!r} is not known")
    b = d.builder
    gradients = [b.var(g) for g in gradients_of(d).values()]
    single = [v for v in d.graph.inputs if v.name in shapes]
    whole = [d.replaced(v, "example", shapes[v.name or ""]) for v in single]
    d.graph.outputs.clear()

    columns = [move_axis(x, batch, 0) for x in whole]
    d.add_gradients(d.over_slices(single, columns, gradients, map(b.var, d.wrt.values()), batch))
    return d.close()


def _as_batch_of_one(model: ir.Model, batch: int, shared: set[str]) -> dict[str, ir.Shape]:
    """Declare every input a batch of one; the shapes that inputs with examples had.

    Declarations of other shapes are for the whole batch, and are dropped.
    """
    graph, shapes = model.graph, {}
    names = {v.name for v in graph.inputs}
    if shared - names:
        raise BadInput(f"`shared` names no input of the model: {', '.join(sorted(shared - names))}")
    for v in graph.inputs:
        if v.name in shared or v.is_initializer():
            continue
        if v.shape is None or not -len(v.shape) <= batch < len(v.shape):
            raise BadInput(f"input {v.name!r} has no axis {batch} for examples; name it in `shared` if it has none")
        shapes[v.name or ""] = v.shape
        dims: list[Any] = list(v.shape)
        dims[batch] = 1
        v.shape = ir.Shape(dims)
    if not shapes:
        raise BadInput("no input of the model holds examples")
    counts = {name: n for name, shape in shapes.items() if isinstance(n := shape[batch], int)}
    if len(set(counts.values())) > 1:
        counted = ", ".join(f"{name!r} has {n}" for name, n in counts.items())
        raise BadInput(f"along axis {batch} lie the examples, but {counted}; name in `shared` what holds none")
    for g in (graph, *graph.subgraphs()):
        for value in (*(g.inputs if g is not graph else ()), *(v for node in g for v in node.outputs)):
            value.shape = None
    return shapes
