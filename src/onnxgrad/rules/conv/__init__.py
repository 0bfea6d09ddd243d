"""Convolutions: their rules, where their windows lie, and the cotangent of their weights."""
