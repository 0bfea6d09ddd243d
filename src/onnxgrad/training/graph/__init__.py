"""Passes over the graph of a model before training: training mode, masks, weights, what is trainable."""
