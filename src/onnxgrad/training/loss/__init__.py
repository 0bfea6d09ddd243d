"""Losses, and the objective that they add up to."""
