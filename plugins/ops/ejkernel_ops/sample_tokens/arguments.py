"""The arguments of ``sample_tokens``: checked, in the form that kernels see, and their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.arrays import check_floats, check_integers
from ejkernel_ops.attention_options import flag
from ejkernel_ops.pages import int32

from .noise import random_bits

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

#: For each number of a row: what is valid, in words and as a function.
VALID: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "temperature": ("finite and at least 0", lambda x: (x >= 0) & (x < np.inf)),
    "top_p": ("at least 0", lambda x: x >= 0),
    "min_p": ("at most 1", lambda x: x <= 1),
}


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments. Kernels get two words of a key for each row, and numbers of each row."""
    logits = arguments["logits"]
    check_floats("logits", logits)
    if logits.ndim != 2:
        raise ValueError(f"logits: takes (rows, vocabulary); got shape {logits.shape}")
    rows = logits.shape[0]
    numbers = {name: _of_rows(name, arguments[name], rows) for name in ("top_k", *VALID)}
    if (temperature := numbers["temperature"]) is not None:
        # What is divided by -0 has the other sign.
        numbers["temperature"] = jnp.where(temperature == 0, 0, temperature)
    canonical = {
        **arguments,
        "key": key_words(arguments["key"], rows),
        **numbers,
        "return_logprobs": flag("return_logprobs", arguments["return_logprobs"]),
    }
    return canonical, lambda results: results if canonical["return_logprobs"] else results[0]


def key_words(key: Any, rows: Any) -> jax.Array:
    """(rows, 2), uint32. Row b of one key has ``fold_in(key, b)``."""
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != jnp.uint32:
        raise TypeError(f"key: takes keys of jax.random, typed or uint32; got {key.dtype}")
    if not is_typed and (key.ndim == 0 or key.shape[-1] not in (2, 4)):
        raise ValueError(f"key: takes keys of two words, or four; got shape {key.shape}")
    axes = key.ndim - (0 if is_typed else 1)
    if axes == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    elif axes != 1 or key.shape[0] != rows:
        raise ValueError(f"key: takes one key, or one for each of the {rows} rows; got shape {key.shape}")
    words = jax.random.key_data(key) if is_typed else key
    if words.shape[-1] == 4:  # of another generator than the default one; both halves may be the same
        a, b, c, d = jnp.moveaxis(words, -1, 0)
        words = jnp.stack([random_bits(a, b, c), random_bits(c, d, a ^ b)], -1)
    return words


def _of_rows(name: str, value: Any, rows: Any) -> jax.Array | None:
    """One number for each row, if there is any."""
    if value is None:
        return None
    if name == "top_k":
        check_integers(name, value)
        value = int32(value)
    elif jnp.issubdtype(value.dtype, jnp.integer):
        value = value.astype(jnp.float32)
    else:
        check_floats(name, value)
        value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    if value.shape not in ((), (rows,)):
        raise ValueError(f"{name}: takes one number, or one for each of the {rows} rows; got shape {value.shape}")
    return jnp.broadcast_to(value, (rows,))


def validate(arguments: Mapping[str, Any]) -> None:
    """Raise for numbers of a row that are out of range."""
    for name, (words, is_valid) in VALID.items():
        if arguments[name] is None:
            continue
        for value in np.ravel(arguments[name]):
            if not is_valid(value):
                raise ValueError(f"{name}: must be {words}; got {value}")
