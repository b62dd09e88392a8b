"""Kernels by cuDNN, one folder for each operation."""
