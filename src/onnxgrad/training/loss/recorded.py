"""Losses that are functions: recorded as graphs, and compared with the function on the first batch.

A function of arrays (`onnxgrad.eager.numpy`), a formula (see `expression`), or a function or module of PyTorch. Its
first parameter takes the prediction; a parameter with the name of a value of the model takes that value; the others
become inputs for data. Parameters with defaults keep these.

The types of data inputs follow from example rows, if there are any. Otherwise they are tried: the type of the
prediction, then class numbers.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, OnnxGradError, reason_of
from onnxgrad.ir import identifier
from onnxgrad.model_io import to_proto
from onnxgrad.runtime import Session
from onnxgrad.training.graph.inline_graphs import is_graph
from onnxgrad.training.loss.class_axis import class_axis
from onnxgrad.training.loss.expression import Expression, is_expression
from onnxgrad.training.loss.label_inputs import LABELS, PREDICTIONS
from onnxgrad.training.loss.row_pairs import paired_rows
from onnxgrad.training.loss.torch_loss import export_torch, is_module, is_of_torch, is_pytorchs_own, of_tensors
from onnxgrad.transforms.first_order import value_and_grad

#: The sizes of dynamic axes while a function is recorded; each name has its own.
_SIZES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
#: The most combinations of forms of data that a function is recorded with.
_TRIED = 16
#: Names of the parameters of PyTorch's losses, which also occur in models.
_OF_TORCH = {"input": "prediction", "target": "labels"}


@dataclass(frozen=True)
class LossOperand:
    """The dtype and shape of a parameter; sizes that are names are dynamic."""

    dtype: np.dtype
    shape: tuple[int | str, ...]

    def example(self, sizes: Mapping[str, int]) -> np.ndarray:
        """An array with these sizes of dynamic axes: numbers between 0 and 1, or the class 0."""
        shape = [sizes[d] if isinstance(d, str) else d for d in self.shape]
        if self.dtype.kind in "iub":
            return np.zeros(shape, self.dtype)
        return np.random.default_rng(0).uniform(0.1, 0.9, shape).astype(self.dtype)


@dataclass(frozen=True)
class Recorded:
    """The graph of a loss, and the function that it was recorded from.

    Attributes:
        name: of the loss in messages.
        model: the graph.
        function: from arrays of float64 by position to a number.
        reads: the values of the model, or inputs for data, that feed the inputs of the graph.
        values: which of them are values of the model.
        classes: the numbers of classes of inputs for data that hold class numbers.
    """

    name: str
    model: onnx.ModelProto
    function: Callable[..., float]
    reads: tuple[str, ...] = ()
    values: frozenset[str] = frozenset()
    classes: Mapping[str, int | None] = field(default_factory=dict)

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Compare value and derivative with the function, by central differences along a random direction.

        Args:
            arrays: by the names of `reads`, of one batch.

        Raises:
            BadInput: the graph has another value or another derivative than the function.
        """
        random = np.random.default_rng(0)
        inputs = [v.name for v in self.model.graph.input]
        ranks = [len(v.type.tensor_type.shape.dim) for v in self.model.graph.input]
        points = [_with_axes(np.asarray(arrays[n]), rank) for n, rank in zip(self.reads, ranks)]
        moved = [i for i, n in enumerate(self.reads) if n in self.values and points[i].dtype.kind == "f"]
        if not inputs or not moved or not all(np.isfinite(p).all() for p in points if p.dtype.kind == "f"):
            return
        for i in moved:  # away from points where the derivative jumps
            points[i] = (points[i] + 1e-3 * random.uniform(0.5, 1, points[i].shape)).astype(points[i].dtype)
        try:
            derived = value_and_grad(self.model, wrt=[inputs[i] for i in moved], of=self.model.graph.output[0].name)
        except OnnxGradError:  # of a value without a derivative, which other terms may have
            return
        session = Session(derived)
        loss, *gradients = session.run({n: p for n, p in zip(inputs, points) if n in session.inputs}).values()
        wide = [p.astype(np.float64) if p.dtype.kind == "f" else p for p in points]
        expected = self.function(*wide)
        if not np.isclose(float(loss), expected, rtol=1e-2, atol=1e-4):
            raise BadInput(
                f"the loss {self.name!r} is {expected:.6g} of the first batch, and its recorded graph gives "
                f"{float(loss):.6g}\n  hint: Python's branches are recorded as they ran once; use where(…) to choose "
                "by values"
            )
        worst: tuple[float, float, float] | None = None
        for eps in (1e-5, 1e-7):
            directions = [random.standard_normal(points[i].shape) for i in moved]
            ends = []
            for sign in (1, -1):
                at = list(wide)
                for i, u in zip(moved, directions):
                    at[i] = wide[i] + sign * eps * u
                ends.append(self.function(*at))
            difference = (ends[0] - ends[1]) / (2 * eps)
            products = [np.sum(np.asarray(g, np.float64) * u) for g, u in zip(gradients, directions)]
            scale = float(np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in gradients)))
            slope = float(sum(products))
            if abs(slope - difference) <= 2e-2 * max(scale, abs(difference)) + 1e-4:
                return
            worst = worst or (slope, difference, scale)
        assert worst is not None
        raise BadInput(
            f"the derivative of the loss {self.name!r} along a random direction is {worst[0]:.4g} on the first batch, "
            f"and by finite differences {worst[1]:.4g}\n  hint: rounding, argmax and comparisons have no derivative"
        )


