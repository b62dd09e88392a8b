"""The examples that every kernel of both operations is tested on, and the calls that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example

Arguments = dict[str, Any]
Draw = Callable[[int], Arguments]
Change = Callable[[Arguments, np.random.Generator], Arguments]

#: (tokens, heads, head_dim, pages, page_size): none is a multiple of a block.
SHAPES = (
    (5, 2, 64, 7, 4),
    (1, 1, 80, 3, 1),
    (33, 3, 96, 11, 16),
    (4, 8, 128, 2, 256),
    (3, 9, 512, 2, 2),
    (0, 2, 64, 3, 4),
)
TRANSFORMS = frozenset({"jit", "vmap", "vmap_of_other_axes", "checkpoint", "sharding"})
#: By the word of examples: the dtype of the pages.
EIGHT_BITS = {"fp8_pages": jnp.float8_e4m3fn, "int8_pages": jnp.int8}
_OPTIONAL = ("first_page", "num_slices", "k_scale", "v_scale")


def examples() -> Iterator[Example]:
    """The examples of ``update_kv_pages``."""
    return _examples("update_kv_pages", lambda draw: draw)


def pair_examples() -> Iterator[Example]:
    """The examples of ``update_kv_page_pair``: the same, and one of values with another head_dim."""
    yield from _examples("update_kv_page_pair", _as_pair)
    values = lambda arguments, rng: {
        "value": rng.normal(size=(5, 2, 40)),
        "value_pages": rng.normal(size=(7, 4, 2, 40)),
    }
    draw = changed(_as_pair(partial(drawn, *SHAPES[0])), values)
    yield Example("values-of-40", "update_kv_page_pair", draw, features=frozenset({"float32", "other v_head_dim"}))


def _examples(op: str, form: Callable[[Draw], Draw]) -> Iterator[Example]:
    def example(name: str, draw: Draw, *words: str, dtype: str = "float32", **fields: Any) -> Example:
        features = frozenset({dtype, *words, *(word for word in _OPTIONAL if word in draw(0))})
        return Example(name, op, form(draw), dtype, features=features, **fields)

    for shape in SHAPES:
        yield example("x".join(map(str, shape)), partial(drawn, *shape))
    plain = partial(drawn, *SHAPES[0])
    yield example("in-place", plain, checks=frozenset({"values", "in_place"}))
    yield example("transformed", changed(plain, _of_a_layer), checks=TRANSFORMS)
    for name, change in _SLOTS.items():
        yield example(name, changed(plain, change))
    for dtype in ("float16", "bfloat16", "float64"):
        yield example(f"all-{dtype}", plain, dtype=dtype)
    for word, pages_dtype in EIGHT_BITS.items():
        pages = changed(plain, partial(_narrow, pages_dtype))
        scaled = changed(pages, lambda arguments, rng: {"k_scale": 0.05, "v_scale": np.float32(0.125)})
        yield example(word, changed(pages, _far), word)
        yield example(f"{word}-with-scales", scaled, word)
        yield example(f"{word}-with-scales-of-heads", changed(pages, _scales_of_heads), word)
        yield example(f"{word}-of-bfloat16", scaled, word, dtype="bfloat16")
    for name, tokens in (("blocks", 64), ("blocks-and-a-tail", 75)):
        yield example(name, partial(drawn, tokens, 2, 64, 40, 4), checks=frozenset({"configurations"}))
    for tokens in (8192, 256):
        uses = frozenset({"benchmark", *(("resources",) if tokens == 256 else ())})
        yield Example(f"{tokens} tokens", op, form(partial(_large, tokens)), "bfloat16", checks=frozenset(), uses=uses)


def drawn(tokens: int, heads: int, dim: int, pages: int, page_size: int, draw: int) -> Arguments:
    """Tokens at slots of their own, anywhere in the pages."""
    rng = np.random.default_rng([draw, tokens, heads, dim, pages, page_size])
    return {
        "key": rng.normal(size=(tokens, heads, dim)),
        "value": rng.normal(size=(tokens, heads, dim)),
        "kv_pages": rng.normal(size=(pages, page_size, 2 * heads, dim)),
        "slot_mapping": rng.permutation(pages * page_size)[:tokens].astype(np.int32),
    }


def changed(draw: Draw, change: Change) -> Draw:
    """The same arguments, but for these."""

    def arguments(number: int) -> Arguments:
        before = draw(number)
        return {**before, **change(before, np.random.default_rng([number, 77]))}

    return arguments


def _as_pair(draw: Draw) -> Draw:
    """The same pages in two arrays."""

    def arguments(number: int) -> Arguments:
        given = draw(number)
        pages = given.pop("kv_pages")
        return {**given, "key_pages": pages[:, :, ::2], "value_pages": pages[:, :, 1::2]}

    return arguments


def _large(tokens: int, draw: int) -> Arguments:
    """A call that is measured: 8 heads of 128, and pages of 64 tokens."""
    keys = jax.random.split(jax.random.key(draw), 4)
    key, value = (jax.random.normal(number, (tokens, 8, 128), jnp.bfloat16) for number in keys[:2])
    pages = jax.random.normal(keys[2], (1024, 64, 16, 128), jnp.bfloat16)
    slots = jax.random.permutation(keys[3], 1024 * 64)[:tokens].astype(jnp.int32)
    return {"key": key, "value": value, "kv_pages": pages, "slot_mapping": slots}


# -- what is changed ---------------------------------------------------------------------------------------------------


def _some_without(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    return {"slot_mapping": np.where(np.arange(5) % 2, arguments["slot_mapping"], -1)}


def _none(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    return {"slot_mapping": np.array([-1, -7, -28, -29, np.iinfo(np.int32).min], np.int32)}


def _behind_the_pages(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    return {"slot_mapping": np.array([27, 28, 5, 2**31 - 1, 29], np.int32)}


def _of_a_layer(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    return {"slot_mapping": np.array([3, -1, 0, 7, 2], np.int32), "first_page": np.int32(5)}


def _slices(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    return {"slot_mapping": np.array([[9, 3, 20], [3, 0, 2], [2, 2, 1]], np.int32)}


def _first_two_slices(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    slices = np.array([[9, 3, 0], [3, 0, 0], [2, 2, 5]], np.int32)
    return {"slot_mapping": slices, "num_slices": np.array([2], np.int32), "first_page": np.array([1], np.int32)}


_SLOTS: dict[str, Change] = {
    "no-slot-for-some": _some_without,
    "no-slot-for-any": _none,
    "slots-behind-the-pages": _behind_the_pages,
    "first-page": _of_a_layer,
    "slices": _slices,
    "slices-with-a-count": _first_two_slices,
}


def _values_of_40(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    return {"value": rng.normal(size=(5, 2, 40)), "value_pages": rng.normal(size=(7, 4, 2, 40))}


def _narrow(dtype: Any, arguments: Arguments, rng: np.random.Generator) -> Arguments:
    """Pages of 8 bits, of any values."""
    return {"kv_pages": rng.integers(-100, 100, arguments["kv_pages"].shape).astype(dtype)}


def _scales_of_heads(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    return {"k_scale": np.array([0.03, 0.5], np.float32), "v_scale": np.array([1.5, 0.01], np.float32)}


def _far(arguments: Arguments, rng: np.random.Generator) -> Arguments:
    """Keys that are larger than all numbers of 8 bits, and one that is not a number."""
    key = arguments["key"] * 1e4
    key[0, 0, :3] = np.inf, -np.inf, np.nan
    return {"key": key}
