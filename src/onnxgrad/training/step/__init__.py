"""The step graph: compiled, split for accumulation, kept within a budget of memory, exported."""
