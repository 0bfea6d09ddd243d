"""Demonstrations: models as plain files, and real data."""

from onnxgrad.demo.digits import MODEL, digits, shifted

__all__ = ["MODEL", "digits", "shifted"]
