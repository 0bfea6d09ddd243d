"""A training step as files for a host that has nothing but an ONNX runtime."""
