"""Types and shapes: whole models when they are opened, one node at a time while a derivative is written."""
