"""The record of an adapter in the metadata of a model, for training on, saving, merging and recognition."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnxgrad.ir.builder import FLOATS
from onnxgrad.training.adapters.forms import CHANNELS, DORA, LORA, TENSORS, VERA
from onnxgrad.training.adapters.parts import WeightPart
from onnxgrad.training.metadata import ADAPTER, check_initializers, read_record, record_text


@dataclass(frozen=True)
class Entry:
    """One adapted weight W, or a part of its outputs.

    Attributes:
        weight: the name of the initializer W.
        tensors: the names of the initializers that train: ``A`` and ``B``, with DoRA ``m``; of VeRA ``d`` and ``b``;
            of other forms the names of PEFT (see `forms`).
        kind: ``linear``, ``conv`` or ``embedding``.
        module: of the exported model, by which PEFT knows it.
        scale: the factor of A·B.
        transposed: A·B has the layout of Wᵀ.
        groups: those of a convolution.
        quantized: it stays beside its adapter.
        part: which of the outputs; None: all.
        label: the part as it is called, in brackets.
        fixed: the names of initializers that extend A and B as constants: A₀ and −B₀ of PiSSA and OLoRA.
        rank: of LoHa and LoKr, where it is not that of the record.
        feedforward: (IA)³ scales the inputs.
    """

    weight: str
    tensors: dict[str, str]
    kind: str
    module: str
    scale: float
    transposed: bool = False
    groups: int = 1
    quantized: bool = False
    part: WeightPart | None = None
    label: str = ""
    fixed: dict[str, str] = field(default_factory=dict)
    rank: int = 0
    feedforward: bool = False


@dataclass
class Record:
    """The adapter of a model.

    Attributes:
        form: ``lora``, ``dora``, ``vera``, ``loha``, ``lokr`` or ``ia3``.
        rank, alpha, dropout, rslora: as they were asked for.
        base: the fingerprint of the model without it.
        entries: what is adapted.
        also: the names of initializers that train as a whole beside it.
        shared: of VeRA, the names of the initializers ``A`` and ``B``.
        seed: of VeRA, what they were drawn by.
        renamed: parameters of the exported model, by the names that the exporter gave their initializers of `also`.
        turned: those of `also` that the exporter transposed.
        options: of LoKr, settings of PEFT that the shapes of tensors depend on.
    """

    form: str
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    base: str
    entries: list[Entry] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    turned: list[str] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict)

    @property
    def own(self) -> list[str]:
        """The names of the initializers of the adapter that train."""
        return [name for e in self.entries for name in e.tensors.values()]

    @property
    def constants(self) -> list[str]:
        """The names of the initializers of the adapter that do not train."""
        return [*self.shared.values(), *(name for e in self.entries for name in e.fixed.values())]

    @property
    def trained(self) -> list[str]:
        """The names of all initializers that train."""
        return [*self.own, *self.also]

    def write(self, model: ir.Model) -> None:
        """Note it in the metadata of `model`."""
        model.metadata_props[ADAPTER] = record_text(self)


#: The tensors that an entry of a form has: one of these sets.
LETTERS = {LORA: ({"A", "B"},), DORA: ({"A", "B", "m"},), VERA: ({"d", "b"},), CHANNELS: ({"A"},), **TENSORS}


def record_of(props: Mapping[str, str]) -> Record | None:
    """The record of an adapter in metadata; None without one.

    Raises:
        BadInput: they are of an unknown form.
    """
    return read_record(props, ADAPTER, _read)


def _read(fields: dict[str, Any]) -> Record:
    """The record of these `fields`. Raises ValueError, KeyError or TypeError for others than a record has."""
    entries = [_entry(about) for about in fields.pop("entries")]
    found = Record(**fields, entries=entries)
    own, shared = LETTERS[found.form], {"A", "B"} if found.form == VERA else set()
    numbers = (found.rank, found.alpha, found.dropout, found.seed, *(e.scale for e in entries))
    names = (
        found.base,
        *found.trained,
        *found.constants,
        *found.renamed.values(),
        *found.turned,
        *(n for e in entries for n in (e.weight, e.module, e.label)),
    )
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
        raise ValueError
    if type(found.rank) is not int or found.rank < 1 or found.alpha < 0 or not 0 <= found.dropout < 1:
        raise ValueError
    if not all(isinstance(n, str) for n in names) or any(type(e.groups) is not int or e.groups < 1 for e in entries):
        raise ValueError
    if not found.renamed.keys() <= set(found.also) or not set(found.turned) <= set(found.also):
        raise ValueError
    if found.shared.keys() != shared or any(e.tensors.keys() not in own for e in entries):
        raise ValueError
    if not all(type(n) is int for e in entries for n in (e.rank, *found.options.values())):
        raise ValueError
    fixed = {"B0"} if found.form == CHANNELS else {"A0", "B0"}
    if any(e.fixed and e.fixed.keys() != fixed for e in entries):
        raise ValueError
    return found


def _entry(about: dict[str, Any]) -> Entry:
    part = about.pop("part")
    return Entry(**about, part=None if part is None else WeightPart(**part))


def record_in(model: ir.Model) -> Record | None:
    """The record of an adapter in the metadata of `model`, checked against its tensors; None without one.

    Raises:
        BadInput: they name tensors that it does not have.
    """
    found = record_of(model.metadata_props)
    if found is None:
        return None
    check_initializers(model, ADAPTER, (*(e.weight for e in found.entries), *found.trained, *found.constants))
    return found


def base_fingerprint(graph: ir.Graph, without: Collection[str] = ()) -> str:
    """A digest of the model's float tensors, `without` those of an adapter; it does not depend on names."""
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
