"""Models whose outputs are a prediction and its spread, or sets that contain the label with a chosen probability."""