def is_function(loss: Any) -> bool:
    """True for a function, a module of PyTorch, or the text of a formula."""
    return is_expression(loss) if isinstance(loss, str) else callable(loss) and not is_graph(loss)


def parameters(loss: Any) -> list[str]:
    """The names of the parameters without defaults. Raises BadInput if they are not known by name."""
    if isinstance(loss, Expression):
        return list(loss.names)
    target = loss.forward if is_module(loss) else loss
    try:
        found = [p for p in inspect.signature(target).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError) as error:
        raise BadInput(f"the parameters of the loss {name_of(loss)!r} are not known: {error}") from error
    if not found or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found):
        raise BadInput(
            f"the loss {name_of(loss)!r} is a function of arrays by position, as in lambda scores, labels: …"
        )
    names = [p.name for p in found]
    return [_OF_TORCH.get(n, n) for n in names] if is_pytorchs_own(loss) else names


def name_of(loss: Any) -> str:
    """The name of a function in messages and curves."""
    if isinstance(loss, (str, Expression)):
        return "formula"
    own = getattr(loss, "__name__", "") or type(loss).__name__
    return "function" if own == "<lambda>" else identifier(own)


def arranged(loss: Any, known: Mapping[str, Any], labels: str | None) -> tuple[Any, list[str], list[str | None]]:
    """The function of `loss`, its parameters with the prediction first, and the inputs for data that feed them.

    The input is None for a parameter that takes the prediction, or the value of the model with its name.

    Args:
        loss: a function or the text of a formula.
        known: values of the model by name.
        labels: the name of the label input, for the only parameter that is fed with data.

    Raises:
        BadInput: a formula does not show which of its names is the prediction.
    """
    loss = Expression(loss) if isinstance(loss, str) else loss
    names = parameters(loss)
    fed = [n for n in names if n not in known]
    first = None if names[0] in known else names[0]
    if isinstance(loss, Expression):
        meant = [n for n in names if n not in known and n.lower() in PREDICTIONS]
        others = [n for n in names if n.lower() not in LABELS]
        if not meant and not any(n in known for n in names) and len(others) == 1:
            meant = others
        if len(meant) != 1 and not any(n in known for n in names):
            raise BadInput(
                f"the loss {loss.text!r} names no value of the model, so its prediction is not known\n"
                "  hint: use the name of an output for it, or call it scores, and the labels y or labels"
            )
        first = meant[0] if len(meant) == 1 else None
        fed += [n for n in names if n in known and first is not None and n.lower() in LABELS]
        names = [*([first] if first else []), *(n for n in names if n != first)]
    fed = [n for n in fed if n != first]
    called = {n: "labels" for n in fed if n in known}
    if labels is not None and len(fed) == 1:
        called = {fed[0]: labels}
    return loss, names, [None if n == first or n not in fed else called.get(n, n) for n in names]


