"""Metrics by name: their computation over data and in a step graph, and their tasks."""
