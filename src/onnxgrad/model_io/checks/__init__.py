"""Checks of a model's claims: schemas, operands, declared sizes. An error names the node."""
