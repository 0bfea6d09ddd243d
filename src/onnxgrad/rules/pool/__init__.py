"""Pooling: its rules, and sums over windows read backwards."""
