"""What the compiler for TPUs compiles: rows that fill tiles and rows that do not, and pages of all dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Example

PAGES = 1024
#: By name: (tokens, heads, head_dim, page_size), the dtype of tokens, and that of pages.
CALLS = {
    "bfloat16": ((256, 8, 128, 64), "bfloat16", "bfloat16"),
    "float32": ((256, 8, 128, 16), "float32", "float32"),
    "float8": ((256, 8, 128, 64), "bfloat16", "float8_e4m3fn"),
    "int8": ((256, 8, 128, 64), "float32", "int8"),
    "wide": ((8192, 8, 256, 64), "float32", "float32"),
    "one head": ((256, 1, 128, 16), "bfloat16", "bfloat16"),
    "half of the lanes": ((256, 8, 64, 64), "bfloat16", "bfloat16"),
    "odd": ((5, 3, 80, 1), "bfloat16", "bfloat16"),
}


def examples() -> Iterator[Example]:
    """Those of both operations."""
    for op in ("update_kv_pages", "update_kv_page_pair"):
        for name in CALLS:
            yield Example(name, op, partial(_arguments, op, name), checks=frozenset(), uses=frozenset({"vmem"}))


def _arguments(op: str, name: str, draw: int) -> dict[str, Any]:
    (tokens, heads, dim, page_size), dtype, pages_dtype = CALLS[name]
    pages = partial(jnp.zeros, dtype=pages_dtype)
    by_op = {
        "update_kv_pages": {"kv_pages": pages((PAGES, page_size, 2 * heads, dim))},
        "update_kv_page_pair": {key: pages((PAGES, page_size, heads, dim)) for key in ("key_pages", "value_pages")},
    }
    has_scale = jnp.dtype(pages_dtype).itemsize == 1
    return {
        "key": jnp.zeros((tokens, heads, dim), dtype),
        "value": jnp.zeros((tokens, heads, dim), dtype),
        **by_op[op],
        "slot_mapping": jnp.zeros(tokens, jnp.int32),
        "first_page": jnp.zeros((), jnp.int32),
        **({"k_scale": jnp.ones(heads)} if has_scale else {}),
    }
