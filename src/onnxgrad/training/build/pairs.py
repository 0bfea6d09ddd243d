"""An encoder that reads several texts, pictures or rows of numbers for each row of data: an anchor and its relatives.

The roles are joined along the batch, so the encoder runs once. In the training model, the inputs of the encoder are
``{role}.{input}`` (``{role}`` where it has one input), and its output is the embeddings [N, roles, size]. The trained
encoder has the inputs and the output that it had before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, json_text
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import prune, required_inputs
from onnxgrad.model_io import AnyModel, open_model
from onnxgrad.model_io.aside import external_aside
from onnxgrad.training.metadata import PAIRS, read_entry

#: The output of the training model.
EMBEDDINGS = "embeddings"


def roles_of(text: str | Sequence[str]) -> tuple[str, ...]:
    """The roles that ``"anchor,positive"`` or a list names. Raises BadInput for fewer than two."""
    found = tuple(r.strip() for r in (text.split(",") if isinstance(text, str) else text))
    if len(found) < 2 or len(set(found)) < len(found) or not all(found):
        raise BadInput(f"pairs are two or more columns, as anchor,positive,negative, not {text!r}")
    return found


def paired(model: AnyModel, roles: str | Sequence[str], output: str | None = None) -> ir.Model:
    """A copy of the encoder `model` that takes all `roles` at once.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, with embeddings [N, size] for its output.
        roles: names, such as ``anchor,positive,negative``.
        output: the embeddings. Default: the only output of floats and two axes.

    Raises:
        BadInput: the model has no such output, or a fixed batch size.
    """
    names = roles_of(roles)
    opened = open_model(model).model
    external_aside(opened)
    graph, b = opened.graph, Builder(opened.graph)
    flat = [v for v in graph.outputs if v.dtype in FLOATS and v.shape is not None and len(v.shape) == 2]
    flat = [v for v in flat if output in (None, v.name)]
    if len(flat) != 1:
        found = ", ".join(repr(v.name) for v in graph.outputs)
        raise BadInput(f"pairs are compared by embeddings [N, size]; name the output (--prediction), one of {found}")
    (embedding,) = flat
    given = required_inputs(graph)
    record: dict[str, object] = {"output": embedding.name, "outputs": [v.name for v in graph.outputs], "inputs": {}}
    for value in given:
        shape = value.shape
        if shape is None or not len(shape) or isinstance(shape[0], int):
            raise BadInput(f"the input {value.name!r} has a fixed batch size, or none, so roles cannot be joined")
        parts = []
        for role in names:
            part = ir.Value(
                name=b.names.exactly(role if len(given) == 1 else f"{role}.{value.name}"),
                type=value.type,
                shape=ir.Shape([shape[0], *(_name_dim(d, role) for d in shape[1:])]),
            )
            graph.inputs.append(part)
            parts.append(b.var(part))
        name = value.name
        graph.inputs.remove(value)
        joined = _join_roles(b, parts, value)
        value.replace_all_uses_with(joined.value)
        joined.value.name = b.names.fresh(f"{name}_of_roles")
        record["inputs"][joined.value.name] = [name, [d if isinstance(d, int) else str(d) for d in shape]]  # type: ignore[index]
    rows = b.var(embedding)
    size = (embedding.shape or (0, 0))[1]
    stacked = b.Reshape(rows, [len(names), -1, size if isinstance(size, int) else -1])
    together = b.Transpose(stacked, perm=[1, 0, 2])
    together.value.name = b.names.exactly(EMBEDDINGS)
    graph.sort()
    graph.outputs[:] = [together.value]
    opened.metadata_props[PAIRS] = json_text(record)
    return opened


def _name_dim(dim: int | ir.SymbolicDim, role: str) -> int | str | None:
    """A dimension of one role: texts of different roles may have different lengths."""
    return dim if isinstance(dim, int) else f"{role}_{dim}" if dim.value else None


def _join_roles(b: Builder, parts: Sequence[Var], like: ir.Value) -> Var:
    """`parts` along the batch; those of open length are padded with zeros behind, up to the longest."""
    shape = tuple(like.shape or ())
    if len(shape) > 1 and not isinstance(shape[1], int):
        if any(not isinstance(d, int) for d in shape[2:]):
            raise BadInput(f"the input {like.name!r} leaves several sizes open, so roles cannot be joined")
        longest = b.Max(*(b.shape_of(p, 1, 2) for p in parts))
        rest = np.zeros(len(shape), np.int64)
        padded = []
        for part in parts:
            missing = longest - b.shape_of(part, 1, 2)
            behind = b.join([0], missing, rest[2:].tolist()) if len(rest) > 2 else b.join([0], missing)
            padded.append(b.Pad(part, b.join(rest.tolist(), behind), b.const(0, part.dtype)))
        parts = padded
    return b.Concat(*parts, axis=0)


def unpaired(model: ir.Model) -> ir.Model:
    """`model`, which is used up, as the encoder that `paired` made it of; itself if it was not paired."""
    record, graph = read_entry(model.metadata_props, PAIRS, dict), model.graph
    if record is None:
        return model
    del model.metadata_props[PAIRS]
    values = {v.name: v for node in graph for v in node.outputs}
    added = []
    for joined, (name, dims) in record["inputs"].items():
        value = ir.Value(name=name, type=values[joined].type, shape=ir.Shape(dims))
        values[joined].replace_all_uses_with(value)
        added.append(value)
    graph.inputs[:] = [*added, *(v for v in graph.inputs if v.is_initializer())]
    graph.outputs[:] = [values[record["output"]]]
    prune(graph)
    return model
