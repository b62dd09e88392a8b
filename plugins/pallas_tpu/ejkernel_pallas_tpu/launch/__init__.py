"""Launching Pallas kernels on TPUs, for kernels of any operation."""
