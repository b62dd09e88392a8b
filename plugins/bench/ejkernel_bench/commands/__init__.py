"""The subcommands of ``ejkernel`` that this package brings. Each imports JAX only when it runs."""
