"""Control flow and data structures: rules that re-enter the engine."""

from onnxgrad.flow import branches, scan, sequences

__all__ = ["branches", "scan", "sequences"]
