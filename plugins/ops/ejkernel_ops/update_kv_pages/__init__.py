"""The typed front door of ``update_kv_pages`` and ``update_kv_page_pair``."""

from __future__ import annotations

from typing import Any, overload

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door


@overload
def update_kv_pages(
    key: ArrayLike,
    value: ArrayLike,
    kv_pages: tuple[ArrayLike, ArrayLike],
    slot_mapping: ArrayLike,
    *,
    first_page: ArrayLike | None = None,
    num_slices: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    donate: bool = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def update_kv_pages(
    key: ArrayLike,
    value: ArrayLike,
    kv_pages: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    first_page: ArrayLike | None = None,
    num_slices: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    donate: bool = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array: ...


@front_door
def update_kv_pages(
    key: ArrayLike,
    value: ArrayLike,
    kv_pages: ArrayLike | tuple[ArrayLike, ArrayLike],
    slot_mapping: ArrayLike,
    *,
    first_page: ArrayLike | None = None,
    num_slices: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    donate: bool = False,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Write the keys and values of new tokens into the pages of a cache, in place.

    >>> import jax.numpy as jnp
    >>> pages = jnp.zeros((2, 4, 2, 1))  # two pages of four tokens, with the key and the value of one head
    >>> token = jnp.ones((1, 1, 1))
    >>> update_kv_pages(token, 2 * token, pages, jnp.array([5]))[1, :, :, 0]
    Array([[0., 0.],
           [1., 2.],
           [0., 0.],
           [0., 0.]], dtype=float32)

    Args:
      key, value: (tokens, kv heads, head_dim), of one dtype.
      kv_pages: (pages, page_size, 2 * kv heads, head_dim), in which entry ``2 * h`` is the key of head ``h``, and the
        next one its value. Or a pair: (pages, page_size, kv heads, head_dim) for keys, and the same for values, whose
        head_dim may be another one. Tokens are converted to the dtype of the pages.
      slot_mapping: Integers (tokens,): where each token goes, counted in tokens from the start of the pages. A token
        whose slot is negative, or behind the pages, is not stored. Or integers (3, slices): for each slice of tokens
        its first slot, its first token, and how many there are.
      first_page: An integer that is added to the page of every slot that is not negative, so that the pages of all
        layers can be one array.
      num_slices: An integer: how many of the slices count. By default all.
      k_scale, v_scale: For pages of 8 bits: a number, or one for each head, by which tokens are divided.
      donate: Take the pages away from the caller, so that an eager call does not copy them.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check that slots are in the pages and that no two tokens share one.

    Returns:
      The pages, or the pair of them, updated. They have no gradients.
    """
    arrays = {"first_page": first_page, "num_slices": num_slices, "k_scale": k_scale, "v_scale": v_scale}
    options: dict[str, Any] = {"backend": backend, "cfg": cfg, "validate": validate, "donate": donate}
    options |= {name: array for name, array in arrays.items() if array is not None}
    if isinstance(kv_pages, (tuple, list)) and len(kv_pages) == 2:
        pair: tuple[jax.Array, jax.Array] = ejkernel_core.call(
            "update_kv_page_pair", key, value, *kv_pages, slot_mapping, **options
        )
        return pair
    pages: jax.Array = ejkernel_core.call("update_kv_pages", key, value, kv_pages, slot_mapping, **options)
    return pages
