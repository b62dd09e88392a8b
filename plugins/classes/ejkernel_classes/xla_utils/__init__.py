"""``ejkernel.xla_utils``: see the modules in it."""
