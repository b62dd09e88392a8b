"""The operations ``update_kv_pages``, of one array of pages, and ``update_kv_page_pair``, of two."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Axes, Cost, Example, Operation
from ejkernel_ops.pages import check_three_axes, page_shapes, pages_of

from .arguments import prepare, validate

Arguments = dict[str, Any]

#: What other libraries call the arguments, for the error of an unknown argument.
OTHER_NAMES = {
    **dict.fromkeys(("k", "keys", "new_key", "new_k"), "key"),
    **dict.fromkeys(("v", "values", "new_value", "new_v"), "value"),
    **dict.fromkeys(("slots", "slot_indices", "slices", "slice_indices", "cache_loc", "out_cache_loc"), "slot_mapping"),
    **dict.fromkeys(("num_kv_update_slices", "num_slices_updated", "total_update_slices"), "num_slices"),
    **dict.fromkeys(("layer", "layer_id", "page_offset"), "first_page"),
    **dict.fromkeys(("key_scale", "scale_k"), "k_scale"),
    **dict.fromkeys(("value_scale", "scale_v"), "v_scale"),
    **dict.fromkeys(("implementation", "impl", "platform"), "backend"),
    **dict.fromkeys(("new_kv", "new_kv_tokens"), "'key' and 'value' take new_kv[:, ::2] and new_kv[:, 1::2]"),
    **dict.fromkeys(
        ("block_tables", "block_table", "page_table", "page_indices"),
        "'slot_mapping' takes page * page_size + row of each token",
    ),
    **dict.fromkeys(("kv_cache_dtype", "page_size", "block_size"), "leave it out: the pages say it"),
    "num_slices_per_block": "'cfg' takes a kernel's Config",
}
_JOINED = ("kv_cache", "cache", "pages", "kv_pages")
_KEYS, _VALUES = ("key_cache", "k_cache", "key_pages", "k_pages"), ("value_cache", "v_cache", "value_pages", "v_pages")
_TYPED = "ejkernel_ops.update_kv_pages takes kv_pages=(key_pages, value_pages)"
_A_PAIR = f"{_TYPED}, and ejkernel_core.call('update_kv_page_pair', ...) takes key_pages and value_pages"
_PAIR_ALONE = "pass key_pages and value_pages; one array with both is for update_kv_pages"


def _signature(*pages: str) -> inspect.Signature:
    """Tokens, pages and slots by position, and the rest, which may be left out, by name."""
    arrays = ("key", "value", *pages, "slot_mapping")
    optional = ("first_page", "num_slices", "k_scale", "v_scale")
    return inspect.Signature(
        [
            *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in arrays),
            *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in optional),
        ]
    )


def _axes(pages: Mapping[str, str], value_dim: str) -> Axes:
    """Of these pages. The slots of slices become those of tokens, so kernels get no ``num_slices``."""
    return Axes(
        {
            "key": "tokens kv_heads head_dim",
            "value": f"tokens kv_heads {value_dim}",
            **pages,
            "slot_mapping": "tokens",
            "first_page": "1",
            "num_slices": "1",
            "k_scale": "#kv_heads",
            "v_scale": "#kv_heads",
        },
        {f"new_{name}": axes for name, axes in pages.items()},
        independent="kv_heads",
        whole=dict.fromkeys(("tokens", "pages", "page_size", "head_dim", value_dim)),
        counts="tokens pages kv_heads",
        rounded="tokens pages",
        positive=dict.fromkeys(("page_size", "kv_heads", "head_dim", value_dim)),
    )


def samples(axes: Axes, arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The derived samples, in which each token has a slot of its own, anywhere in the pages."""
    drawn = axes.samples(arguments, key)
    slots, pages = arguments["slot_mapping"], pages_of(arguments)[0]
    if isinstance(slots, jax.ShapeDtypeStruct):
        tokens, count = slots.shape[0], pages.shape[0] * pages.shape[1]
        order = jax.random.permutation(key, count)[:tokens]
        without = jnp.full(max(tokens - count, 0), -1)  # there are more tokens than slots
        drawn["slot_mapping"] = jnp.concatenate([order, without]).astype(slots.dtype)
    return drawn


def cost(arguments: Mapping[str, Any]) -> Cost:
    """The tokens are read, and their entries of the pages written."""
    tokens, dtype = [arguments[name] for name in ("key", "value", "slot_mapping")], pages_of(arguments)[0].dtype
    read = sum(array.size * array.dtype.itemsize for array in tokens)
    return Cost(0.0, float(read + dtype.itemsize * sum(array.size for array in tokens[:2])))


def _examples(name: str) -> Iterable[Example]:
    from . import examples

    every: Iterable[Example] = getattr(examples, name)()
    return every


def shapes_of_sizes(
    pair: bool,
    key: tuple[int, ...],
    *,
    pages: int,
    page_size: int = 64,
    cache_dtype: str | None = None,
) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """The arrays of a call by the sizes of its cache, as a command line says them."""
    check_three_axes("key", key, "(tokens, kv_heads, head_dim)")
    cache = page_shapes(pages, page_size, key[1], key[2], pair)
    return {name: (shape, cache_dtype) for name, shape in cache.items()}


def _operation(name: str, pages: Mapping[str, str], value_dim: str, **fields: Any) -> Operation:
    axes = _axes(pages, value_dim)
    return Operation(
        name=name,
        signature=_signature(*pages),
        axes=axes,
        aliases={f"new_{array}": array for array in pages},
        prepare=prepare,
        validate=validate,
        samples=partial(samples, axes),
        cost=cost,
        sizes=partial(shapes_of_sizes, len(pages) == 2),
        **fields,
    )


forward = _operation(
    "update_kv_pages",
    {"kv_pages": "pages page_size 2*kv_heads head_dim"},
    "head_dim",
    examples=partial(_examples, "examples"),
    pytrees={"kv_pages": _A_PAIR},
    other_names={
        **OTHER_NAMES,
        **dict.fromkeys(_JOINED[:-1], "kv_pages"),
        **dict.fromkeys((*_KEYS, *_VALUES), _A_PAIR),
    },
)
pair = _operation(
    "update_kv_page_pair",
    {"key_pages": "pages page_size kv_heads head_dim", "value_pages": "pages page_size kv_heads v_head_dim"},
    "v_head_dim",
    examples=partial(_examples, "pair_examples"),
    other_names={
        **OTHER_NAMES,
        **dict.fromkeys(_JOINED, _PAIR_ALONE),
        **{name: "key_pages" for name in _KEYS if name != "key_pages"},
        **{name: "value_pages" for name in _VALUES if name != "value_pages"},
    },
)