def record(
    loss: Any, names: Sequence[str], operands: Sequence[LossOperand | None], examples: Mapping[str, np.ndarray]
) -> Recorded:
    """Record `loss` as a graph.

    Args:
        loss: the function.
        names: of its parameters.
        operands: the values that they take; None for inputs for data, which the first operand describes.
        examples: rows of inputs for data.

    Raises:
        BadInput: the function has no graph.
    """
    first = next((o for o in operands if o is not None), None)
    if first is None:
        raise BadInput(f"the loss {name_of(loss)!r} reads no value of the model")
    open_ = [n for n, o in zip(names, operands) if o is None]
    problem: Exception | None = None
    for given in _forms(loss, open_, first, examples):
        chosen = [given[n] if o is None else o for n, o in zip(names, operands)]
        try:
            sizes = _sizes(chosen)
            dynamic = [{a: d for a, d in enumerate(o.shape) if isinstance(d, str)} for o in chosen]
            shown = [o.example(sizes) for o in chosen]
            if is_of_torch(loss):
                model = export_torch(loss, name_of(loss), shown, dynamic)
            else:
                model = _evaluation().export_function(loss, name_of(loss), names, shown, dynamic)
            if pairs := paired_rows(ir.from_proto(model), [o.shape for o in chosen]):
                raise BadInput(pairs)
            counts = {n: _count(o, first) for n, o in given.items() if o.dtype.kind == "i"}
            return Recorded(
                name_of(loss), model, of_tensors(loss) if is_of_torch(loss) else _of_arrays(loss, names), classes=counts
            )
        except Exception as error:  # the function is the caller's, and may raise anything
            problem = problem or error
    assert problem is not None
    if isinstance(problem, BadInput):
        raise BadInput(f"the loss {name_of(loss)!r}: {problem}") from problem
    reason = reason_of(problem)
    raise BadInput(
        f"the loss {name_of(loss)!r} cannot be recorded: {type(problem).__name__}: {reason}\n"
        "  hint: it is a function of arrays, over onnxgrad.eager.numpy or PyTorch, with a scalar result; "
        "Loss(function, examples={'labels': array}) shows rows of labels of another form"
    ) from problem


def _forms(
    loss: Any, names: Sequence[str], first: LossOperand, examples: Mapping[str, np.ndarray]
) -> Iterator[dict[str, LossOperand]]:
    """The dtypes and shapes to try for the inputs that are data, the likeliest first.

    One number for each row is [N] or [N, 1], whichever the function does not spread over all pairs of rows.
    """
    if all(n in examples for n in names):
        each = [_described(examples[n], first) for n in names]
        if is_pytorchs_own(loss):  # takes labels of the shape of the prediction
            each = [forms[::-1] for forms in each]
        last = []
    else:
        each = [[first, *_other_form(first, first)] for _ in names]
        last = [dict.fromkeys(names, o) for o in _class_numbers(first)]
    yield from (dict(zip(names, forms)) for forms in itertools.islice(itertools.product(*each), _TRIED))
    yield from last


def _described(array: np.ndarray, like: LossOperand) -> list[LossOperand]:
    """The operands for rows like `array`: axes as those of `like`, where their number is the same."""
    same = array.ndim == len(like.shape)
    dims: list[int | str] = list(like.shape[: array.ndim] if array.ndim <= len(like.shape) else like.shape[:1])
    sizes = [d if isinstance(d, str) else n for d, n in zip([*dims, *array.shape[len(dims) :]], array.shape)]
    if sizes and not isinstance(like.shape[0], str):
        sizes[0] = like.shape[0]
    has_classes = array.dtype.kind in "iub" and len(like.shape) > 1 and like.shape[-1] != 1
    own = LossOperand(np.dtype(np.int64) if has_classes and not same else like.dtype, tuple(sizes))
    others = _other_form(own, like)
    return [own, *(replace(o, dtype=np.dtype(np.int64)) if has_classes else o for o in others)]


