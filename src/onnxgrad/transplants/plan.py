"""The plan of a transplant: what each weight of the target is made from, and what of the source finds no place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxgrad.transplants.match import Form, LineForm, Matcher, Origin, WholeForm, long_axes
from onnxgrad.transplants.names import by_order, choose, choose_for_uses, is_equal, is_same_name, layer_of
from onnxgrad.transplants.weights import TargetWeight

#: Without the file before training, weights whose training moved them less than this are taken for the same.
_MOVED = 0.5


@dataclass
class Assignment:
    """A weight of the target, and what it is made from.

    Attributes:
        weight: of the target.
        form: what it is made from.
        uses: the reads that this is for; None: all of them.
        twins: other origins with the same elements after training.
    """

    weight: TargetWeight
    form: Form
    uses: list[int] | None = None
    twins: tuple[Origin, ...] = ()

    @property
    def is_changed(self) -> bool:
        """True if training has changed it."""
        return any(o.is_changed for o in self.form.covers)


@dataclass
class WeightPlan:
    """Assignments, and the names of weights that have none.

    Attributes:
        assignments: of weights of the target.
        missing: changed weights of the source that have no place, or not as a whole.
        ambiguous: weights of the target that have the content of several, which training made different.
    """

    assignments: list[Assignment] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)


def make_plan(origins: Sequence[Origin], targets: Sequence[TargetWeight], *, has_base: bool = True) -> WeightPlan:
    """Match `targets` with `origins`.

    Args:
        origins: the weights of the source.
        targets: the weights of the file that they go into.
        has_base: the origins know their content before training; else similar content is taken for the same.
    """
    return _Planning(origins, targets, has_base).run()


class _Planning:
    def __init__(self, origins: Sequence[Origin], targets: Sequence[TargetWeight], has_base: bool) -> None:
        self.origins, self.targets, self.has_base = origins, targets, has_base
        self.matcher = Matcher(origins)
        self.plan = WeightPlan()
        self.open: list[tuple[TargetWeight, list[WholeForm]]] = []  # of equal content
        self.forms: dict[ir.Value, Form] = {}
        self.biases = self._biases()

    def run(self) -> WeightPlan:
        matrices = [w for w in self.targets if len(long_axes(w.shape)) > 1]
        rest = [w for w in matrices if not self._match_whole(w) and not self._fused(w)]
        rest += [w for w in self.targets if w not in matrices and not self._bias(w) and not self._match_whole(w)]
        self._settle_equal()
        for weight in rest:
            if not self._fused_bias(weight):
                self._by_name(weight)
        self.plan.missing = self._missing()
        return self.plan

    def _assign(
        self, weight: TargetWeight, form: Form, uses: list[int] | None = None, twins: Sequence[WholeForm] = ()
    ) -> bool:
        equal = tuple(f.origin for f in twins if f is not form and is_equal(weight, form, f))
        self.plan.assignments.append(Assignment(weight, form, uses, equal))
        self.forms[weight.value] = form
        return True

    def _tolerance(self, weight: TargetWeight, array: np.ndarray) -> float:
        return weight.tolerance(array) if self.has_base else max(weight.tolerance(array), _MOVED)

    def _match_whole(self, weight: TargetWeight) -> bool:
        array = weight.floats()
        found = self.matcher.wholes(array, self._tolerance(weight, array))
        if not found:
            return False
        forms = [form for _, form in found]
        if not self.has_base and found[0][0] > weight.tolerance(array):  # similar ones
            return self._assign(weight, choose(weight, forms) or forms[0])
        if all(is_equal(weight, forms[0], f) for f in forms[1:]):
            return self._assign(weight, forms[0], twins=forms)
        self.open.append((weight, forms))
        return True

    def _settle_equal(self) -> None:
        """Assign weights whose content before training is that of several that training made different."""
        groups: dict[frozenset[Origin], list[tuple[TargetWeight, list[WholeForm]]]] = {}
        for weight, forms in self.open:
            groups.setdefault(frozenset(f.origin for f in forms), []).append((weight, forms))
        for group in groups.values():
            weight, forms = group[0]
            kinds = [f for i, f in enumerate(forms) if not any(is_equal(weight, f, g) for g in forms[:i])]
            by_use = len(group) < len(kinds)  # the file stores some of them once
            left = [pair for pair in group if not self._choose(*pair, by_use=by_use)]
            taken = {o for w, _ in group for a in self.plan.assignments if a.weight is w for o in a.form.covers}
            rest = [(w, [f for f in forms if f.origin not in taken] or forms) for w, forms in left]
            pairs = (by_order(rest) or by_order(left)) if left else {}
            for i, (weight, forms) in enumerate(left):
                if i not in pairs:
                    self.plan.ambiguous.append(weight.name)
                for uses, form in pairs.get(i, ()):
                    self._assign(weight, form, uses if len(pairs[i]) > 1 else None, forms)

    def _choose(self, weight: TargetWeight, forms: Sequence[WholeForm], *, by_use: bool) -> bool:
        """Assign one of `forms`, or one for each use, by what reads the weight and by names."""
        biased = [i for i, use in enumerate(weight.uses) if self._is_other_bias(use, weight)] if by_use else []
        each = choose_for_uses(weight, forms, biased) if by_use else []
        form = each[0][1] if len(each) == 1 and not biased else None if by_use else choose(weight, forms)
        if form is not None:
            return self._assign(weight, form, twins=forms)
        for uses, own in each:
            self._assign(weight, own, uses, forms)
        return bool(each)

    def _is_other_bias(self, use: tuple[ir.Node, int], weight: TargetWeight) -> bool:
        """True if the weight is read as the bias of a layer that has none in the source."""
        layer = layer_of([use])
        return layer in self.forms and self._bias_of(layer, weight.floats()) is None

    def _fused(self, weight: TargetWeight) -> bool:
        array = weight.floats()
        found = self.matcher.lines(array, weight.tolerance(array))
        return found is not None and self._assign(weight, found)

    def _bias(self, weight: TargetWeight) -> bool:
        """Assign the bias of a layer whose weight is assigned; of several layers that share it, one for each."""
        if len(long_axes(weight.shape)) > 1:
            return False
        layers: dict[ir.Value | None, list[int]] = {}
        for i, use in enumerate(weight.uses):
            layers.setdefault(layer_of([use]), []).append(i)
        named = weight.name.removesuffix("bias") + "weight"
        if not weight.uses:  # of a file without a graph
            layers = {value: [] for value in self.forms if value.name == named}
        array = weight.floats()
        found = [(uses, self._bias_of(layer, array)) for layer, uses in layers.items()]
        made = [(uses, form) for uses, form in found if form is not None and self._agrees(weight, array, form)]
        if not made or len(made) < len(found):
            return False
        is_shared = any(not is_equal(weight, made[0][1], form) for _, form in made[1:])
        for uses, form in made if is_shared else made[:1]:
            self._assign(weight, form, uses if is_shared else None)
        return True

    def _fused_bias(self, weight: TargetWeight) -> bool:
        """Assign the bias of the one layer that it fits."""
        array = weight.floats()
        made = [self._bias_of(v, array) for v, form in self.forms.items() if isinstance(form, LineForm)]
        fits = [form for form in made if form is not None and self._agrees(weight, array, form)]
        return len(fits) == 1 and self._assign(weight, fits[0])

    def _bias_of(self, layer: ir.Value | None, array: np.ndarray) -> Form | None:
        """The form of the bias of a layer whose weight is assigned."""
        form = None if layer is None else self.forms.get(layer)
        if isinstance(form, LineForm) and sum(r.stop - r.start for r in form.runs) == array.size:
            return self.matcher.bias_of(form, self.biases)
        own = self.biases.get(form.origin) if isinstance(form, WholeForm) else None
        return WholeForm(own, (0,)) if own is not None and own.size == array.size else None

    def _agrees(self, weight: TargetWeight, array: np.ndarray, form: Form) -> bool:
        limit = self._tolerance(weight, array) * float(np.abs(array).max(initial=0)) + 1e-7
        return not np.abs(form.build(weight.shape, False) - array).max(initial=0) > limit

    def _biases(self) -> dict[Origin, Origin]:
        """The bias of each weight of the source, by the graph or by names."""
        by_value = {o.uses[0][0].inputs[o.uses[0][1]]: o for o in self.origins if o.uses}
        named = {o.name: o for o in self.origins}
        found = {}
        for origin in self.origins:
            if len(origin.long_axes) == 1:
                layer = layer_of(origin.uses)
                weight = None if layer is None else by_value.get(layer)
                weight = weight or named.get(origin.name.removesuffix("bias") + "weight")
                if weight is not None and weight is not origin:
                    found[weight] = origin
        return found

    def _by_name(self, weight: TargetWeight) -> None:
        """Assign a weight of other content by its name, where shapes leave one way."""
        for origin in self.origins:
            if is_same_name(weight, origin) and len(weight.name) > 1 and origin.shape == weight.shape:
                self._assign(weight, WholeForm(origin, tuple(range(len(origin.long_axes)))))
                return

    def _missing(self) -> list[str]:
        """Changed weights of the source that have no place, in order."""
        read: dict[str, list[tuple[int, int, int]]] = {}
        for assignment in self.plan.assignments:
            spans_of = {**{o: [(-1, 0, 0)] for o in assignment.twins}, **assignment.form.covers}
            for origin, spans in spans_of.items():
                for part in origin.parts:
                    read.setdefault(part, []).extend(spans)
        asked = [o for o in self.origins if o.parts == {o.name} and (o.is_changed if self.has_base else o.size > 1)]
        return [o.name for o in asked if not _covers(read.get(o.name, []), o.long_axes)]


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
