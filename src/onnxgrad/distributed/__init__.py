"""Ranks that compute together: one small protocol, and the engines of others behind it.

This package does not depend on training. Arrays are passed without copies and are changed in place.
"""

from onnxgrad.distributed.collective import Alone, Collective, Lost, blocks
from onnxgrad.distributed.environment import Launch, join, launched
from onnxgrad.distributed.messages import broadcast_document, gathered

__all__ = ["Alone", "Collective", "Launch", "Lost", "blocks", "broadcast_document", "gathered", "join", "launched"]
