"""What ranks say to each other in words: JSON, as bytes over the arrays that an engine exchanges."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np

from onnxgrad.distributed.collective import Collective


def gathered(collective: Collective, document: Any) -> list[Any]:
    """The documents of all ranks, in their order; each is what JSON can hold (numbers with all their digits)."""
    text = _bytes(document)
    sizes = np.zeros(collective.size, np.int64)
    sizes[collective.rank] = len(text)
    collective.all_reduce(sizes)
    bounds = [0, *np.cumsum(sizes).tolist()]
    together = np.zeros(bounds[-1], np.uint8)
    together[bounds[collective.rank] : bounds[collective.rank + 1]] = text
    collective.all_gather(together, bounds)
    return [json.loads(together[low:high].tobytes()) for low, high in pairwise(bounds)]


def told(collective: Collective, document: Any, root: int = 0) -> Any:
    """The document of rank `root`, on all ranks; what the others give is not looked at."""
    text = _bytes(document) if collective.rank == root else np.zeros(0, np.uint8)
    size = np.array([len(text)], np.int64)
    collective.broadcast(size, root)
    if collective.rank != root:
        text = np.zeros(int(size[0]), np.uint8)
    collective.broadcast(text, root)
    return json.loads(text.tobytes())


def _bytes(document: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(document).encode(), np.uint8).copy()
