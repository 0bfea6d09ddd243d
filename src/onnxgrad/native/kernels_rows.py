"""Kernels of `source/rows.c`."""
