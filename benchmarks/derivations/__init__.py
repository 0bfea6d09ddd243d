"""How long a derivation takes, beside onnx-ad."""
