"""Transformations that use gradients: Jacobians, Hessians, their products with vectors, linear maps as models.

Nothing is imported here: each takes its time, and most programs use one of them.
"""
