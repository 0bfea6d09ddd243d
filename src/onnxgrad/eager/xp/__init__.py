"""The functions of the array namespace, one module per family."""
