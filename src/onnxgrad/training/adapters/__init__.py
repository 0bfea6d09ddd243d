"""Adapters: small products of two factors beside frozen weights, trained, merged, saved and loaded."""
