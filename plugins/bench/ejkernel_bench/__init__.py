"""Benchmarks of ejkernel: each measures all contenders in turn in one run, and checks their results.

``ejkernel bench`` lists the suites of all installed distributions. A suite is a module with a function ``run`` that
returns a ``Report``, named by an entry point of the group ``ejkernel.benchmarks``. The suite of an operation is made
with ``ejkernel_bench.suite``.
"""
