"""Detectors: pictures with boxes, from files to batches, and the metrics of the boxes that a model finds."""
