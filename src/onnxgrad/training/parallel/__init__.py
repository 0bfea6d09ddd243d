"""Data-parallel training: ranks that see a part of each batch each, and hold the same weights."""
