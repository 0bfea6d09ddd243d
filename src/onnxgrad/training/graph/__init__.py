"""Passes over the graph of a model before it trains: training mode, masks, weights lifted out, what is trainable."""
