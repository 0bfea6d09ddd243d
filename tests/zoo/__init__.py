"""Models that others publish: files in packages, and architectures that PyTorch exports.

``python -m tests.zoo`` exports the architectures with random weights and holds gradients, training and second order to
PyTorch; ``python -m tests.zoo --page`` also writes the page docs/zoo.md.
"""
