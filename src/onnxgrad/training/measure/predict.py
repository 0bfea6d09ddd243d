"""A model over rows of data: what it gives for each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.keywords import checked
from onnxgrad.model_io import load_model
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data import Data, Field, Images, Text

AnyModel = str | os.PathLike | onnx.ModelProto | ir.Model


def as_given(model: AnyModel) -> ir.Model:
    """`model` as it is: no other version of its operators, nothing inlined."""
    if isinstance(model, onnx.ModelProto):
        return ir.from_proto(model)
    return model if isinstance(model, ir.Model) else load_model(model)


def fields_of(model: ir.Model) -> list[Field]:
    """What data must feed: the inputs of `model` that have no value of their own."""
    return [Field.of(v) for v in model.graph.inputs if v.name not in model.graph.initializers]


def chosen_outputs(model: ir.Model, outputs: Sequence[str] | None) -> list[str]:
    """The names of the `outputs`, by default all. Raises UnknownName for one that there is not."""
    names = [v.name or "" for v in model.graph.outputs]
    for name in outputs or ():
        if name not in names:
            raise UnknownName(name, names, "output")
    return list(outputs or names)


def batches_of(
    session: Session, data: Data, outputs: Sequence[str], batch_size: int
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Batches in order, as (what was fed, `outputs` for its rows). A last batch short of a fixed size is filled up."""
    size = data.fixed or batch_size
    for batch in data.batches(size):
        rows, feeds = data.count(batch), {n: batch[n] for n in session.inputs if n in batch}
        if data.fixed and rows < size:
            feeds = {n: a if n in data.whole else np.resize(a, (size, *a.shape[1:])) for n, a in feeds.items()}
        found = session.run(feeds, list(outputs))
        for name, array in found.items():
            if array.ndim == 0 or len(array) != len(next(a for n, a in feeds.items() if n not in data.whole)):
                raise BadInput(
                    f"the output {name!r} is {array.dtype}{list(array.shape)} for {size} rows: not one entry per row\n"
                    "  hint: --output names the outputs to predict"
                )
        yield batch, {name: array[:rows] for name, array in found.items()}


@checked
def predict(
    model: AnyModel,
    data: Any,
    *,
    outputs: Sequence[str] | None = None,
    inputs: Mapping[str, str] | None = None,
    images: Images | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    batch_size: int = 256,
    options: Options | None = None,
) -> dict[str, np.ndarray]:
    """What `model` gives for every row of `data`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        data: arrays by name, rows that are dicts, or a path (see `onnxgrad.training.data.sources`). Arrays that the
            model does not read are left alone.
        outputs: which outputs. Default: all.
        inputs: which columns feed which input, as ``{"X": "f0..f63"}``. Default: those of the same names.
        images: how pictures become arrays.
        tokenizer: how text becomes tokens: the path of a ``tokenizer.json``, or a ``tokenizers.Tokenizer`` (see
            `onnxgrad.training.data.text`).
        max_length: the most tokens of a row.
        batch_size: rows that run at once; a model with a fixed batch size takes that one.
        options: how ONNX Runtime runs the model.

    Returns:
        Arrays [rows, …] by the names of the outputs, in the order of the data.

    Raises:
        BadInput: data that do not fit, or an output without an entry per row.
        UnknownName: there is no such output.
    """
    opened = as_given(model)
    wanted = chosen_outputs(opened, outputs)
    text = Text.of(tokenizer, max_length)
    rows = Data(data, fields_of(opened), source_name(data), images=images, inputs=inputs, text=text)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for _, found in batches_of(Session(opened, options), rows, wanted, batch_size):
        for name in wanted:
            parts[name].append(found[name])
    return {name: _joined(name, arrays) for name, arrays in parts.items()}


def source_name(data: Any) -> str:
    """What to call `data` in messages."""
    return repr(os.fspath(data)) if isinstance(data, (str, os.PathLike)) else "the data"


def _joined(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    if len({a.shape[1:] for a in arrays}) > 1:
        raise BadInput(f"the output {name!r} has other sizes in other batches; predict with a batch size of 1 row each")
    return np.concatenate(arrays)
