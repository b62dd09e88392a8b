"""Kernels that cuDNN has, one folder an operation."""
