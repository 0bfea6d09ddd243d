"""Control flow and data structures: rules that re-enter the engine."""

from onnxgrad.flow import branches, scan

__all__ = ["branches", "scan"]
