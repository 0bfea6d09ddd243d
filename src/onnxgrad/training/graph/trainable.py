"""Selection of the weights that train, by names, globs, kinds and depth.

A pattern is the name of a tensor, a glob over the names of weights (``*.bias``), ``type:Conv`` (weights read by nodes
of a type), or ``last:2`` / ``first:2``: by depth. A layer begins where the network first reads a weight of rank 2 or
more (a matrix, a kernel); biases, scales and shifts that follow belong to it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import reads
from onnxgrad.training.graph.rounding import is_rounding
from onnxgrad.wording import type_text

#: Instead of a pattern: everything that could train.
EVERYTHING = "all"


def is_pattern(text: str) -> bool:
    """True if `text` is a pattern for several weights, not a name."""
    return any(c in text for c in "*?[") or text.partition(":")[0] in ("type", "last", "first")


def matching(pattern: str, weights: Mapping[str, ir.Value], nodes: Sequence[ir.Node]) -> list[str]:
    """The names of the `weights` that match `pattern`, in their order.

    Raises:
        UnknownName, BadInput: none, or a pattern that is not understood.
    """
    kind, _, rest = pattern.partition(":")
    if kind in ("last", "first"):
        found = _by_depth(kind, rest, weights, nodes)
    elif kind == "type":
        found = _by_type(rest, weights, nodes)
    elif any(c in pattern for c in "*?["):
        found = [name for name in weights if fnmatch.fnmatchcase(name, pattern)]
    else:
        found = [name for name in weights if name == pattern]
    if not found:
        raise UnknownName(pattern, weights, "weight")
    return found


def named_weight(
    name: str, initializers: Mapping[str, ir.Value], reached: Container[ir.Value], running: Container[ir.Value]
) -> ir.Value:
    """The initializer called `name`, if it can train: a float that the loss has `reached`, no `running` statistic.

    Raises:
        UnknownName, BadInput: there is none, or it cannot.
    """
    if name not in initializers:
        raise UnknownName(name, initializers, "initializer")
    value = initializers[name]
    if value.dtype not in FLOATS:
        raise BadInput(f"{name!r} is a tensor of {type_text(value.dtype)}; only floats can be trained")
    if value not in reached:
        raise BadInput(f"the loss does not depend on {name!r}: it cannot be trained")
    if value in running:
        raise BadInput(f"{name!r} is a running statistic, which is not trained by its gradient")
    return value


def _by_type(op_type: str, weights: Mapping[str, ir.Value], nodes: Sequence[ir.Node]) -> list[str]:
    at = _readers(weights, nodes)
    found = [name for name in weights if any(nodes[i].op_type == op_type for i in at[name])]
    if not found:
        types = sorted({nodes[i].op_type for readers in at.values() for i in readers})
        raise BadInput(f"no {op_type!r} node reads a weight; these do: {', '.join(types)}")
    return found


def _by_depth(kind: str, count: str, weights: Mapping[str, ir.Value], nodes: Sequence[ir.Node]) -> list[str]:
    if not count.isdecimal() or not int(count):
        raise BadInput(f"{kind}:{count} must end in a number of layers, as {kind}:2 does")
    at = {name: min(readers, default=0) for name, readers in _readers(weights, nodes).items()}
    layers = sorted({at[name] for name, v in weights.items() if v.shape is not None and len(v.shape) > 1})
    n = int(count)
    if n >= len(layers):
        return list(weights)
    if kind == "last":
        return [name for name in weights if at[name] >= layers[-n]]
    return [name for name in weights if at[name] < layers[n]]


def _readers(weights: Mapping[str, ir.Value], nodes: Sequence[ir.Node]) -> dict[str, list[int]]:
    """The indices of the nodes that combine each weight with another value, behind a Transpose, a Reshape, …."""
    found: dict[str, list[int]] = {name: [] for name in weights}
    owner: dict[ir.Value, str] = {value: name for name, value in weights.items()}
    for i, node in enumerate(nodes):
        operands = node.inputs[:1] if is_rounding(node) else reads(node)
        read = [v for v in operands if v is not None and not _is_constant(v)]
        own = {owner[v] for v in read if v in owner}
        if len(own) == 1 and all(v in owner for v in read):
            owner.update(dict.fromkeys(node.outputs, own.pop()))
            continue
        for name in own:
            found[name].append(i)
    return found


def _is_constant(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Constant"


def without(names: Iterable[str], patterns: Sequence[str], weights: Mapping[str, ir.Value],
            nodes: Sequence[ir.Node]) -> list[str]:  # fmt: skip
    """`names` that match none of the `patterns`."""
    frozen = {name for pattern in patterns for name in matching(pattern, weights, nodes)}
    return [name for name in names if name not in frozen]
