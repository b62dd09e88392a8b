"""``ejkernel.ops.registry``: the calls that were recorded; what is installed is ``ejkernel_core.Registry``."""

from __future__ import annotations

from ejkernel_classes import get_invocations, record_invocation

__all__ = ["get_invocations", "record_invocation"]
