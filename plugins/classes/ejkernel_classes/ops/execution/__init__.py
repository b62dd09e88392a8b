"""``ejkernel.ops.execution``: see the modules in it."""
