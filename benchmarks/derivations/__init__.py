"""The time of a derivation, compared with onnx-ad."""
