"""``ejkernel.ops.core``: see the modules in it."""
