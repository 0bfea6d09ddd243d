"""The functions that infer types and shapes: those of ``onnx-shape-inference``, and one table of corrections to them.

The library's own registry, and its classes, are unchanged for its other users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import onnx_shape_inference as osi

from onnxgrad.ir.infer import classical, common, corrections, limits, loops, ranks, sequences, sizes
from onnxgrad.ir.infer.context import Infer
from onnxgrad.ir.match import not_none


class InferenceRegistry(osi.OpShapeInferenceRegistry):
    """Functions by domain, operator and version; an operator that has none here has that of the library."""

    def get(self, domain: str, op_type: str, version: int) -> Infer | None:
        """Return the function for an operator at `version` of its domain; None if neither registry has one."""
        return super().get(domain, op_type, version) or osi.registry.get(domain, op_type, version)

    def names(self, domain: str) -> Iterator[str]:
        """Yield the operators of `domain` that have a function."""
        for known in (super().iter_supported(), osi.registry.iter_supported()):
            yield from (name for its, name, _ in known if its == domain)

    def correct(self, name: str, wrap: Callable[[Infer], Infer]) -> None:
        """Register ``wrap(infer)`` for the function of each version of a standard operator."""
        versions = {since: self.get("", name, since) for since in osi.registry.version_boundaries("", name)}
        for since, infer in versions.items():
            self.register("", name, since)(wrap(not_none(infer)))


class Correction(NamedTuple):
    """A reason to infer operators otherwise than the library does, and the functions that do it.

    Attributes:
        reason: The library's behaviour that is corrected (onnx-shape-inference 0.4).
        wraps: By operator, a function of the library's function.
    """

    reason: str
    wraps: dict[str, Callable[[Infer], Infer]]


def _correct_after(correct: Infer, names: Iterable[str]) -> dict[str, Callable[[Infer], Infer]]:
    return dict.fromkeys(names, lambda infer: corrections.correct_inference(infer, correct))


#: In the order in which they are applied: a later one wraps an earlier one of the same operator.
CORRECTIONS = [
    Correction(
        "sizes are formulas of sympy wherever they are broadcast or multiplied",
        {name: sizes.first_by(infer) for name, infer in sizes.OPERATORS.items()}
        | {name: sizes.first_by(common.infer_first(name)) for name in common.OF_ANY_TYPE},
    ),
    Correction(
        "two different symbols that meet in a broadcast are taken for equal ([N] + [M] → [N]), which is mostly meant, "
        "but is not what ONNX says: N may be 1, and a gradient that trusts it forgets to sum",
        _correct_after(corrections.broadcast, (*corrections.BROADCASTING, "Expand"))
        | _correct_after(corrections.batches, ["MatMul"])
        | _correct_after(corrections.labels, ["Einsum"]),
    ),
    Correction("axes that are computed are guessed", _correct_after(corrections.squeeze, ["Squeeze"])),
    Correction("sizes that are computed are taken for equal", _correct_after(corrections.split, ["Split"])),
    Correction("bounds of a slice are taken to be in range", _correct_after(corrections.slice_, ["Slice"])),
    Correction(
        "the rank is open where the elements of the shape are not known",
        _correct_after(corrections.asked_shape, ["Reshape", "ConstantOfShape"]),
    ),
    Correction(
        "with ceil_mode, a last window that starts in the padding is counted",
        _correct_after(corrections.windows, ["MaxPool", "AveragePool", "LpPool"]),
    ),
    Correction(
        "sizes are taken as they are where keep_aspect_ratio_policy makes them bounds",
        _correct_after(corrections.resize, ["Resize"]),
    ),
    Correction("the axis is ignored unless the operand is constant", _correct_after(corrections.unique, ["Unique"])),
    Correction(
        "an operand of unknown rank leaves the result without one, though the weights have it",
        dict.fromkeys(("Conv", "ConvTranspose"), corrections.ranked_by_weights),
    ),
    Correction("a tensor is compared with a protocol at each Constant", {"Constant": corrections.infer_by_tensor}),
    Correction("a symbol is made for each element of a vector, however long it is", {"Concat": limits.bound_concat}),
    Correction(
        "sequences have no shape; here it is that of their elements",
        {name: lambda infer, name=name: sequences.with_shape(infer, name) for name in sequences.SHAPES},  # type: ignore[misc]
    ),
    Correction(
        "the rank is open where a shape, axes or pads operand is computed",
        {name: lambda infer, name=name: ranks.with_rank(infer, name) for name in ranks.OPEN},  # type: ignore[misc]
    ),
]

#: Operators that the library does not know, or infers altogether otherwise: see the modules that define them.
OWN: dict[tuple[str, str, int], Infer] = {
    ("", "If", 1): loops.infer_if,
    ("", "Loop", 1): loops.infer_loop,
    ("", "Scan", 9): loops.infer_scan,
    ("", "SequenceMap", 17): sequences.infer_map,
    **{(classical.ML, name, 1): infer for name, infer in classical.OPERATORS.items()},
}


def _fill_registry() -> InferenceRegistry:
    made = InferenceRegistry()
    osi.registry.collect()
    for correction in CORRECTIONS:
        for name, wrap in correction.wraps.items():
            made.correct(name, wrap)
    for (domain, name, since), infer in OWN.items():
        made.register(domain, name, since)(infer)
    normalized = osi.registry.get("", "GroupNormalization", 21)  # version 18, the only other one, has the same shape
    assert normalized is not None
    made.register("", "GroupNormalization", 18)(normalized)
    return made


#: The functions that onnxgrad infers with.
registry = _fill_registry()
