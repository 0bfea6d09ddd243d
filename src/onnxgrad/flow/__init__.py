"""Control flow and data structures: rules that re-enter the engine."""
