"""Control flow and data structures: rules that re-enter the engine."""

from onnxgrad.control_flow import cond, loop_rules, sequence_map, sequence_rules

__all__ = ["cond", "loop_rules", "sequence_map", "sequence_rules"]
