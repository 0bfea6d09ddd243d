"""Weights of one file put into another export of the same network."""
