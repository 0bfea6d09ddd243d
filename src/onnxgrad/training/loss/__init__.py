"""Losses, and the objective that combines them."""
