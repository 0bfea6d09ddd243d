"""Containers: Python's own, of which transforms take any nesting."""

from builtins import dict, isinstance, list, tuple, type  # noqa: UP029  (names of this module)

__all__ = ["dict", "isinstance", "list", "tuple", "type"]
