"""Tell weights of equal content apart: by names, by the layer that a bias belongs to, and by their order in the graph.

An exporter may also have stored equal weights once. After training they differ, and each reader gets its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import is_op
from onnxgrad.transplants.match import Form, Origin, WholeForm
from onnxgrad.transplants.schemes import stored_behind
from onnxgrad.transplants.weights import TargetWeight, labels_of

_SUFFIX = re.compile(r"(_quantized|_DQ_Q[48]|_Q[48]|_q[48]|_transposed?|_fp16|_bf16)+$")
_SUMS = ("Add", "Sum")
#: Operators that a weight goes through on its way to a layer.
_RENAMING = ("Transpose", "Identity", "Cast", "DequantizeLinear", "Reshape")
_PASSING = ("Cast", "Reshape", "Transpose", "Mul", "Identity", "Squeeze", "Unsqueeze", "Split")


def score(labels: Sequence[str], others: Sequence[str]) -> float:
    """The share of the words of one of `labels` that one of `others` has in the same order."""
    best = 0.0
    for label in labels:
        words = _words(label)
        for other in others:
            best = max(best, _common(words, _words(other)) / max(len(words), 1))
    return best


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+|\d+", _SUFFIX.sub("", text))


def _common(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def is_same_name(weight: TargetWeight, origin: Origin) -> bool:
    """True if both tensors have one name, apart from what quantizers append."""
    return _SUFFIX.sub("", weight.name) == origin.name


def is_equal(weight: TargetWeight, form: Form, other: Form) -> bool:
    """True if both forms give `weight` the same elements after training."""
    return np.array_equal(form.build(weight.shape, True), other.build(weight.shape, True))


def choose(weight: TargetWeight, forms: Sequence[WholeForm]) -> WholeForm | None:
    """The one of several `forms` of equal content that readers and names decide for; None if they do not."""
    fits = _in_role(weight.uses, forms)
    named = [f for f in fits if is_same_name(weight, f.origin)]
    return named[0] if named else _nearest(weight, fits, weight.labels)


def choose_for_uses(
    weight: TargetWeight, forms: Sequence[WholeForm], without: Sequence[int] = ()
) -> list[tuple[list[int], WholeForm]]:
    """The form of each use of `weight`, which stores several weights once; nothing if some are not decided.

    Uses of which none of the forms is the origin are left out (`without`).
    """
    found: dict[Origin, tuple[list[int], WholeForm]] = {}
    for i, (node, at) in enumerate(weight.uses):
        if i in without:
            continue
        form = _nearest(weight, _in_role([(node, at)], forms), labels_of(node))
        if form is None:
            return []
        found.setdefault(form.origin, ([], form))[0].append(i)
    return list(found.values())


def _nearest(weight: TargetWeight, forms: Sequence[WholeForm], labels: Sequence[str]) -> WholeForm | None:
    """The form whose name agrees best with `labels`; None if several do."""
    if not forms or all(is_equal(weight, forms[0], f) for f in forms[1:]):
        return forms[0] if forms else None
    scores = [score([f.origin.name], labels) for f in forms]
    best = [f for f, s in zip(forms, scores) if s == max(scores)]
    return best[0] if max(scores) >= 0.5 and all(is_equal(weight, best[0], f) for f in best[1:]) else None


def _in_role(uses: Sequence[tuple[ir.Node, int]], forms: Sequence[WholeForm]) -> list[WholeForm]:
    """The forms whose origins are read in the same way: by a lookup, or by a product; all, if there are none."""
    roles = {_is_lookup(*use) for use in uses}
    return [f for f in forms if not roles.isdisjoint(_is_lookup(*u) for u in f.origin.uses)] or list(forms)


def _is_lookup(node: ir.Node, at: int) -> bool:
    """True if the node, or the first one behind others that only pass a weight on, selects rows."""
    while node.op_type in ("Transpose", "Identity", "Cast", "DequantizeLinear") and at == 0:
        uses = list(node.outputs[0].uses())
        if not uses:
            break
        node, at = uses[0].node, uses[0].idx
    return "Gather" in node.op_type or node.op_type == "EmbedLayerNormalization"


def by_order(groups: Sequence[tuple[TargetWeight, Sequence[WholeForm]]]) -> dict[int, list[tuple[list[int], Form]]]:
    """Pair uses of weights with uses of origins, in the order of the graphs.

    Args:
        groups: weights that have the same forms of equal content, in their order.

    Returns:
        For each weight, by its place in `groups`, the uses that read each form; nothing if the numbers do not agree.
    """
    forms = list({f.origin: f for f in groups[0][1]}.values())
    uses = [(i, j) for i, (weight, _) in enumerate(groups) for j in range(len(weight.uses))]
    if len(uses) == len(forms):
        pairs = list(zip(uses, forms))
    else:
        each = [f for f in forms for _ in f.origin.uses]
        if len(each) != len(uses):
            return {}
        pairs = list(zip(uses, each))
    found: dict[int, dict[Origin, tuple[list[int], Form]]] = {}
    for (i, j), form in pairs:
        found.setdefault(i, {}).setdefault(form.origin, ([], form))[0].append(j)
    return {i: list(of_weight.values()) for i, of_weight in found.items()}


def layer_of(uses: Sequence[tuple[ir.Node, int]]) -> ir.Value | None:
    """The weight of the layer whose result a bias with these `uses` is added to; None if it is no bias."""
    for node, at in uses:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "FusedConv", "FusedGemm") and at == 2:
            return stored_behind(node.inputs[1], _RENAMING)
        if is_op(node, _SUMS):
            for value in node.inputs:
                maker = None if value is None else value.producer()
                while maker is not None and is_op(maker, _PASSING) and maker.inputs[0] is not None:
                    maker = maker.inputs[0].producer()
                if maker is not None and ("MatMul" in maker.op_type or maker.op_type == "Gemm"):
                    found = [w for v in maker.inputs[1:] if (w := stored_behind(v, _RENAMING)) is not None]
                    if found:
                        return found[0]
        elif node.domain == "com.microsoft" and node.op_type in ("Attention", "QAttention", "DynamicQuantizeMatMul"):
            return stored_behind(node.inputs[1], _RENAMING)
    return None
