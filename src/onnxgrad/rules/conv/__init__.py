"""Convolutions: rules, window geometry, and the cotangent of weights."""
