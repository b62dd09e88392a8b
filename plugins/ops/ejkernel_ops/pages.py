"""Pages of a cache, and what comes with them, as arguments: checked, in the form that kernels see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import DTYPES, check_integers
from .options import integer

#: The dtypes of pages that have scales.
EIGHT_BITS = tuple(jnp.dtype(name) for name in ("float8_e4m3fn", "int8"))
_LEAST, _MOST = (int(limit) for limit in (np.iinfo(np.int32).min, np.iinfo(np.int32).max))


def pages_of(arguments: Mapping[str, Any]) -> list[Any]:
    """The pages of a call: one array, or those of keys and those of values."""
    arrays = (arguments.get(name) for name in ("kv_pages", "key_pages", "value_pages"))
    return [array for array in arrays if array is not None]


def check_pages(arguments: Mapping[str, Any]) -> None:
    """Raise for pages of another dtype or rank, and for a pair of two dtypes."""
    for name in ("kv_pages", "key_pages", "value_pages"):
        pages = arguments.get(name)
        if pages is None:
            continue
        heads = "2 * kv heads" if name == "kv_pages" else "kv heads"
        if pages.dtype not in (*DTYPES, *EIGHT_BITS):
            raise TypeError(f"{name}: takes {', '.join(map(str, (*DTYPES, *EIGHT_BITS)))}; got {pages.dtype}")
        if pages.ndim != 4:
            raise ValueError(f"{name}: takes (pages, page_size, {heads}, head_dim); got shape {pages.shape}")
    first, *others = (pages.dtype for pages in pages_of(arguments))
    if others and others[0] != first:
        raise TypeError(f"value_pages: takes the dtype of key_pages, {first}; got {others[0]}")


def scale_of_heads(name: str, scale: Any, dtype: Any, what: str = "pages") -> Any:
    """The scale of an array of 8 bits, a number or one for each head, with an axis."""
    if scale is None:
        return None
    if dtype not in EIGHT_BITS:
        raise ValueError(f"{name}: is for {what} of 8 bits; these are {dtype}")
    is_number = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    if scale.ndim > 1 or not is_number:
        raise ValueError(f"{name}: takes a number, or one for each head; got {scale.dtype} of shape {scale.shape}")
    return scale.astype(jnp.float32).reshape(-1)


def check_scales(arrays: Mapping[str, Any], *names: str) -> None:
    """Raise for scales that are not positive."""
    for name in names:
        scale = arrays[name]
        if scale is not None and not ((scale > 0) & (scale < np.inf)).all():
            raise ValueError(f"{name}: takes finite numbers above 0; got {scale}")


def one_integer(name: str, value: Any) -> jax.Array | None:
    """One integer, which may be traced, with an axis."""
    if value is None:
        return None
    check_integers(name, value)
    if value.shape not in ((), (1,)):
        raise ValueError(f"{name}: takes one integer; got shape {value.shape}")
    return int32(value).reshape(1)


def int32(array: Any) -> jax.Array:
    """The nearest int32: a place that is behind all pages stays there."""
    if array.dtype.itemsize > 4 or array.dtype == jnp.uint32:
        array = jnp.clip(array, max(int(jnp.iinfo(array.dtype).min), _LEAST), _MOST)
    return jnp.asarray(array, jnp.int32)


# -- sizes in place of arrays ------------------------------------------------------------------------------------------


def check_three_axes(name: str, shape: tuple[int, ...], words: str) -> None:
    """Raise for a shape with another number of axes, of which the words are the names."""
    if len(shape) != 3:
        raise ValueError(f"{name}: takes {words}; got shape {shape}")


def positive(name: str, value: Any) -> int:
    """A size from 1 on."""
    return integer(name, value, _MOST, "the largest int32")


def page_shapes(pages: int, page_size: int, kv_heads: int, dim: int, pair: bool) -> dict[str, tuple[int, ...]]:
    """By name, of one array or of a pair.

    >>> page_shapes(7, 16, 2, 64, pair=False)
    {'kv_pages': (7, 16, 4, 64)}
    """
    given = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads}
    count, size, heads = (positive(name, value) for name, value in given.items())
    if pair:
        return dict.fromkeys(("key_pages", "value_pages"), (count, size, heads, dim))
    return {"kv_pages": (count, size, 2 * heads, dim)}
