"""``python -m onnxgrad``."""

from onnxgrad.cli import main

main()
