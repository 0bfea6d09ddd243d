"""Quantization: nodes placed by ONNX Runtime's quantizer, trained on float weights with learned scales, folded back."""
