"""The tape: arrays that record the operations on them, and the derivatives of a recording as ONNX graphs."""
