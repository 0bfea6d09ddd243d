"""Inference of types and shapes: for whole models when opened, node by node for derivatives."""
