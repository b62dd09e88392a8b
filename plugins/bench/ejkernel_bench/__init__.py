"""The benchmarks of ejkernel, each with its peers in the same run.

``python -m ejkernel_bench`` lists them. A benchmark is one module with a ``run`` that returns a ``Report``.
"""