def _other_form(own: LossOperand, like: LossOperand) -> list[LossOperand]:
    """`own` without its last axis of size 1, or with one where each row of `like` has one score."""
    if len(own.shape) > 1 and own.shape[-1] == 1:
        return [LossOperand(own.dtype, own.shape[:-1])]
    if len(own.shape) == 1 == len(like.shape) or (own.shape == like.shape[:-1] and like.shape[-1] == 1):
        return [LossOperand(own.dtype, (*own.shape, 1))]
    return []


def _class_numbers(like: LossOperand) -> list[LossOperand]:
    """Operands of class numbers for scores `like`: without the axis of the classes, which is found out."""
    if len(like.shape) < 2:
        return []
    value = ir.Value(name="scores", type=ir.TensorType(ir.DataType.from_numpy(like.dtype)), shape=ir.Shape(like.shape))
    axes = dict.fromkeys((class_axis(value) % len(like.shape), len(like.shape) - 1))
    return [LossOperand(np.dtype(np.int64), (*like.shape[:a], *like.shape[a + 1 :])) for a in axes]


def _count(labels: LossOperand, scores: LossOperand) -> int | None:
    """The number of classes of `scores`, if `labels` lack one axis of them that has a fixed size."""
    missing = [
        d for a, d in enumerate(scores.shape) if (*scores.shape[:a], *scores.shape[a + 1 :]) == labels.shape and a
    ]
    return missing[0] if len(missing) == 1 and isinstance(missing[0], int) else None


def operand_of(value: ir.Value) -> LossOperand:
    """The dtype and shape of a value of the model. Raises BadInput if they are not known."""
    if value.dtype is None or value.shape is None:
        raise BadInput(f"the shape of {value.name!r}, which a loss reads, is not known; declare it in the model")
    unnamed = ["rows", *(f"{value.name}_{axis}" for axis in range(1, len(value.shape)))]
    dims = [d if isinstance(d, int) else d.value or name for d, name in zip(value.shape, unnamed)]
    return LossOperand(value.dtype.numpy(), tuple(dims))


def _sizes(operands: Sequence[LossOperand]) -> dict[str, int]:
    names = dict.fromkeys(d for o in operands for d in o.shape if isinstance(d, str))
    fixed = {d for o in operands for d in o.shape}
    sizes = [s for s in _SIZES if s not in fixed]  # equal by chance, other axes would broadcast
    return {n: sizes[i % len(sizes)] for i, n in enumerate(names)}


def _with_axes(array: np.ndarray, rank: int) -> np.ndarray:
    """`array` with or without a last axis of size 1 (see `row_pairs.fit_axes`)."""
    if array.ndim == rank + 1 and array.shape[-1] == 1:
        return array[..., 0]
    return array[..., None] if array.ndim == rank - 1 else array


def _evaluation() -> Any:
    """The module that imports `onnxgrad.eager`, which few losses need."""
    from onnxgrad.training.loss import evaluated

    return evaluated


def _of_arrays(loss: Any, names: Sequence[str]) -> Callable[..., float]:
    return lambda *arrays: float(np.asarray(_evaluation().call(loss, names, arrays)))


# --- graphs ----------------------------------------------------------------------------------------


def of_graph(name: str, model: ir.Model) -> Recorded | None:
    """A loss that is a graph, compared with itself in float64; None for one that narrows its numbers on the way."""
    if any(node.op_type in ("Cast", "CastLike", "DequantizeLinear") for node in model.graph.all_nodes()):
        return None
    proto = to_proto(model)

    def of_arrays(*arrays: np.ndarray) -> float:
        return _evaluation().value_of_graph(proto, arrays)

    return Recorded(name, proto, of_arrays)
