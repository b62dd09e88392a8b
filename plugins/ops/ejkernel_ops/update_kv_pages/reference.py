"""``update_kv_pages`` in plain JAX, by its definition."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl

from . import definition

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> jax.Array:
    pages = inv["kv_pages"]
    return definition.written(inv, pages, definition.interleaved(*definition.stored_tokens(inv, pages.dtype)))
