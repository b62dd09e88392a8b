"""``update_kv_page_pair`` on any device JAX runs on, by two scatters that XLA makes in place."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.update_kv_pages import definition

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, jax.Array]:
    key_pages, value_pages = inv["key_pages"], inv["value_pages"]
    key, value = definition.stored_tokens(inv, key_pages.dtype)
    return definition.written(inv, key_pages, key), definition.written(inv, value_pages, value)
