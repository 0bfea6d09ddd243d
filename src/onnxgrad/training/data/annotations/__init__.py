"""Annotated pictures: boxes, outlines and key points, in the formats that data sets have."""
