"""Attaching losses, optimizers, heads and initializers to models."""
