"""``update_kv_pages`` on any device JAX runs on, by a scatter that XLA makes in place."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.update_kv_pages import definition

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> jax.Array:
    pages = inv["kv_pages"]
    return definition.written(inv, pages, definition.interleaved(*definition.stored_tokens(inv, pages.dtype)))
