"""Checks of what a model claims: schemas, operands, declared sizes. One error names the node that is wrong."""
