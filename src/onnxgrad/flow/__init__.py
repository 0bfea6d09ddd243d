"""Control flow and data structures: rules that re-enter the engine."""

from onnxgrad.flow import branches, mapping, scan, sequences

__all__ = ["branches", "mapping", "scan", "sequences"]
