"""Pruning: scores, masks and smaller graphs; widths under a budget."""
