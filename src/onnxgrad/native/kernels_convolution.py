"""Kernels of `source/convolution.c`."""
