"""An ``.onnx`` model as a ``torch.nn.Module``, differentiable in both modes to any order.

The model, and its pullback, are one opaque operator of PyTorch (``onnxgrad::call``), so that modules also work under
``torch.compile``. On the CPU, tensors are handed over where they lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxgrad.errors import BadInput
from onnxgrad.interop.calls import Call, weights_of, with_own_weights
from onnxgrad.model_io import save_model
from onnxgrad.model_io.open import AnyModel
from onnxgrad.runtime import Options
from onnxgrad.wording import type_text

_calls: dict[int, Call] = {}
_numbers = itertools.count()
_BFLOAT16 = ir.DataType.BFLOAT16.numpy()  # PyTorch knows NumPy's own dtypes only


@torch.library.custom_op("onnxgrad::call", mutates_args=())
def _call(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    call = _calls[number]
    arrays = [_array(t, call.dtype(n), n) for t, n in zip(tensors, call.inputs, strict=True)]
    found = call(arrays)
    where = tensors[0].device if tensors else torch.device("cpu")
    return [_tensor(a).to(where) for a in found]


@_call.register_fake
def _fake(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    call = _calls[number]
    shapes = call.shapes([tuple(t.shape) for t in tensors])
    where = tensors[0].device if tensors else torch.device("cpu")
    return [
        torch.empty(s, dtype=_tensor(np.empty(0, call.dtype(n))).dtype, device=where)
        for s, n in zip(shapes, call.outputs, strict=True)
    ]


def _setup(ctx: Any, inputs: tuple[int, list[torch.Tensor]], output: list[torch.Tensor]) -> None:
    ctx.number, tensors = inputs
    ctx.like = [(t.shape, t.dtype, t.device) for t in output]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, cotangents: list[torch.Tensor | None]) -> tuple[None, list[torch.Tensor | None]]:
    call, tensors = _calls[ctx.number], list(ctx.saved_tensors)
    given = _fill_zeros(cotangents, ctx.like, [call.is_float(n) for n in call.outputs])
    gradients = iter(_call(_number(call.pullback), [*tensors, *given]))
    return None, [next(gradients) if call.is_float(n) else None for n in call.inputs]


_call.register_autograd(_backward, setup_context=_setup)


class _Calling(torch.autograd.Function):
    """The operator outside of ``torch.compile``: with the transforms of ``torch.func`` and forward mode."""

    @staticmethod
    def forward(number: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_call(number, list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.number, *tensors = inputs
        call = _calls[ctx.number]
        ctx.like = [(t.shape, t.dtype, t.device) for t in output]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(t for t, n in zip(output, call.outputs) if not call.is_float(n)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = _calls[ctx.number]
        given = _fill_zeros(cotangents, ctx.like, [call.is_float(n) for n in call.outputs])
        gradients = iter(_Calling.apply(_number(call.pullback), *ctx.saved_tensors, *given))
        return None, *(next(gradients) if call.is_float(n) else None for n in call.inputs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call, tensors = _calls[ctx.number], ctx.saved_tensors
        given = _fill_zeros(
            tangents, [(t.shape, t.dtype, t.device) for t in tensors], list(map(call.is_float, call.inputs))
        )
        moved = iter(_Calling.apply(_number(call.pushforward), *tensors, *given))
        return tuple(next(moved) if call.is_float(n) else None for n in call.outputs)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], number: int, *tensors: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        rows = []
        for i in range(info.batch_size):
            row = [t if at is None else t.select(at, i) for t, at in zip(tensors, in_dims[1:], strict=True)]
            rows.append(_Calling.apply(number, *row))
        return tuple(torch.stack(list(parts)) for parts in zip(*rows)), (0,) * len(rows[0])


def _fill_zeros(
    given: Sequence[torch.Tensor | None], like: Sequence[Any], floats: Sequence[bool]
) -> list[torch.Tensor]:
    """Tangents or cotangents of the float values, with zeros for missing ones."""
    return [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device), real in zip(given, like, floats, strict=True)
        if real
    ]


def _number(call: Call) -> int:
    """The number by which the torch operator refers to `call`."""
    if "number" not in call.__dict__:
        call.__dict__["number"] = next(_numbers)
        _calls[call.__dict__["number"]] = call
    return call.__dict__["number"]


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == _BFLOAT16:
        return _tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.require(array, requirements="W"))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    held = tensor.detach().cpu().contiguous()
    return held.view(torch.int16).numpy().view(_BFLOAT16) if held.dtype == torch.bfloat16 else held.numpy()


def _array(tensor: torch.Tensor, dtype: np.dtype, name: str) -> np.ndarray:
    array = _numpy(tensor)
    if array.dtype != dtype:
        raise BadInput(f"the argument {name!r} is {type_text(array.dtype)}; the model takes {dtype}")
    return array


class Module(torch.nn.Module):
    """An ``.onnx`` model as a module.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. It runs as it is: in inference mode.
        trainable: which initializers become parameters: True for those that train by default (see `attach`), False
            for none, or their names. A ``.`` in a name becomes ``_`` in that of the parameter. Running statistics are
            buffers.
        options: how ONNX Runtime runs it.

    Calling it takes tensors in the order of the model's inputs, of their dtypes, and gives a tensor, or a tuple where
    the model has several outputs. Gradients of all floats in and out exist to any order; where an operator has none,
    `NotDifferentiable` says so when the gradient is asked for. ``torch.func`` and forward mode go
    through it too; ``torch.func.vmap`` runs the model once for each element. Copies and pickles make sessions of their
    own.

    >>> import onnx, torch
    >>> square = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> '
    ...     'g (double[N] x) => (double[N] y) { y = Mul (x, x) }')
    >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    >>> Module(square)(x).sum().backward()
    >>> x.grad
    tensor([2., 4.], dtype=torch.float64)
    """

    def __init__(
        self, model: AnyModel, *, trainable: bool | Sequence[str] = True, options: Options | None = None
    ) -> None:
        super().__init__()
        trainable = [trainable] if isinstance(trainable, str) else trainable
        own = with_own_weights(model, () if isinstance(trainable, bool) else trainable)
        weights, kept = weights_of(own, trainable)
        self.call = Call.of(own, options, list(weights), kept)
        self._weights = {name: name.replace(".", "_") for name in weights}
        if len(set(self._weights.values())) < len(weights):
            self._weights = {name: f"weight_{i}" for i, name in enumerate(weights)}
        for name, array in weights.items():
            tensor = _tensor(np.array(array))
            if name in kept:
                self.register_buffer(self._weights[name], tensor)
            else:
                self.register_parameter(self._weights[name], torch.nn.Parameter(tensor))
        self._number = _number(self.call)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = _number(self.call)

    def forward(self, *tensors: torch.Tensor) -> Any:
        """The outputs of the model. Raises BadInput for arguments of other dtypes, or another number of them."""
        wanted = self.call.inputs[: len(self.call.inputs) - len(self._weights)]
        if len(tensors) != len(wanted):
            raise BadInput(f"the model takes {len(wanted)} arguments ({', '.join(wanted)}), not {len(tensors)}")
        parameters = [getattr(self, called) for called in self._weights.values()]
        given = [*tensors, *parameters]
        found = _call(self._number, given) if torch.compiler.is_compiling() else _Calling.apply(self._number, *given)
        return found[0] if len(found) == 1 else tuple(found)

    def save(self, path: str) -> None:
        """Write the model with the parameters as they are now to `path`, a plain ``.onnx`` file.

        Raises:
            BadInput: it cannot be written there.
        """
        model = self.call.model.clone()
        for name, called in self._weights.items():
            value = next(v for v in model.graph.inputs if v.name == name)
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(_numpy(getattr(self, called)), name=name)
            model.graph.register_initializer(value)
        save_model(model, path)
