"""``onnxgrad.transplant``: trained weights put into another export of the same network, and verified there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.files import flush, scratch, writing
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import not_none
from onnxgrad.model_io import AnyModel, load_model, open_model, save_model
from onnxgrad.model_io.read import read_proto
from onnxgrad.model_io.save import to_proto
from onnxgrad.training.adapters.folder import TENSORS_FILE, load_adapter
from onnxgrad.training.graph.own_tensors import own_tensors
from onnxgrad.training.graph.rounding import standardize
from onnxgrad.transplants.match import distance
from onnxgrad.transplants.origins import origins_of
from onnxgrad.transplants.plan import Assignment, WeightPlan, make_plan
from onnxgrad.transplants.schemes import BiasScheme, Tensors, tensor_of
from onnxgrad.transplants.state import SUFFIX, StateDict, state_of
from onnxgrad.transplants.verify import PairRunner, Runner, differences
from onnxgrad.transplants.weights import TargetWeight, weights_of
from onnxgrad.wording import name_list

#: The largest difference of outputs that rounding explains, by bits of a stored weight.
_ROUNDING = {64: 1e-3, 32: 1e-3, 16: 5e-2, 8: 0.15, 4: 0.5, 2: 0.9}


@dataclass(frozen=True)
class Transplanted:
    """The report of a transplant.

    Attributes:
        files: that were written.
        changed: weights of the target that were replaced.
        kept: weights of the target that training had not changed.
        difference: of the outputs, relative to their spread, between source and result; None for safetensors.
        before: the same between source and target, before the transplant.
        scheme: the same between base and target: the error of the form of the target; None without a base.
    """

    files: list[Path]
    changed: list[str]
    kept: list[str]
    difference: float | None
    before: float | None
    scheme: float | None


def transplant(
    source: AnyModel,
    target: AnyModel | None,
    *,
    base: AnyModel | None = None,
    encoder: AnyModel | None = None,
    output: str | os.PathLike,
    probes: Mapping[str, np.ndarray] | None = None,
) -> Transplanted:
    """Put the weights of `source` into `target`, another export of the same network, and verify the result.

    Weights are found by their content before training, by shapes, names of modules and their place in the graph. They
    may be transposed, fused, split, shared, folded or cast in the target; integers are quantized anew by its scheme.

    Args:
        source: a trained model, or the folder of an adapter (then `base` is needed).
        target: the model whose weights are replaced; it is not changed. A safetensors file (a ``state_dict`` with the
            weights before training) gives one with the trained weights; None gives one with the names of the export.
        base: `source` before training. Without it, weights are matched by names and similarity.
        encoder: the file of the encoder, if `target` is the decoder of a model whose parts are two files.
        output: where the result is written; with `encoder`, a folder for both, under their names.
        probes: inputs on which both are compared. Default: random ones.

    Returns:
        What was replaced, and how far outputs differ.

    Raises:
        BadInput: weights that training changed have no place in `target`, or the outputs differ by more than the
            rounding of the target explains. Nothing is written then.
    """
    place = Path(output)
    before = None if base is None else _as_trained(base)
    trained = _source(source, base)
    if target is None or (isinstance(target, (str, os.PathLike)) and Path(target).suffix == SUFFIX):
        return _to_state(before, trained, target, place)
    places = [place] if encoder is None else _result_paths(place, [target, encoder])
    files = [_read(model) for model in (target, encoder) if model is not None]
    schemes = [weight for model in files for weight in weights_of(model)]
    plan = plan_for(before, trained, schemes)
    untouched, of_source = _runner(files), Runner(trained)
    scheme = None
    if before is not None:
        scheme, probes = differences(Runner(before), untouched, probes)
        _check_base(scheme, _floor(schemes))
    stale, probes = differences(of_source, untouched, probes)
    written = [a for a in plan.assignments if _is_written(a, before is not None)]
    _write_weights(written, before is not None, [w for w in schemes if isinstance(w.scheme, BiasScheme)])
    with writing(place):
        places[0].parent.resolve(strict=True)
        with scratch(places[0]) as folder:
            made = [save_model(model, folder / at.name) for model, at in zip(files, places)]
            found, _ = differences(of_source, _runner([_read(parts[0]) for parts in made]), probes)
            _check_result(found, stale, scheme, _floor(schemes))
            for file in [file for parts in made for file in reversed(parts)]:
                flush(file)
                os.replace(file, places[0].parent / file.name)
    changed = [a.weight.name for a in written]
    kept = [a.weight.name for a in plan.assignments if a not in written]
    all_files = [places[0].parent / file.name for parts in made for file in parts]
    return Transplanted(all_files, changed, kept, found, stale, scheme)


def _runner(files: Sequence[ir.Model]) -> Runner:
    """The runner of a model, or of a decoder and its encoder."""
    return PairRunner(*files) if len(files) > 1 else Runner(files[0])


def _result_paths(folder: Path, models: Sequence[AnyModel | None]) -> list[Path]:
    """The paths of the results for files: in `folder`, under their own names."""
    if not all(isinstance(model, (str, os.PathLike)) for model in models):
        raise BadInput("a decoder and its encoder are two paths: their names are those of the results")
    found = [folder / Path(model).name for model in models]  # type: ignore[arg-type]
    if found[0] == found[1]:
        raise BadInput(f"the decoder and the encoder have one name, {found[0].name!r}")
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}, for the decoder and the encoder")
    return found


def _to_state(base: ir.Model | None, source: ir.Model, like: str | os.PathLike | None, place: Path) -> Transplanted:
    """Write the weights of `source` as a safetensors file, under the names in `like` or those of the export."""
    if like is None:
        state = state_of(source)
        state.save(place)
        return Transplanted([place], list(state.tensors), [], None, None, None)
    state = StateDict.load(Path(like))
    plan = plan_for(base, source, state.weights())
    written = [a for a in plan.assignments if _is_written(a, base is not None)]
    for assignment in written:
        array = state.tensors[assignment.weight.name]
        state.tensors[assignment.weight.name] = assignment.form.build(array.shape, True).astype(array.dtype)
    state.save(place)
    kept = [a.weight.name for a in plan.assignments if a not in written]
    return Transplanted([place], [a.weight.name for a in written], kept, None, None, None)


def plan_for(base: ir.Model | None, source: ir.Model, targets: Sequence[TargetWeight]) -> WeightPlan:
    """The plan of a transplant. Raises BadInput for weights that cannot be matched."""
    origins, extra = origins_of(base or source, source if base is not None else None)
    plan = make_plan(origins, targets, has_base=base is not None)
    if extra:
        raise BadInput(
            f"the trained model has weights that its base has not: {name_list(extra)}\n"
            "  hint: --base is the file that was trained; a new head needs an export with that head"
        )
    if plan.ambiguous:
        raise BadInput(
            f"weights of the target stand for several that training made different: {name_list(plan.ambiguous)}\n"
            "  hint: the target must keep apart what the trained model does, under the names of modules"
        )
    if plan.missing:
        hint = "the target must be an export of the same network with the weights before training (--base)"
        if base is not None and all(not o.read_before().any() for o in origins if o.name in plan.missing):
            hint = "they were zeros before training, which exporters leave out: train the target, or export it anew"
        raise BadInput(
            f"{len(plan.missing)} weights of the source have no place in the target: {name_list(plan.missing)}\n"
            f"  hint: {hint}"
        )
    if not any(a.is_changed for a in plan.assignments) and base is not None:
        raise BadInput("training has changed no weight: source and base are equal\n  hint: --base is the file before")
    return plan


def _read(model: AnyModel) -> ir.Model:
    if isinstance(model, ir.Model):
        return read_proto(to_proto(model))
    return read_proto(model) if isinstance(model, onnx.ModelProto) else load_model(model, aside=True)


def _source(source: AnyModel, base: AnyModel | None) -> ir.Model:
    """The trained model; that of an adapter is its base with the adapter merged."""
    if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
        if not (Path(source) / TENSORS_FILE).exists():
            raise BadInput(f"{os.fspath(source)} is a folder without {TENSORS_FILE}, neither a model nor an adapter")
        if base is None:
            raise BadInput(f"{os.fspath(source)} is an adapter\n  hint: --base is the model that it was trained beside")
        merged = load_adapter(_read(base), source, merge=True)
        assert isinstance(merged, ir.Model)
        return merged
    return _as_trained(source)


def _as_trained(model: AnyModel) -> ir.Model:
    """A model with the names that training gives to weights."""
    opened = open_model(_read(model), standardize).model
    own_tensors(opened)
    return opened


def _floor(weights: Sequence[TargetWeight]) -> float:
    """The difference of outputs that the narrowest weights explain."""
    bits = [32]
    for weight in weights:
        if weight.scheme is not None:
            bits.append(weight.scheme.bits)
        elif weight.value.const_value is not None and weight.value.const_value.dtype in FLOATS:
            bits.append(weight.value.const_value.dtype.bitwidth)
    return _ROUNDING[min(bits)]


def _check_base(scheme: float, floor: float) -> None:
    if not scheme <= 2 * floor:
        raise BadInput(
            f"the target does not compute what the base computes: their outputs differ by {scheme:.0%}\n"
            "  hint: --into must be an export of the network with the weights of --base"
        )


def _check_result(found: float, stale: float, scheme: float | None, floor: float) -> None:
    allowed = floor if scheme is None else min(floor, 2 * scheme) + 1e-4 + floor / 10
    if not found <= allowed or (scheme is None and found > stale + floor / 10):
        raise BadInput(
            f"the outputs with the transplanted weights differ by {found:.2g} of their spread, where {allowed:.2g} is "
            "explained by rounding; nothing was written\n"
            "  hint: are both files exports of the same network?"
        )


def _is_written(assignment: Assignment, has_base: bool) -> bool:
    """True if training has changed the weight; without a base, if the target has another."""
    if has_base:
        return assignment.is_changed
    weight = assignment.weight
    held = weight.floats()
    tolerance = 0.0 if weight.scheme is None else weight.tolerance(held)
    return distance(held, assignment.form.build(weight.shape, True).astype(held.dtype)) > tolerance


def _write_weights(assignments: Sequence[Assignment], has_base: bool, biases: Sequence[TargetWeight]) -> None:
    """Store the trained weights in their models; `biases` in steps of the new scales of their layers."""
    kept = {w.value: w.floats() for w in biases}
    for assignment in assignments:
        weight = assignment.weight
        if weight.value in kept:
            kept[weight.value] = assignment.form.build(weight.shape, True)
        elif weight.scheme is not None:
            before = assignment.form.build(weight.shape, False) if has_base else None
            _set(weight.store(assignment.form.build(weight.shape, True), before))
        elif assignment.uses is not None:
            _give_own(assignment)
        else:
            _set({weight.value: _build_later(assignment)})
    for weight in biases:
        _set(weight.store(kept[weight.value], None))


def _build_later(assignment: Assignment) -> ir.LazyTensor:
    """A trained weight of floats, which is computed when it is written."""
    weight = assignment.weight

    def build() -> ir.TensorProtocol:
        (tensor,) = weight.store(assignment.form.build(weight.shape, True), None).values()
        return tensor

    held = tensor_of(weight.value)
    assert held is not None  # of floats
    return ir.LazyTensor(build, dtype=ir.DataType(held.dtype), shape=ir.Shape(weight.shape))


def _give_own(assignment: Assignment) -> None:
    """Store a weight that was shared by equal ones for some of its readers."""
    weight, tensor = assignment.weight, _build_later(assignment)
    graph = weight.value.graph or weight.uses[0][0].graph
    assert isinstance(graph, ir.Graph)
    name, count = weight.name, 1
    while (own := f"{name}_{count}") in graph.initializers:
        count += 1
    tensor.name = own
    value = add_initializer(graph, tensor)
    for at in assignment.uses or ():
        node, index = weight.uses[at]
        node.replace_input_with(index, value)


def _set(tensors: Tensors) -> None:
    """Put `tensors` in the places of initializers and Constants."""
    for value, tensor in tensors.items():
        if value.is_initializer():
            tensor.name = value.name
            value.const_value = tensor
        else:
            node = not_none(value.producer())
            for key in list(node.attributes):
                del node.attributes[key]
            node.attributes.add(ir.AttrTensor("value", tensor))
