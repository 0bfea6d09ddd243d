"""The training specification of ONNX: training information, Gradient nodes, GraphCall, optimizer operators."""
