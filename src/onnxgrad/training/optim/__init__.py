"""Optimizers: formulas, settings, schedules, and the update from gradients to the next weights."""
