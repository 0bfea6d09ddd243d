"""The demonstration: a small convolutional classifier as a plain file, and real handwritten digits."""

from onnxgrad.demo.digits import MODEL, digits, shifted

__all__ = ["MODEL", "digits", "shifted"]
