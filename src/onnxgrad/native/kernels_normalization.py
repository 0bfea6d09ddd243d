"""Kernels of `source/normalization.c`."""
