"""Kernels in plain JAX: they run on every device that JAX runs on."""
