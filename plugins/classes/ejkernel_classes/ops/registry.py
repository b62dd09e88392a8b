"""``ejkernel.ops.registry``: the calls that were recorded; what is installed is ``ejkernel_core.Registry``."""

from __future__ import annotations

from ejkernel_tuning import get_invocations, record_invocation

__all__ = ["get_invocations", "record_invocation"]
