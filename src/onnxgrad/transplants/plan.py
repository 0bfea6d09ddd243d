"""The plan of a transplant: what each weight of the target is made from, and what of the source finds no place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import is_op
from onnxgrad.training.quantization.norms import fold_norms
from onnxgrad.transplants.match import Form, Lines, Matcher, Origin, Whole, squeezed
from onnxgrad.transplants.names import by_order, by_role, choose, is_same_name, layer_of, score
from onnxgrad.transplants.schemes import array_of, tensor_of
from onnxgrad.transplants.weights import Weight, weights_of

#: Without the file before training, weights whose training moved them less than this are taken for the same.
_MOVED = 0.5


@dataclass
class Assignment:
    """A weight of the target, and what it is made from.

    Attributes:
        weight: of the target.
        form: what it is made from.
        uses: the reads that this is for; None: all of them.
    """

    weight: Weight
    form: Form
    uses: list[int] | None = None

    @property
    def is_changed(self) -> bool:
        """True if training has changed it."""
        return any(o.is_changed for o in self.form.covers)


@dataclass
class Plan:
    """Assignments, and the names of weights that have none.

    Attributes:
        assignments: of weights of the target.
        missing: changed weights of the source that have no place, or not as a whole.
        ambiguous: weights of the target that have the content of several, which training made different.
    """

    assignments: list[Assignment] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)


def make_plan(origins: Sequence[Origin], targets: Sequence[Weight], *, has_base: bool = True) -> Plan:
    """Match `targets` with `origins`.

    Args:
        origins: the weights of the source.
        targets: the weights of the file that they go into.
        has_base: the origins know their content before training; else similar content is taken for the same.
    """
    return _Planning(origins, targets, has_base).run()


class _Planning:
    def __init__(self, origins: Sequence[Origin], targets: Sequence[Weight], has_base: bool) -> None:
        self.origins, self.targets, self.has_base = origins, targets, has_base
        self.matcher = Matcher(origins)
        self.plan = Plan()
        self.open: list[tuple[Weight, list[Whole]]] = []  # of equal content
        self.forms: dict[ir.Value, Form] = {}

    def run(self) -> Plan:
        matrices = [w for w in self.targets if len(_long_axes(w.shape)) > 1]
        rest = [w for w in matrices if not self._whole(w) and not self._fused(w)]
        rest += [w for w in self.targets if w not in matrices and not self._bias(w) and not self._whole(w)]
        self._settle_equal()
        for weight in rest:
            if not self._bias(weight, of_any=True):
                self._by_name(weight)
        self.plan.missing = self._missing()
        return self.plan

    def _assign(self, weight: Weight, form: Form, uses: list[int] | None = None) -> bool:
        self.plan.assignments.append(Assignment(weight, form, uses))
        self.forms[weight.value] = form
        return True

    def _tolerance(self, weight: Weight, array: np.ndarray) -> float:
        return weight.tolerance(array) if self.has_base else max(weight.tolerance(array), _MOVED)

    def _whole(self, weight: Weight) -> bool:
        array = weight.floats()
        found = self.matcher.wholes(array, self._tolerance(weight, array))
        if not found:
            return False
        if not self.has_base:  # of similar ones, the file of the same name
            named = [form for _, form in found if is_same_name(weight, form.origin)]
            if named or found[0][0] > weight.tolerance(array):
                return self._assign(weight, (named or [found[0][1]])[0])
        forms = [form for _, form in found]
        roles = by_role(weight, forms) if len(forms) > 1 else []
        form = forms[0] if len(forms) == 1 else None if roles else choose(weight, forms)
        if len(roles) == 1:
            form = roles[0][1]
        for uses, own in roles if len(roles) > 1 else ():
            self._assign(weight, own, uses)
        if form is not None:
            self._assign(weight, form)
        elif not roles:
            self.open.append((weight, forms))
        return True

    def _settle_equal(self) -> None:
        """Assign weights of equal content that names do not tell apart."""
        groups: dict[frozenset[Origin], list[tuple[Weight, list[Whole]]]] = {}
        for weight, forms in self.open:
            groups.setdefault(frozenset(f.origin for f in forms), []).append((weight, forms))
        for group in groups.values():
            taken = {o for a in self.plan.assignments for o in a.form.covers}
            left = [(w, [f for f in forms if f.origin not in taken] or forms) for w, forms in group]
            pairs = by_order(left) or by_order(group)
            for i, (weight, _) in enumerate(group):
                if i not in pairs:
                    self.plan.ambiguous.append(weight.name)
                elif len(pairs[i]) == 1:
                    self._assign(weight, pairs[i][0][1])
                else:
                    for uses, form in pairs[i]:
                        self._assign(weight, form, uses)

    def _fused(self, weight: Weight) -> bool:
        array = weight.floats()
        found = self.matcher.lines(array, weight.tolerance(array))
        return found is not None and self._assign(weight, found)

    def _bias(self, weight: Weight, *, of_any: bool = False) -> bool:
        """Assign the bias of a layer whose weight has a form, or (`of_any`) of the one layer that it fits."""
        shape = _long_axes(weight.shape)
        layer = layer_of(weight.uses)
        if len(shape) > 1 or (layer is None and not of_any):
            return False
        array, biases, found = weight.floats(), self._biases(), []
        for value, form in self.forms.items() if of_any else [(layer, self.forms.get(layer))]:  # type: ignore[arg-type]
            made = None
            if isinstance(form, Lines) and sum(r.stop - r.start for r in form.runs) == array.size:
                made = self.matcher.along(form, biases)
            elif isinstance(form, Whole) and (own := biases.get(form.origin)) and own.before.size == array.size:
                made = Whole(own, (0,))
            if made is not None and self._agrees(weight, array, made):
                found.append((value is not layer, len(found), made))
        if not found:
            return False
        best = min(found)
        return (not best[0] or len(found) == 1) and self._assign(weight, best[2])

    def _agrees(self, weight: Weight, array: np.ndarray, form: Form) -> bool:
        limit = self._tolerance(weight, array) * float(np.abs(array).max(initial=0)) + 1e-7
        return not np.abs(form.build(weight.shape, False) - array).max(initial=0) > limit

    def _biases(self) -> dict[Origin, Origin]:
        """The bias of each weight of the source, by the graph or by names."""
        by_value = {o.uses[0][0].inputs[o.uses[0][1]]: o for o in self.origins if o.uses}
        named = {o.name: o for o in self.origins}
        found = {}
        for origin in self.origins:
            if squeezed(origin.before).ndim == 1:
                layer = layer_of(origin.uses)
                weight = None if layer is None else by_value.get(layer)
                weight = weight or named.get(origin.name.removesuffix("bias") + "weight")
                if weight is not None and weight is not origin:
                    found[weight] = origin
        return found

    def _by_name(self, weight: Weight) -> None:
        """Assign a weight of other content by its name, where shapes leave one way."""
        for origin in self.origins:
            if is_same_name(weight, origin) and len(weight.name) > 1 and origin.before.shape == weight.shape:
                self._assign(weight, Whole(origin, tuple(range(squeezed(origin.before).ndim))))
                return

    def _missing(self) -> list[str]:
        """Changed weights of the source that have no place, in order."""
        read: dict[str, list[tuple[int, int, int]]] = {}
        for assignment in self.plan.assignments:
            for origin, spans in assignment.form.covers.items():
                for part in origin.parts:
                    read.setdefault(part, []).extend(spans)
        missing = []
        for origin in self.origins:
            if origin.parts == {origin.name} and (origin.is_changed or not self.has_base):
                shape = tuple(d for d in origin.before.shape if d != 1)
                if not _covers(read.get(origin.name, []), shape) and (self.has_base or origin.before.size > 1):
                    missing.append(origin.name)
        return missing


def _long_axes(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in shape if d != 1)


def _covers(spans: Sequence[tuple[int, int, int]], shape: tuple[int, ...]) -> bool:
    """True if `spans` together are all lines along an axis."""
    if any(axis < 0 for axis, _, _ in spans):
        return True
    for axis, size in enumerate(shape[:2]):
        end = 0
        for start, stop in sorted((a, b) for own, a, b in spans if own == axis):
            if start <= end:
                end = max(end, stop)
        if end >= size:
            return True
    return False


def origins_of(base: ir.Model, source: ir.Model | None) -> tuple[list[Origin], list[str]]:
    """The weights of `base` with their elements in `source`, and the names of weights that only `source` has.

    Without `source`, training has changed nothing. Layers with a normalization behind them are listed as well as they
    are when it is folded into them.
    """
    before = weights_of(base)
    after = before if source is None else weights_of(source)
    pairs, extra = _paired(before, after)
    found = []
    for weight in before:
        held = weight.floats()
        other = pairs.get(weight.name)
        trained = held if other is None or other is weight else other.floats().reshape(held.shape)
        found.append(Origin(weight.name, held, trained, weight.labels, weight.uses, frozenset([weight.name])))
    return found + _folded(base, base if source is None else source), extra


def _paired(before: Sequence[Weight], after: Sequence[Weight]) -> tuple[dict[str, Weight], list[str]]:
    """The weights after training by the names before, and the names of those that are new."""
    theirs: dict[str, Weight] = {}
    for weight in after:
        theirs.setdefault(weight.name, weight)
    found = {w.name: theirs[w.name] for w in before if w.name in theirs and theirs[w.name].shape == w.shape}
    taken = {id(w) for w in found.values()}
    left, others = [w for w in before if w.name not in found], [w for w in after if id(w) not in taken]
    for weight in left:
        fits = [w for w in others if w.shape == weight.shape]
        same = [w for w in fits if np.array_equal(w.floats(), weight.floats())]
        named = max(fits, key=lambda w: score([weight.name], w.labels), default=None)
        if same or (named is not None and (len(fits) == 1 or score([weight.name], named.labels) >= 0.75)):
            found[weight.name] = chosen = same[0] if same else named  # type: ignore[assignment]
            others.remove(chosen)
    return found, [w.name for w in others if np.prod(w.shape) > 1]


def _folded(base: ir.Model, source: ir.Model) -> list[Origin]:
    """Weights and biases of layers with the normalization behind them folded in."""
    before, after = _fold(base), _fold(source)
    return [
        Origin(key, array, after[key][0].astype(array.dtype), [key], [], frozenset(parts))
        for key, (array, parts) in before.items()
        if key in after and after[key][0].shape == array.shape
    ]


def _fold(model: ir.Model) -> dict[str, tuple[np.ndarray, list[str]]]:
    norms = [n for n in model.graph if is_op(n, "BatchNormalization")]
    if not norms:
        return {}
    graph = model.clone().graph
    layers = []
    for norm in [n for n in graph if is_op(n, "BatchNormalization")]:
        x = norm.inputs[0]
        layer = None if x is None else x.producer()
        if layer is not None and len(layer.inputs) > 1 and tensor_of(layer.inputs[1]) is not None:
            names = [v.name or "" for v in (*layer.inputs[1:3], *norm.inputs[1:5]) if v is not None]
            layers.append((norm, layer, names))
    fold_norms(graph)
    found = {}
    for norm, layer, names in layers:
        if norm.graph is None and layer.inputs[1] is not None and layer.inputs[2] is not None:
            for value, end in zip(layer.inputs[1:3], ("weight", "bias")):
                assert value is not None
                found[f"{names[0]} folded {end}"] = (array_of(value), names)
    return found
