"""Data-parallel training: each rank reads a part of each batch, and all have the same weights."""
