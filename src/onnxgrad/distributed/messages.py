"""Messages between ranks: JSON with arrays, sent as bytes over the arrays that an engine exchanges."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from typing import Any

import numpy as np

from onnxgrad.distributed.collective import Collective

#: The JSON key of an array.
_ARRAY = "onnxgrad.array"


def gathered(collective: Collective, document: Any) -> list[Any]:
    """Collect the documents of all ranks, in order. A document is JSON (numbers with all digits) or arrays."""
    text = _bytes(document)
    sizes = np.zeros(collective.size, np.int64)
    sizes[collective.rank] = len(text)
    collective.all_reduce(sizes)
    bounds = [0, *np.cumsum(sizes).tolist()]
    together = np.zeros(bounds[-1], np.uint8)
    together[bounds[collective.rank] : bounds[collective.rank + 1]] = text
    collective.all_gather(together, bounds)
    return [_read(together[low:high]) for low, high in pairwise(bounds)]


def broadcast_document(collective: Collective, document: Any, root: int = 0) -> Any:
    """The document of rank `root`, on all ranks; the documents of the others are ignored."""
    text = _bytes(document) if collective.rank == root else np.zeros(0, np.uint8)
    size = np.array([len(text)], np.int64)
    collective.broadcast(size, root)
    if collective.rank != root:
        text = np.zeros(int(size[0]), np.uint8)
    collective.broadcast(text, root)
    return _read(text)


def _bytes(document: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(document, default=_encode).encode(), np.uint8).copy()


def _read(text: np.ndarray) -> Any:
    return json.loads(text.tobytes(), object_hook=_array)


def _encode(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {_ARRAY: [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
    raise TypeError(f"ranks cannot exchange a {type(value).__name__}")


def _array(found: dict[str, Any]) -> Any:
    if found.keys() != {_ARRAY}:
        return found
    dtype, shape, text = found[_ARRAY]
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape).copy()
