"""The devices that JAX has here, or the reason why it has none."""

from __future__ import annotations

import os
from typing import Any

from ._output import Failure


def devices() -> list[Any]:
    """JAX's devices of this process. Raises ``Failure`` where it has none."""
    try:
        import jax

        return list(jax.local_devices())
    except Exception as error:  # a failed assertion, too, where the platform of JAX_PLATFORMS is not there
        raise Failure(f"JAX has no device: {_reason(error)}") from error


def platform() -> str:
    """JAX's name for the platform of its default device."""
    return str(devices()[0].platform)


def _reason(error: Exception) -> str:
    platforms = os.environ.get("JAX_PLATFORMS")
    text = " ".join(str(error).split()) or type(error).__name__
    if platforms:
        return f"JAX_PLATFORMS is {platforms!r}, and it cannot start that ({text}); unset it to take what there is"
    return f"{text}; 'ejkernel doctor' says more"
