"""Ranks that compute together: one small protocol, and the engines of others behind it.

This package does not depend on training. Arrays are passed without copies and are changed in place.
"""

from typing import Any

from onnxgrad.distributed.collective import Alone, Collective, Lost, blocks
from onnxgrad.distributed.environment import Launch, join, launched
from onnxgrad.distributed.messages import broadcast_document, gathered
from onnxgrad.errors import warn_renamed


def __getattr__(name: str) -> Any:
    if name == "told":
        warn_renamed("onnxgrad.distributed.told", "broadcast_document")
        return broadcast_document
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Alone", "Collective", "Launch", "Lost", "blocks", "broadcast_document", "gathered", "join", "launched"]
