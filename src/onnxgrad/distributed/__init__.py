"""Ranks that compute together: one small protocol, and the engines of others behind it.

Nothing here knows of training. An array is handed over where it lies and is changed in place.
"""

from onnxgrad.distributed.collective import Alone, Collective, Lost, blocks
from onnxgrad.distributed.environment import Launch, join, launched
from onnxgrad.distributed.messages import broadcast_document, gathered

__all__ = ["Alone", "Collective", "Launch", "Lost", "blocks", "broadcast_document", "gathered", "join", "launched"]
