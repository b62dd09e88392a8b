"""The key-value store that the processes of a program share: that of ``jax.distributed``.

JAX has no public name for its client. This module relies on ``jax._src.distributed.global_state.client`` and on five of
its methods (in 0.10.2, 0.11.2 and 0.12.0.1). Its errors are ``JaxRuntimeError``, and their texts begin with the status.
``key_value_set`` refuses to overwrite, which is a compare-and-set: the first writer of a key decides.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import jax

#: The beginning of all keys.
PREFIX = "ejkernel-agree/"
#: A wait is divided into waits of this length, between which Python handles Ctrl-C.
SLICE_S = 1.0


class Client(Protocol):
    """What agreement needs of a store."""

    def set_once(self, key: str, text: str) -> None:
        """Write under a key, unless something is there."""
        ...

    def replace(self, key: str, text: str) -> None:
        """Write under a key, whatever is there."""
        ...

    def get(self, key: str) -> str | None:
        """The text under a key; None where there is none."""
        ...

    def wait(self, key: str, seconds: float) -> str | None:
        """The text under a key as soon as there is one; None where there is none in time."""
        ...

    def folder(self, key: str) -> dict[str, str]:
        """The texts under all keys below this one, by the rest of their keys."""
        ...


class JaxClient:
    """The store of ``jax.distributed``."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set_once(self, key: str, text: str) -> None:
        """Write under a key, unless something is there."""
        try:
            self._client.key_value_set(PREFIX + key, text)
        except jax.errors.JaxRuntimeError as fault:
            _expect("ALREADY_EXISTS", fault)

    def replace(self, key: str, text: str) -> None:
        """Write under a key, whatever is there."""
        self._client.key_value_set(PREFIX + key, text, allow_overwrite=True)

    def get(self, key: str) -> str | None:
        """The text under a key; None where there is none."""
        try:
            text: str = self._client.key_value_try_get(PREFIX + key)
        except jax.errors.JaxRuntimeError as fault:
            _expect("NOT_FOUND", fault)
            return None
        return text

    def wait(self, key: str, seconds: float) -> str | None:
        """The text under a key as soon as there is one; None where there is none in time."""
        end = time.monotonic() + seconds
        while True:
            slice_s = min(max(end - time.monotonic(), 0.0), SLICE_S)
            try:
                text: str = self._client.blocking_key_value_get(PREFIX + key, round(slice_s * 1000))
                return text
            except jax.errors.JaxRuntimeError as fault:
                _expect("DEADLINE_EXCEEDED", fault)
            if time.monotonic() >= end:
                return None

    def folder(self, key: str) -> dict[str, str]:
        """The texts under all keys below this one, by the rest of their keys."""
        entries = self._client.key_value_dir_get(f"{PREFIX}{key}/")
        return {name.removeprefix(f"{PREFIX}{key}/"): text for name, text in entries}


def _expect(status: str, fault: Exception) -> None:
    if not str(fault).startswith(status):
        raise fault


def connected_client() -> Any:
    """JAX's client; None where ``jax.distributed`` is not initialized."""
    from jax._src import distributed

    return distributed.global_state.client
