"""Resize: its rule, and the coordinates at which it interpolates."""
