"""Detectors: heads, losses and batches of pictures with boxes."""
