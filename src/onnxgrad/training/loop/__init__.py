"""The loop around a step: the Trainer, its runs, callbacks, checkpoints, scores and reports."""
