"""Targets of adapters: patterns of attention, names, modules, globs, node types, and parts of weights."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.graph import reads
from onnxgrad.training.adapters.config import ATTENTION
from onnxgrad.training.adapters.parts import WeightPart, named_part, outputs
from onnxgrad.training.adapters.sites import EMBEDDING, LINEAR, OPERANDS, Weight
from onnxgrad.training.graph.rounding import is_quantized

#: Names of modules and weights around attention, where the graph does not show it.
_NAMES = re.compile(
    r"(^|[._/])((self_?)?attn|attention|[qkv]_proj|qkv|c_attn|in_proj|out_proj|query|key|value|to_[qkv])([._/]|$)", re.I
)
#: Operators with an attention inside.
_ATTENTION = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}


#: After ``!``: weights of lower rank than the adapter.
SMALL = "small"
#: A pattern with the parts that are meant: ``c_attn[q,v]``, ``c_attn[0:768]``.
_PARTS = re.compile(r"(.+)\[((?:[qkv]|\d{1,9}:\d{1,9})(?:,(?:[qkv]|\d{1,9}:\d{1,9}))*)\]")


@dataclass(frozen=True)
class Target:
    """A weight, or a part of its outputs, with an adapter of its own.

    Attributes:
        weight: what is adapted.
        part: which of its outputs; None: all.
        label: the part as it is called, in brackets.
    """

    weight: Weight
    part: WeightPart | None = None
    label: str = ""


def select_targets(
    patterns: Sequence[str], weights: Mapping[str, Weight], graph: ir.Graph, rank: int = 0
) -> list[Target]:
    """The targets among `weights` that `patterns` match, in the order of the patterns.

    A weight that a pattern names with parts has only these parts as targets.

    Args:
        patterns: see `LoRA`.
        weights: what can be adapted, by name.
        graph: they are read in.
        rank: ``!small`` leaves out weights of a lower one.

    Raises:
        UnknownName, BadInput: a pattern that stands for none.
    """
    if not weights:
        integers = sorted({n.op_type for n in graph.all_nodes() if is_quantized(n)})
        hint = (
            f"\n  hint: it computes in integers ({', '.join(integers)}); adapt the model of floats" if integers else ""
        )
        raise BadInput(
            f"the model has no weight that an adapter fits: none that a MatMul, Gemm, Conv or Gather reads{hint}"
        )
    taken: set[str] = set()
    parts: dict[str, dict[str, WeightPart]] = {}
    wanted = [p for p in patterns if not p.startswith("!")] or ["all"]
    for pattern in wanted:
        if (written := _PARTS.fullmatch(pattern)) is None:
            taken.update(_matching(pattern, weights, graph))
            continue
        for name in _matching(written[1], weights, graph):
            taken.add(name)
            for text in written[2].split(","):
                parts.setdefault(name, {})[f"[{text}]"] = _part(weights[name], text)
    for pattern in patterns:
        if pattern.startswith("!"):
            if _PARTS.fullmatch(pattern):
                raise BadInput(f"{pattern!r} leaves out a part of a weight\n  hint: name the parts that are adapted")
            small = [n for n, w in weights.items() if min(w.ends) < rank]
            taken.difference_update(small if pattern[1:] == SMALL else _matching(pattern[1:], weights, graph))
    if not taken:
        raise BadInput("`targets` leaves nothing to adapt")
    for name in taken & parts.keys():
        _check_apart(weights[name], parts[name])
    found: list[Target] = []
    for name, weight in weights.items():
        if name in parts and name in taken:
            found += [Target(weight, part, label) for label, part in parts[name].items()]
        elif name in taken:
            found.append(Target(weight))
    return found


def _part(weight: Weight, text: str) -> WeightPart:
    if weight.kind == EMBEDDING or weight.groups > 1:
        what = "an embedding" if weight.kind == EMBEDDING else "a convolution with groups"
        raise BadInput(f"{weight.name!r} is {what}, which is adapted as a whole")
    return named_part(weight, text)


def _check_apart(weight: Weight, parts: Mapping[str, WeightPart]) -> None:
    taken: dict[int, str] = {}
    for label, part in parts.items():
        for column in part.columns(outputs(weight)).tolist():
            if taken.setdefault(column, label) != label:
                raise BadInput(f"{label} and {taken[column]} of {weight.name!r} overlap: both hold output {column}")


def _matching(pattern: str, weights: Mapping[str, Weight], graph: ir.Graph) -> list[str]:
    if pattern == "all":
        return list(weights)
    if pattern == ATTENTION:
        return _of_attention(weights, graph)
    if pattern.startswith("type:"):
        types = [t.strip() for t in pattern.removeprefix("type:").split(",")]
        there = sorted({s.node.op_type for w in weights.values() for s in w.sites})
        unfit = types if set(types).isdisjoint(there) else [t for t in types if t not in (*OPERANDS, *there)]
        if unfit:  # a list meant for any model may name weights that this one does not have
            raise BadInput(f"no {unfit[0]!r} node reads a weight that an adapter fits; these do: {', '.join(there)}")
        return [n for n, w in weights.items() if any(s.node.op_type in types for s in w.sites)]
    found = [n for n, w in weights.items() if _fits(pattern, n) or _fits(pattern, w.module)]
    if not found:
        known = {w.module for w in weights.values()} | {w.module.rpartition(".")[2] for w in weights.values()}
        raise UnknownName(pattern, known | weights.keys(), "weight that an adapter fits")
    return found


def _fits(pattern: str, name: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatch.fnmatchcase(name, pattern)


# --- attention -------------------------------------------------------------------------------------


def _of_attention(weights: Mapping[str, Weight], graph: ir.Graph) -> list[str]:
    """The linear weights around attention products: queries, keys, values, and the output projection."""
    at = {s.node: n for n, w in weights.items() if w.kind != EMBEDDING for s in w.sites}
    found: set[str] = set()
    for node in graph.all_nodes():
        if node.op_type in _ATTENTION or _meets_activations(node, at):
            found.update(_neighbouring_weights(node, at))
    linear = {n: w.module for n, w in weights.items() if w.kind == LINEAR}
    found = found or {n for n, module in linear.items() if _NAMES.search(n) or _NAMES.search(module)}
    if not found:
        types = sorted({s.node.op_type for w in weights.values() for s in w.sites})
        raise BadInput(
            f"the model has no attention that can be seen; choose other targets, as type:{','.join(types)}, or names: "
            f"{', '.join(list(weights)[:4])}"
        )
    return [n for n in weights if n in found]


def _meets_activations(node: ir.Node, at: Mapping[ir.Node, str]) -> bool:
    """True if `node` is a product of two values that come from different weights."""
    if node.op_type not in ("MatMul", "Einsum") or node in at or len(node.inputs) != 2:
        return False
    return all(v is not None and any(True for _ in _back(v, at)) for v in node.inputs)


def _neighbouring_weights(node: ir.Node, at: Mapping[ir.Node, str]) -> Iterator[str]:
    for value in node.inputs:
        if value is not None:
            yield from (at[n] for n in _back(value, at))
    seen: set[ir.Node] = set()
    front = [n for v in node.outputs for n, _ in v.uses()]
    while front:
        here = front.pop()
        if here in at:
            yield at[here]
        elif here not in seen and here.op_type not in ("Add", "MatMul", *_NORMS):
            seen.add(here)
            front.extend(n for v in here.outputs for n, _ in v.uses())


_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "ReduceMean", "Conv", "Gather")


def _back(value: ir.Value, at: Mapping[ir.Node, str]) -> Iterator[ir.Node]:
    """The nearest sites that `value` is computed from, within its graph."""
    seen: set[ir.Node] = set()
    front = [value]
    while front:
        node = front.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in at:
            yield node
        elif node.op_type != "Shape":
            front.extend(v for v in reads(node) if v is not None)
