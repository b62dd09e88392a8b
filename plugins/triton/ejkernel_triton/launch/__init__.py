"""Launches of Triton kernels by JAX, for all operations."""
