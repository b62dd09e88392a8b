"""Attention kernels in Triton, for NVIDIA GPUs."""
