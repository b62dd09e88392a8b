"""``update_kv_page_pair`` in plain JAX, by its definition."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl

from . import definition

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, jax.Array]:
    key_pages, value_pages = inv["key_pages"], inv["value_pages"]
    key, value = definition.stored_tokens(inv, key_pages.dtype)
    return definition.written(inv, key_pages, key), definition.written(inv, value_pages, value)
