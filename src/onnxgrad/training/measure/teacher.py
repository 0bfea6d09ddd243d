"""A teacher's outputs for all rows of data, computed once and kept in files, for students that learn from them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.files import make_folder, replacing
from onnxgrad.function import Function
from onnxgrad.keywords import check_whole
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.read import as_given
from onnxgrad.runtime import Options
from onnxgrad.training.data import Data
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.measure.predict import batches_of, open_rows

#: The record of what the files in a folder are of.
RECORD = "teacher.json"


def teach(
    teacher: AnyModel,
    data: Any,
    folder: str | os.PathLike,
    *,
    outputs: Sequence[str] | None = None,
    top_k: int | None = None,
    batch_size: int = 256,
    options: Options | None = None,
    **settings: Any,
) -> dict[str, np.ndarray]:
    """Run `teacher` on every row of `data` and keep what it gives in `folder`, or take what is kept there already.

    Args:
        teacher: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``. Its inputs may be others than the student's:
            they are fed from arrays of their names.
        data: see `onnxgrad.predict`.
        folder: for the files, which are mapped into memory: they may be larger than it.
        outputs: names of outputs, or of values within the model, such as features of a layer. Default: all outputs.
        top_k: keep the largest so many scores along the last axis, and the numbers of their classes.
        batch_size: rows that run at once.
        options: how ONNX Runtime runs the teacher.
        settings: how data are prepared (see `onnxgrad.predict`).

    Returns:
        Arrays [rows, …] by the names ``teacher_{output}``, and with `top_k` also ``teacher_{output}_classes``: labels
        for losses such as ``Loss("kl", labels="teacher_y", temperature=2.0)``, ``Loss("kl_top_k", …)``, or
        ``Loss("mse", output="hidden", labels="teacher_hidden")``.

    Raises:
        BadInput: data that do not fit, or a folder that holds the outputs of another teacher or of other data.
        UnknownName: there is no such value.
    """
    check_whole(1, top_k=top_k, batch_size=batch_size)
    given, place = as_given(teacher), Path(folder)
    model = given if outputs is None else Function(given, outputs=list(outputs)).model
    names = [v.name or "" for v in model.graph.outputs]
    rows = open_rows(given, data, PreparationRecipe(**settings))
    digest = hashlib.sha256(ir.to_proto(given).SerializeToString(deterministic=True)).hexdigest()
    record = {"teacher": digest, "rows": rows.fingerprint, "outputs": names, "top_k": top_k}
    known = _read_record(place)
    if known is not None and known != json.loads(json.dumps(record)):
        changed = next(k for k in record if known.get(k) != json.loads(json.dumps(record[k])))
        raise BadInput(
            f"{place} holds the outputs of a teacher for other {changed}\n  hint: remove it, or name another"
        )
    if known is None:
        _write(model, rows, names, top_k, batch_size, options, place)
        with replacing(place / RECORD) as file:
            file.write_text(json.dumps(record), encoding="utf-8")
    suffixes = [""] if top_k is None else ["", "_classes"]
    files = {f"teacher_{n}{s}": place / f"{k}{s}.npy" for k, n in enumerate(names) for s in suffixes}
    return {name: np.load(file, mmap_mode="r") for name, file in files.items()}


def _read_record(folder: Path) -> Any:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {folder / RECORD}: {error}") from error


def _write(
    model: ir.Model, rows: Data, names: Sequence[str], top_k: int | None, batch_size: int, options: Options | None,
    folder: Path,
) -> None:  # fmt: skip
    """Write the outputs of all rows, batch by batch, into arrays on disk."""
    make_folder(folder)
    files: dict[str, Any] = {}
    begin = 0
    for _, found in batches_of(model, rows, names, batch_size, options):
        end = begin + len(found[names[0]])
        for k, name in enumerate(names):
            for suffix, part in _parts_to_keep(found[name], top_k, name).items():
                file = f"{k}{suffix}.npy"
                if file not in files:
                    shape = (len(rows), *part.shape[1:])
                    files[file] = np.lib.format.open_memmap(folder / file, "w+", part.dtype, shape)
                if files[file].shape[1:] != part.shape[1:]:
                    raise BadInput(f"the output {name!r} of the teacher has other sizes in other batches")
                files[file][begin:end] = part
        begin = end
    for array in files.values():
        array.flush()


def _parts_to_keep(scores: np.ndarray, top_k: int | None, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a batch to keep, by the suffix of their files."""
    if top_k is None:
        return {"": scores}
    if scores.ndim < 2 or scores.shape[-1] < top_k:
        raise BadInput(
            f"the output {name!r} of the teacher is {list(scores.shape)}, so it has no {top_k} scores to keep"
        )
    order = np.argsort(-scores, -1, kind="stable")[..., :top_k]
    return {"": np.take_along_axis(scores, order, -1), "_classes": order.astype(np.int32)}
