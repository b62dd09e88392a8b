"""``ejkernel.ops.config``: see the modules in it."""
