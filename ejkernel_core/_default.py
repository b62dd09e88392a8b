"""The registry of this process, and what callers use of it."""

from __future__ import annotations

from ._call import Registry
from ._loading import config_types

#: It has the installed plugins that EJKERNEL_PLUGINS selects.
registry = Registry()

call = registry.call
invocation = registry.invocation
plan = registry.plan
explain = registry.explain


def config_type(kernel: str) -> type | None:
    """The type of a kernel's configurations; None unless it is installed or was registered in this process.

    >>> config_type("flash_attention.xla").__name__, config_type("nobodys.kernel")
    ('Config', None)
    """
    op, _, backend = kernel.rpartition(".")
    kind = config_types.get(kernel)
    if kind is None and backend and backend in registry.backends(op):
        return registry.kernel(op, backend).config_type
    return kind
