"""What an adapted model says of its adapter: metadata, by which it is trained on, saved, merged and recognized."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.builder import FLOATS
from onnxgrad.training.metadata import ADAPTER

_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One adapted weight W: where A·B has its layout (`transposed`: that of Wᵀ), it is W + `scale`·A·B.

    Attributes:
        a, b: the names of the initializers A and B.
        kind: ``linear``, ``conv`` or ``embedding``.
        module: of the exported model, by which PEFT knows it.
        groups: those of a convolution.
        quantized: it stays beside its adapter.
    """

    a: str
    b: str
    kind: str
    module: str
    scale: float
    transposed: bool = False
    groups: int = 1
    quantized: bool = False


@dataclass
class Record:
    """The adapter of a model.

    Attributes:
        rank, alpha, dropout, rslora: as they were asked for.
        base: the fingerprint of the model without it.
        weights: what is adapted, by the names of initializers.
        also: the names of initializers that train as a whole beside it.
    """

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    base: str
    weights: dict[str, Entry] = field(default_factory=dict)
    also: list[str] = field(default_factory=list)

    @property
    def trained(self) -> list[str]:
        """The names of all initializers that belong to the adapter."""
        return [*(name for e in self.weights.values() for name in (e.a, e.b)), *self.also]

    def write(self, model: ir.Model) -> None:
        """Note it in the metadata of `model`."""
        model.metadata_props[ADAPTER] = self.text()

    def text(self) -> str:
        """As JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, ensure_ascii=False)


def record_of(props: Mapping[str, str]) -> Record | None:
    """The adapter that metadata tell of; None if they tell of none.

    Raises:
        BadInput: they tell of it in a way that is not known.
    """
    text = props.get(ADAPTER, "")
    if not text:
        return None
    try:
        told: dict[str, Any] = json.loads(text)
        if told.pop("version") != _VERSION:
            raise ValueError
        entries = {str(name): Entry(**about) for name, about in told.pop("weights").items()}
        found = Record(**told, weights=entries)
        numbers = (found.rank, found.alpha, found.dropout, *(e.scale for e in entries.values()))
        names = (found.base, *(n for e in entries.values() for n in (e.a, e.b, e.kind, e.module)), *found.also)
        if not all(isinstance(n, (int, float)) for n in numbers) or not all(isinstance(n, str) for n in names):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"the metadata {ADAPTER!r} tell of no adapter that is known here: {text[:60]}") from error
    return found


def record_in(model: ir.Model) -> Record | None:
    """The adapter that the metadata of `model` tell of, all of which it has; None if they tell of none.

    Raises:
        BadInput: they tell of tensors that it does not have.
    """
    found = record_of(model.metadata_props)
    for name in () if found is None else (*found.weights, *found.trained):
        held = model.graph.initializers.get(name)
        if held is None or held.const_value is None:
            raise BadInput(f"the metadata {ADAPTER!r} tell of {name!r}, which the model does not have")
    return found


def base_fingerprint(graph: ir.Graph, without: Collection[str] = ()) -> str:
    """A digest of the weights of a model, whatever they are called: of its float tensors but those called `without`."""
    digests = []
    for scope in (graph, *graph.subgraphs()):
        tensors = [v.const_value for n, v in scope.initializers.items() if n not in without]
        tensors += [ir.convenience.get_const_tensor(n.outputs[0]) for n in scope if n.op_type == "Constant"]
        for tensor in tensors:
            if tensor is not None and tensor.size > 1 and (tensor.dtype in FLOATS or tensor.size >= _LARGE):
                digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.tobytes())
                digests.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


#: Integer tensors from so many elements on are weights.
_LARGE = 1024
