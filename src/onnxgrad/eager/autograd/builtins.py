"""Python's container types for autograd programs; transforms accept any nesting of them."""

from builtins import dict, isinstance, list, tuple, type  # noqa: UP029  (names of this module)

__all__ = ["dict", "isinstance", "list", "tuple", "type"]
