"""Names of classes: those in a model's metadata, or the labels that a classifier looks up by its largest score.

Converters write them as attributes of a classifier (ai.onnx.ml), as the table of a LabelEncoder, or as a constant that
ArrayFeatureExtractor or Gather indexes with an ArgMax.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import ancestors
from onnxgrad.ir.match import is_standard
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.training.metadata import CLASSES

_ML = "ai.onnx.ml"
#: Attributes that list labels in the order of the scores.
_LISTS = ("classlabels_ints", "classlabels_int64s", "classlabels_strings")


class _Site(NamedTuple):
    """A node that maps classes to labels.

    Attributes:
        labels: in the order of the scores.
        scores: of the classes.
        output: the output of the graph with the label of each row; None without one.
    """

    labels: tuple[str, ...]
    scores: ir.Value
    output: str | None


def class_names(model: ir.Model, scores: Collection[str] = (), count: int | None = None) -> tuple[str, ...] | None:
    """The names of the classes of `model`, from its metadata or from labels in its graph.

    Args:
        model: as it was loaded.
        scores: names of the values that are compared with labels; they decide where a graph has several classifiers.
        count: the number of their classes, if it is known. A graph's labels of another number are not theirs.

    Raises:
        BadInput: the metadata are no list of names.
    """
    text = model.metadata_props.get(CLASSES, "")
    if not text:
        return class_labels(model.graph, scores, count)
    try:
        names = json.loads(text)
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
            raise ValueError
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the model's metadata {CLASSES!r} are no list of names: {text[:60]}") from error
    return tuple(names)


def class_labels(graph: ir.Graph, scores: Collection[str] = (), count: int | None = None) -> tuple[str, ...] | None:
    """The labels of the classes in the order of their scores; integers as text. None if the graph has none.

    Among several classifiers, as in ensembles, those whose label is an output of the graph count; among these, the one
    that reads or computes one of the `scores`.

    Args:
        graph: of the model.
        scores: names of the values that are compared with labels.
        count: the number of classes, if it is known.
    """
    sites = _sites(graph, scores, count)
    return sites[0].labels if sites else None


def label_output(graph: ir.Graph, scores: Collection[str], count: int) -> str | None:
    """The output of `graph` with the label of each row by the `scores` of so many classes, if it has one."""
    return next((site.output for site in _sites(graph, scores, count) if site.output is not None), None)


def _sites(graph: ir.Graph, scores: Collection[str], count: int | None) -> list[_Site]:
    """The nodes that map the classes of `scores` to labels; empty if they contradict each other."""
    sites = [site for node in graph if (site := _find_labels(node)) is not None and count in (None, len(site.labels))]
    sites = [site for site in sites if site.output is not None] or sites
    if len({site.labels for site in sites}) > 1:
        sites = [site for site in sites if _is_connected(graph, site.scores, scores)]
    return sites if len({site.labels for site in sites}) == 1 else []


def _find_labels(node: ir.Node) -> _Site | None:
    """The labels to which `node` maps its operand's classes."""
    if not (is_standard(node) or node.domain == _ML) or not node.inputs or node.inputs[0] is None:
        return None
    labels: Any = None
    if node.domain == _ML and node.op_type == "LabelEncoder":
        scores = _argmax(node.inputs[0])
        labels = None if scores is None else _table(node)
    elif node.op_type in ("ArrayFeatureExtractor", "Gather"):
        scores = None if len(node.inputs) < 2 or node.inputs[1] is None else _argmax(node.inputs[1])
        labels = None if scores is None else _constant(node.inputs[0])
    elif node.domain == _ML:
        scores = node.inputs[0] if node.op_type == "ZipMap" else node.outputs[-1]
        labels = _list_labels(node)
        return _Site(labels, scores, _shown_as(node.outputs[0])) if labels else None
    output = _shown_as(node.outputs[0])
    if labels is None or scores is None or output is None:
        return None
    names = tuple(map(_text, labels))
    return _Site(names, scores, output) if len(set(names)) == len(names) > 1 else None


def _list_labels(node: ir.Node) -> tuple[str, ...]:
    """The labels that a classifier lists in an attribute; empty for other nodes."""
    labels = next((node.attributes[k].value for k in _LISTS if k in node.attributes), None)
    return tuple(map(_text, labels or ()))


def _text(label: Any) -> str:
    return label.decode(errors="replace") if isinstance(label, bytes) else str(label)


def _argmax(index: ir.Value) -> ir.Value | None:
    """The scores whose largest `index` is the place of."""
    value, node = index, index.producer()
    while node is not None and _keeps_order(node) and node.inputs[0] is not None:
        value, node = node.inputs[0], node.inputs[0].producer()
    if node is None or node.op_type == "ArgMax":
        return None if node is None else node.inputs[0]
    labels = _list_labels(node) if node.domain == _ML and value.index() == 0 else ()
    return node.outputs[-1] if labels and labels == tuple(map(str, range(len(labels)))) else None


def _keeps_order(node: ir.Node) -> bool:
    """True if `node` changes the type or the shape of labels, not the labels."""
    return node.op_type == "Cast" or traits_of(node).moves is Moves.VIEW


def _shown_as(value: ir.Value) -> str | None:
    """The output of its graph that `value` is, perhaps written in another way; None without one."""
    if value.is_graph_output():
        return value.name
    users = [node.outputs[0] for node, _ in value.uses() if _keeps_order(node)]
    return next((name for user in users if (name := _shown_as(user)) is not None), None)


def _constant(value: ir.Value) -> list[Any] | None:
    """The elements of a constant list of text or of whole numbers."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size not in tensor.shape.numpy():
        return None
    if tensor.dtype != ir.DataType.STRING and not tensor.dtype.is_integer():
        return None
    return list(np.asarray(tensor.numpy()).ravel())


def _table(node: ir.Node) -> list[Any] | None:
    """The values of a LabelEncoder for the keys 0, 1, 2, …; None if those are not its keys."""
    found = {k: a for k, a in node.attributes.items() if k.startswith(("keys_", "values_", "classes_"))}
    sides: dict[str, list[Any]] = {}
    for name, attribute in found.items():
        side = name.partition("_")[0]
        sides[side] = list(attribute.as_tensor().numpy().ravel()) if name.endswith("_tensor") else list(attribute.value)
    if "classes" in sides:
        return sides["classes"]
    keys, values = sides.get("keys"), sides.get("values")
    if keys is None or values is None or sorted(keys) != list(range(len(values))):
        return None
    return [value for _, value in sorted(zip(keys, values))]


def _is_connected(graph: ir.Graph, scores: ir.Value, names: Collection[str]) -> bool:
    """True if one of `names` leads to `scores`, or `scores` to one of them."""
    if scores.name in names:
        return True
    values = {v.name: v for node in graph for v in node.outputs}
    before = {v.name for node in ancestors(graph, [scores]) for v in node.outputs}
    if before.intersection(names):
        return True
    producer = scores.producer()
    return any(producer in ancestors(graph, [values[n]]) for n in names if n in values)
