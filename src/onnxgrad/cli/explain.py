"""``onnxgrad explain``: which parts of a picture, or of a row of data, a prediction depends on."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
import typer

from onnxgrad.cli import data_options, panels
from onnxgrad.cli.console import entry, print_lines
from onnxgrad.cli.flags import read_flags, takes_flags
from onnxgrad.cli.path_clashes import MODEL, check_paths
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.figures import drawing, import_matplotlib, plain
from onnxgrad.files import replacing
from onnxgrad.function import Function
from onnxgrad.ir.graph import named_values, required_inputs
from onnxgrad.ir.match import holds_floats
from onnxgrad.model_io import files_of, load_model, save_model
from onnxgrad.runtime.trial import check_runs
from onnxgrad.settings import pop_recipe, setting, settings_of
from onnxgrad.training.data import Data
from onnxgrad.training.data.labels import are_numbers
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.graph.class_labels import class_names
from onnxgrad.training.measure.kinds import other_outputs
from onnxgrad.training.measure.predict import chosen_outputs, fields_of
from onnxgrad.training.metadata import DETECTOR
from onnxgrad.transforms.attribution import (
    attention_rollout,
    expected_gradients,
    grad_cam,
    integrated_gradients,
    occlusion,
    smooth_grad,
)
from onnxgrad.transforms.deep_lift import deep_lift
from onnxgrad.transforms.first_order import grad
from onnxgrad.wording import name_list


class Method(enum.StrEnum):
    """The method of explanation."""

    saliency = "saliency"
    integrated_gradients = "integrated_gradients"
    smooth_grad = "smooth_grad"
    grad_cam = "grad_cam"
    expected_gradients = "expected_gradients"
    deep_lift = "deep_lift"
    occlusion = "occlusion"
    attention_rollout = "attention_rollout"


@dataclass(frozen=True)
class SamplingRecipe:
    """The points that a method of explanation compares."""

    steps: int = setting(32, "Points that gradients are taken at.", least=1)
    noise: float = setting(0.1, "For smooth_grad: standard deviation.", least=0)
    background: int = setting(100, "For expected_gradients: so many other rows of the data, drawn at random.", least=1)
    window: int = setting(1, "For occlusion: the size of a window.", least=1)


@takes_flags(
    PreparationRecipe, SamplingRecipe, only=("inputs", "image_mean", "image_std", *settings_of(SamplingRecipe))
)
def explain(
    model: panels.Model,
    data: Annotated[Path, typer.Argument(help="A picture, or data as for predict.", metavar="PICTURE|DATA")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to write: .png, a picture; .npz, the attributions.")
    ] = Path("explained.png"),
    method: Annotated[
        Method,
        typer.Option(
            help="saliency: |gradient|. integrated_gradients: what each element adds over a baseline of zeros. "
            "smooth_grad: the mean gradient near by. grad_cam: the cells of a layer. expected_gradients: what each "
            "element adds over other rows (gradient SHAP). deep_lift: what each element adds over a baseline of zeros, "
            "by differences. occlusion: what is lost where a window is covered. "
            "attention_rollout: how much each token draws from each token."
        ),
    ] = Method.integrated_gradients,
    class_: Annotated[
        str | None,
        typer.Option("--class", help="Explain the score of this class, a name or a number. Default: the largest."),
    ] = None,
    of: Annotated[str | None, typer.Option(help="The output to explain. Default: the first of floats.")] = None,
    wrt: Annotated[str | None, typer.Option(help="The input to explain it by. Default: the first of floats.")] = None,
    layer: Annotated[
        str | None, typer.Option(help="For grad_cam: a value [N, C, …]. Default: that of the last convolution.")
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Which row of data.")] = 0,
    save: Annotated[
        Path | None, typer.Option("--save-model", help="Where to write the model that explains, an .onnx.")
    ] = None,
    **flags: Any,
) -> None:
    """Show which parts of a picture, or of a row of data, a prediction of MODEL depends on."""
    opened = load_model(model)
    if output.suffix.lower() not in (".png", ".npz"):
        raise BadInput(f"--output {output} is neither .png nor .npz")
    if DETECTOR in opened.metadata_props:
        raise BadInput(
            f"{model} is a detector, whose outputs are boxes and no scores of a picture\n"
            "  hint: evaluate --picture draws its boxes"
        )
    if output.suffix.lower() == ".png":
        import_matplotlib()
    check_paths({MODEL: files_of(opened, model), "DATA": data}, {"--output": output, "--save-model": save}, force=None)
    given = read_flags(flags)
    sampling = pop_recipe(SamplingRecipe, given)
    preparation = PreparationRecipe(**given)
    prepared = preparation.arguments(data_options.print_preprocessing(opened, given))
    rows = Data(data, fields_of(opened), str(data), **prepared)
    feeds = _row(rows, row)
    wrt = _float_input(opened, wrt)
    (output_name,) = chosen_outputs(opened, [of]) if of else [_first_float(opened.graph.outputs, "output")]
    scores = np.asarray(Function(opened, outputs=[output_name])(**feeds))
    count = scores.shape[1] if scores.ndim > 1 else 1
    names = class_names(opened, [output_name], count if count > 1 else None)
    number = None if class_ is None else _class_number(class_, names, count)
    if number is None and count > 1:
        number = int(scores[0].reshape(count, -1).max(1).argmax())
    part = output_name if number is None else f"{output_name}[:, {number}]"
    layer = (layer or _last_maps(opened)) if method is Method.grad_cam else None
    explaining = _derive_explanation(opened, method, wrt, part, layer, sampling)
    further: dict[str, np.ndarray] = {}
    if method is Method.expected_gradients:
        further = {f"{wrt}_background": _background(rows, row, sampling.background, wrt)}
    found = np.asarray(Function(explaining)(**_add_baseline(explaining, {**feeds, **further}, wrt)))[0]
    if save is not None:
        save_model(explaining, save)
        check_runs(save, model)
    if method is Method.saliency:
        found = np.abs(found)
    with replacing(output) as temporary, temporary.open("wb") as file:
        if output.suffix.lower() == ".npz":
            np.savez(file, attribution=found)
        else:
            _draw(file, np.asarray(feeds[wrt])[0], found, f"{method.value} of {part}")
    others = "" if of else other_outputs(opened, output_name, "--of")
    shown = "" if number is None else f" class {names[number] if names and number < len(names) else number}"
    print_lines(entry("explained", f"{output}  ({method.value} of {part}{shown}){others}"))


def _class_number(text: str, names: Sequence[str] | None, count: int) -> int:
    """The number of the class `text`: by its name where the model has names, or else a number below `count`."""
    if names and text in names:
        return names.index(text)
    if text.isdecimal() and int(text) < count and not (names and are_numbers(names)):
        return int(text)
    known = name_list(names) if names else f"0 to {count - 1}"
    raise BadInput(f"--class {text} is none of the classes of the model: {known}")


def _row(data: Data, row: int) -> dict[str, np.ndarray]:
    """The inputs of one run of the model: an image, or a row of data."""
    if row >= len(data):
        raise BadInput(f"{data.name} has {len(data)} rows; there is no row {row}")
    (batch,) = data.batches(1, np.array([row]))
    return {name: array.copy() for name, array in batch.items()}


def _background(data: Data, row: int, count: int, wrt: str) -> np.ndarray:
    """The input `wrt` of `count` other rows of the data, in random order."""
    others = [i for i in np.random.default_rng(0).permutation(len(data)) if i != row][:count]
    if not others:
        raise BadInput(f"expected_gradients compare a row with others, and {data.name} has one row")
    return np.concatenate([batch[wrt] for batch in data.batches(len(others), np.array(others))])


def _first_float(values: Any, what: str) -> str:
    for value in values:
        if holds_floats(value):
            return value.name or ""
    raise BadInput(f"the model has no {what} of floats, so nothing has a gradient")


def _float_input(model: ir.Model, name: str | None) -> str:
    inputs = required_inputs(model.graph)
    if name is None:
        return _first_float(inputs, "input")
    if name not in [v.name for v in inputs]:
        raise UnknownName(name, [v.name or "" for v in inputs], "input")
    return name


def _last_maps(model: ir.Model) -> str:
    """The output of the last convolution."""
    convolutions = [n for n in model.graph if n.op_type in ("Conv", "FusedConv") and n.outputs[0].name]
    if not convolutions:
        raise BadInput("the model has no convolution; name the layer for Grad-CAM with --layer")
    return convolutions[-1].outputs[0].name or ""


def _derive_explanation(
    model: ir.Model, method: Method, wrt: str, of: str, layer: str | None, sampling: SamplingRecipe
) -> ir.Model:
    if method is Method.grad_cam:
        assert layer is not None
        if layer not in named_values(model.graph):
            raise UnknownName(layer, list(named_values(model.graph)), "value")
        return grad_cam(model, layer=layer, of=of)
    if method is Method.attention_rollout:
        return attention_rollout(model)
    transform, names = _TRANSFORMS[method]
    return transform(model, wrt=wrt, of=of, **{name: getattr(sampling, name) for name in names})


#: The transform of a method of an input, and the settings of sampling that it takes.
_TRANSFORMS: dict[Method, tuple[Callable[..., ir.Model], tuple[str, ...]]] = {
    Method.saliency: (grad, ()),
    Method.integrated_gradients: (integrated_gradients, ("steps",)),
    Method.smooth_grad: (smooth_grad, ("steps", "noise")),
    Method.expected_gradients: (expected_gradients, ()),
    Method.deep_lift: (deep_lift, ()),
    Method.occlusion: (occlusion, ("window",)),
}


def _add_baseline(model: ir.Model, feeds: dict[str, np.ndarray], wrt: str) -> dict[str, np.ndarray]:
    """`feeds`, and zeros for the baseline of `wrt`."""
    names = [v.name or "" for v in required_inputs(model.graph)]
    return {n: feeds[n] if n in feeds else np.zeros_like(feeds[wrt]) for n in names}


def _draw(file: Any, shown: np.ndarray, found: np.ndarray, title: str) -> None:
    """Draw the input beside its explanation; a row of numbers is drawn as bars."""
    with drawing() as new_figure:
        if shown.ndim < 2:
            figure = new_figure(figsize=(8, 3))
            axis = figure.subplots()
            axis.bar(np.arange(found.size), found.ravel())
            axis.set_xlabel("element")
        else:
            figure = new_figure(figsize=(8, 4))
            left, axis = figure.subplots(1, 2)
            planes = shown if shown.ndim == 2 else shown if shown.shape[-1] in (1, 3) else np.moveaxis(shown, 0, -1)
            low, high = planes.min(), planes.max()
            left.imshow(np.squeeze((planes - low) / ((high - low) or 1)), cmap="gray")
            left.axis("off")
            map_ = found
            if found.ndim == 3:  # channels: their mean
                map_ = found.sum(-1 if found.shape[-1] in (1, 3) else 0)
            most = np.abs(map_).max() or 1
            signed = bool((map_ < 0).any())
            axis.imshow(map_, cmap="RdBu_r" if signed else "magma", vmin=-most if signed else 0, vmax=most)
            axis.axis("off")
        axis.set_title(plain(title), fontsize=8)
        figure.tight_layout()
        figure.savefig(file, format="png", dpi=100)
