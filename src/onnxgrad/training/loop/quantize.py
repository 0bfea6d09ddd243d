"""A model quantized over data in one call, and trained to make up for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.keywords import checked
from onnxgrad.model_io import save_model
from onnxgrad.model_io.save import gathered, to_proto
from onnxgrad.training.data import Data
from onnxgrad.training.loop.train import train
from onnxgrad.training.measure.predict import AnyModel, fields_of, source_name
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.quantization.learned_rounding import learn_rounding
from onnxgrad.training.quantization.place import Scheme, opened_floats, placed

#: Rows that activations are calibrated over.
ROWS = 512
_BATCH = 32


@checked
def quantize(
    model: AnyModel,
    data: Any,
    *,
    output: str | os.PathLike | None = None,
    weights: str = "int8",
    activations: str = "uint8",
    per_channel: bool = True,
    block_size: int | None = None,
    calibration: str = "minmax",
    rounding: str = "nearest",
    rows: int = ROWS,
    operators: Sequence[str] = (),
    exclude: Sequence[str] = (),
    inputs: Mapping[str, str] | None = None,
    qat: bool = False,
    **settings: Any,
) -> Any:
    """`model` with QuantizeLinear and DequantizeLinear nodes, which stock ONNX Runtime runs with integer kernels.

    ONNX Runtime's quantizer places the nodes and calibrates the activations over `data`. BatchNormalization is folded
    into the layer before it. With `qat`, the quantized model is then trained (quantization-aware training): weights are
    kept as floats and rounded where they are read, gradients pass straight through the rounding, and scales are
    learned (see `onnxgrad.training.quantization.scales`). A model that is quantized already is trained by `train`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``, in floats.
        data: arrays by name, rows that are dicts, or a path (see `Trainer.fit`): what the model reads and, with `qat`,
            labels.
        output: where to save the quantized model. Default: nowhere.
        weights: ``int8``, ``uint8``, ``int4`` or ``uint4``.
        activations: ``uint8``, ``int8``, ``uint16`` or ``int16``.
        per_channel: give each output channel of a weight a scale of its own; else one serves the whole weight.
        block_size: quantize the weights of MatMul alone, to 4 bits, in blocks of so many rows (16, 32, 64, …), each
            with a scale of its own; activations stay floats.
        calibration: ``minmax``, ``entropy`` or ``percentile``: how a range follows from what an activation is.
        rounding: of weights: ``nearest``, or ``learned``: up or down by what that does to the outputs of the layer
            over the same rows (AdaRound).
        rows: how many rows of `data`, its first, activations are calibrated over.
        operators: types of nodes to quantize, as ``["Conv", "MatMul"]``. Default: all that ONNX Runtime can.
        exclude: nodes not to quantize: names, or globs. Activations that the model ends in (Softmax) never are.
        inputs: which columns feed which input (see `Trainer.fit`).
        qat: train the quantized model.
        settings: with `qat`, arguments of `onnxgrad.train`: ``loss="cross_entropy"``, ``epochs=10``, ….

    Returns:
        The quantized model, in the caller's kind (an ``onnx.ModelProto`` for a path).

    Raises:
        BadInput: the model is quantized already, nothing in it can be, data that do not fit, or what `train` refuses.
        UnknownName: no such type of node, or node.
    """
    if settings and not qat:
        raise BadInput(f"{next(iter(settings))!r} says how to train, which qat=True asks for")
    scheme = Scheme(weights, activations, per_channel, block_size, calibration, rounding, operators, exclude)
    found = quantized(model, data, scheme, rows=rows, inputs=inputs)
    if qat:
        found = train(found, data, inputs=inputs, **settings).inference_model()
    else:
        found = folded(found)
    if output is not None:
        save_model(found, output)
    if isinstance(model, ir.Model):
        return found
    return to_proto(found) if isinstance(model, onnx.ModelProto) else gathered(found)


def quantized(
    model: AnyModel,
    data: Any,
    scheme: Scheme,
    *,
    rows: int = ROWS,
    inputs: Mapping[str, str] | None = None,
    name: str = "",
) -> ir.Model:
    """The same, ready to be trained: weights are floats, rounded where they are read. `name`: to call the data by.

    Raises:
        BadInput, UnknownName: as `quantize`.
    """
    if rows < 1:
        raise BadInput(f"activations are calibrated over at least 1 row, not {rows}")
    opened = opened_floats(model)
    fed = Data(data, fields_of(opened), name or source_name(data), inputs=inputs)
    found = placed(opened, scheme, _batches(fed, rows))
    if scheme.rounding == "learned":
        learn_rounding(found, _batches(fed, rows))
    return found


def _batches(data: Data, rows: int) -> Iterator[dict[str, np.ndarray]]:
    size = data.fixed or _BATCH
    count = min(rows, len(data))
    count = max(count // size * size, 0) if data.fixed else count
    if not count:
        raise BadInput(f"the model takes batches of exactly {size} rows, and there are {min(rows, len(data))}")
    names = data.names
    for batch in data.batches(size, np.arange(count)):
        yield {n: np.ascontiguousarray(batch[n]) for n in names}
