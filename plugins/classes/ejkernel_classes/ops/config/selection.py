"""``ejkernel.ops.config.selection``: who chooses a configuration, and when it is measured."""

from __future__ import annotations

from ejkernel_classes import AutotunePolicy, ConfigSelectorChain, policy_override

__all__ = ["AutotunePolicy", "ConfigSelectorChain", "policy_override"]
