"""Metrics by name: how they are computed over data and in a step graph, and for which tasks they are defined."""
