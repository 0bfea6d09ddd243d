"""Insert adapters into a graph: choose weights, add trained tensors, and nodes at every site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Names
from onnxgrad.ir.graph import add_initializer
from onnxgrad.training.adapters.branches import Beforehand, Branch, Change, Factors, Scaling
from onnxgrad.training.adapters.config import IA3, Adapter, LoRA, VeRA
from onnxgrad.training.adapters.forms import CHANNELS, DORA, IA_3, LOHA, LOKR, LORA, NAMES, TENSORS, VERA
from onnxgrad.training.adapters.parts import outputs
from onnxgrad.training.adapters.record import Entry, Record, base_fingerprint, record_in
from onnxgrad.training.adapters.sites import EMBEDDING, LINEAR, bias_of, weights
from onnxgrad.training.adapters.targets import Target, select_targets
from onnxgrad.training.adapters.values import drawn, projections

#: The constants beside A and B of an initial form.
FIXED = ("A0", "B0")
#: Names of initializers, after the name of the module.
_CALLED = {
    **{
        form: {"A": "lora_A", "B": "lora_B", "m": "lora_magnitude_vector", "A0": "lora_A_first", "B0": "lora_B_first"}
        for form in (LORA, DORA)
    },
    VERA: {"d": "vera_lambda_d", "b": "vera_lambda_b"},
    CHANNELS: {"A": "channels", "B0": "channels_at"},
    **{form: {name: name for name in NAMES} for form in TENSORS},
}
_SPELLED = {VERA: "VeRA", LOHA: "LoHa", LOKR: "LoKr", IA_3: "(IA)³"}


def initializer_name(form: str, module: str, label: str, letter: str) -> str:
    """The name of a tensor of an adapter in the graph, unless it is taken."""
    return f"{module}{label}.{_CALLED[form][letter]}"


def adapted(model: ir.Model, asked: Adapter | None) -> Record | None:
    """The adapter of `model`: its own, or the `asked` one, which is inserted in place.

    Raises:
        BadInput: it has one and shall have another, or what `adapt` refuses.
    """
    known = record_in(model)
    if asked is None:
        return known
    if known is not None:
        raise BadInput("the model has an adapter, which is trained on as it is\n  hint: merge it, or give no `adapter`")
    record = adapt(model.graph, asked)
    record.write(model)
    return record


def adapt(graph: ir.Graph, asked: Adapter) -> Record:
    """Insert newly initialized adapters into `graph`, in place.

    Raises:
        UnknownName, BadInput: targets that match nothing or do not fit the form, or a rank that is larger than that of
            a weight.
    """
    fit = weights(graph)
    targets = select_targets(asked.patterns, fit, graph, asked.rank if isinstance(asked, LoRA) else 0)
    named = list(asked.feedforward) if isinstance(asked, IA3) else []
    inner = {t.weight.name for t in select_targets(named, fit, graph)} if named else set()
    record = Record(
        asked.form, asked.rank, asked.strength, asked.dropout, isinstance(asked, LoRA) and asked.rslora,
        base_fingerprint(graph), seed=asked.seed if isinstance(asked, VeRA) else 0, options=asked.options,
    )  # fmt: skip
    for target in targets:
        _check(target, asked, record, graph)
    values = [drawn(t.weight, asked, t.part, t.weight.name in inner) for t in targets]
    shared = projections([t.weight.ends for t in targets], asked.rank, asked.seed) if record.form == VERA else {}
    about = [Entry(t.weight.name, {}, "", "", asked.scale, feedforward=t.weight.name in inner) for t in targets]
    insert(graph, targets, values, about, shared, record)
    return record


def _check(target: Target, asked: Adapter, record: Record, graph: ir.Graph) -> None:
    weight, rank = target.weight, record.rank
    without = f"\n  hint: targets without it ('!{weight.name}')"
    ends = (weight.ends[0], weight.ends[1] if target.part is None else len(target.part.columns(weight.ends[1])))
    if record.form in (LORA, DORA) and rank > min(ends):
        size = " × ".join(map(str, ends))
        where = " in each group" if weight.groups > 1 else f" at {target.label}" if target.label else ""
        raise BadInput(
            f"rank {rank} is larger than that of {weight.name!r}, which is {size}{where}"
            f"\n  hint: a lower rank, or targets without it ('!{weight.name}'), or without all such weights ('!small')"
        )
    if record.dropout and any(s.node.graph is not graph for s in weight.sites):
        raise BadInput(
            f"{weight.name!r} is read in a branch or loop body, where an adapter has no dropout\n"
            f"  hint: dropout=0, or targets without it ('!{weight.name}')"
        )
    if (
        isinstance(asked, LoRA)
        and asked.init is not None
        and (
            weight.kind != LINEAR
            or weight.quantized
            or len(weight.shape) > 2
            or len({s.transposed for s in weight.sites}) > 1
        )
    ):
        raise BadInput(f"init={asked.init!r} decomposes matrices of floats; {weight.name!r} is none{without}")
    if record.form not in (LORA, DORA) and target.part is not None:
        raise BadInput(
            f"{_SPELLED[record.form]} adapts whole weights, not {target.label} of {weight.name!r}\n"
            "  hint: use LoRA, or DoRA"
        )
    turned = len({s.transposed for s in weight.sites}) > 1
    if record.form == DORA:
        why = (
            "stored as integers" if weight.quantized
            else "a stack of matrices" if weight.kind == LINEAR and len(weight.shape) > 2
            else "read from both sides" if turned
            else ""
        )  # fmt: skip
        if why:
            raise BadInput(f"DoRA needs one length for each output of a weight; {weight.name!r} is {why}{without}")
    if record.form == VERA and (
        weight.kind != LINEAR or len(weight.shape) > 2 or turned or any(s.is_left for s in weight.sites)
    ):
        kinds = "/".join(sorted({s.node.op_type for s in weight.sites}))
        raise BadInput(f"VeRA adapts matrices of Linear layers; {weight.name!r} is read by {kinds} otherwise{without}")
    if record.form in TENSORS and (
        weight.kind == EMBEDDING
        or (weight.kind == LINEAR and len(weight.shape) > 2)
        or (record.form == IA_3 and turned)
    ):
        kinds = "/".join(sorted({s.node.op_type for s in weight.sites}))
        raise BadInput(
            f"{_SPELLED[record.form]} adapts linear layers and convolutions; {weight.name!r} is read by {kinds} "
            f"otherwise{without}"
        )
    biases = [bias_of(s, outputs(weight)) for s in weight.sites] if record.form == IA_3 and not weight.quantized else []
    if any(b is not None and b[0].inputs[b[1]].const_value is None for b in biases):  # type: ignore[union-attr]
        raise BadInput(f"(IA)³ scales the bias behind {weight.name!r}, which is computed{without}")


def insert(
    graph: ir.Graph, targets: Sequence[Target], values: Sequence[Mapping[str, np.ndarray]], about: Sequence[Entry],
    shared: Mapping[str, np.ndarray], record: Record,
) -> None:  # fmt: skip
    """Insert adapters with the given `values` at `targets`, and add them to `record`.

    Args:
        graph: changed in place.
        targets: what is adapted.
        values: what trains, by letter, for each of them.
        about: has the scale of each of them, its rank if it is another than that of the record, and `feedforward`.
        shared: A and B of VeRA.
        record: of the form that says what the values are.
    """
    names = Names.of_graph(graph)

    def add(name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        return add_initializer(graph, ir.tensor(array.astype(dtype.numpy()), name=names.exactly(name)))

    common = {letter: add(f"vera_{letter}", a, targets[0].weight.dtype) for letter, a in shared.items()}
    record.shared = {letter: value.name or "" for letter, value in common.items()}
    for target, given, entry in zip(targets, values, about):
        weight = target.weight
        called = {k: initializer_name(record.form, weight.module, target.label, k) for k in given}
        own = {k: add(called[k], a, weight.dtype) for k, a in given.items()}
        fixed = {k: own.pop(k) for k in FIXED if k in own}
        record.entries.append(Entry(
            weight.name, {k: v.name or "" for k, v in own.items()}, weight.kind, weight.module, entry.scale,
            weight.transposed, weight.groups, weight.quantized, target.part, target.label,
            {k: v.name or "" for k, v in fixed.items()}, entry.rank, entry.feedforward,
        ))  # fmt: skip
        before, scale = Beforehand(weight, names), entry.scale
        factors: Factors | Change | Scaling
        if record.form == IA_3:
            factors = Scaling(before.shaped(own["ia3_l"], [own["ia3_l"].const_value.size]), entry.feedforward)  # type: ignore[union-attr]
        elif record.form in TENSORS:
            factors = before.change(own, scale)
        elif record.form == VERA:
            ends = weight.ends
            a, b = before.first(common["A"], ends[0], 0), before.first(common["B"], ends[1], 1)
            factors = Factors(a, b, scale, between=own["d"], after=own["b"])
        else:
            a, b = own["A"], own["B"] if "B" in own else fixed["B0"]
            if "A0" in fixed:
                a, b = before.concatenate(a, fixed["A0"], 1), before.concatenate(b, fixed["B0"], 0)
            if target.part is not None:
                b = before.spread(b, target.part)
            factors = Factors(a, b, scale)
            if record.form == DORA:
                factors.ratio = before.ratio(factors, own["m"], target.part)
        before.write(graph)
        for site in weight.sites:
            Branch(site, weight, names).write(factors, record.dropout)
