"""Models inside other libraries: a thin module for each, which imports that library."""
