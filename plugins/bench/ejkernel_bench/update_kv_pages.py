"""update_kv_pages on a GPU: one array of pages and a pair, against a copy of the bytes that move, and torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Example
from ejkernel_core import registry as default_registry
from ejkernel_ops.pages import pages_of

from . import suite
from ._report import joined

OPERATIONS = ("update_kv_pages", "update_kv_page_pair")
SMALL = "33x3x96x11x16"
#: From so many tokens on, the memory's speed decides, and with fewer the time of a launch.
MANY_TOKENS = 4096
#: Of the bytes of the pages: a program that copies them, or writes them in another dtype, has at least 1.
MOST_TEMPORARIES = 0.01


def has_many_tokens(example: Example) -> bool:
    """Whether the memory's speed decides."""
    tokens: int = example.abstract()["key"].shape[0]
    return tokens >= MANY_TOKENS


MINIMA = (
    suite.Minimum("forward", suite.COPY, 0.85, applies=has_many_tokens),
    suite.Minimum("forward", suite.COPY, 1 / 1.5, applies=lambda example: not has_many_tokens(example)),
)


def run(backend: str | None = None, rounds: int = suite.ROUNDS, small: bool = False) -> suite.Report:
    """The measured calls of both operations, or with ``small`` one of each that a CPU can run."""
    return joined("update_kv_pages", [measured(operation, backend, rounds, small) for operation in OPERATIONS])


def measured(operation: str, backend: str | None, rounds: int, small: bool) -> suite.Report:
    """The calls of one of them, and the memory of their programs."""
    if small:
        every = default_registry.operation(operation).examples
        examples = every() if every else ()
        return suite.run(operation, peers(), examples=examples, names={SMALL}, backend=backend, rounds=rounds)
    options: dict[str, Any] = {"backend": backend, "rounds": rounds, "has_memory": True, "bars": bars_of_memory}
    return suite.run(operation, peers(), MINIMA, **options)


def bars_of_memory(measurements: Iterable[suite.Measurement]) -> Iterator[suite.Bar]:
    """The temporaries of each program of ours."""
    for one in measurements:
        pages = sum(math.prod(array.shape) * array.dtype.itemsize for array in pages_of(one.example.abstract()))
        title = f"{one.example.name}: temporaries, of the bytes of the pages"
        yield suite.Bar(title, one.temporaries[suite.OURS] / pages, MOST_TEMPORARIES, "times")


def peers() -> dict[str, suite.Peer | None]:
    """The peers of a call at any shape."""
    return {"XLA": by_xla, "torch": by_torch if suite.is_installed("torch") else None}


def by_xla(arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """XLA's scatter to pages and to the tokens in them, as users write it. It takes no 8 bits, layers or slices."""
    if not is_plain(arguments):
        return None

    def stored(pages: Any, slots: Any, rows: Any) -> Any:
        size = pages.shape[1]
        page = jnp.where(slots < 0, pages.shape[0], slots // size)
        return pages.at[page, slots % size].set(rows.astype(pages.dtype), mode="drop")

    def joined_pages(key: Any, value: Any, kv_pages: Any, slot_mapping: Any) -> Any:
        rows = jnp.stack([key, value], 2).reshape(key.shape[0], -1, key.shape[2])
        return stored(kv_pages, slot_mapping, rows)

    def pair(key: Any, value: Any, key_pages: Any, value_pages: Any, slot_mapping: Any) -> Any:
        return stored(key_pages, slot_mapping, key), stored(value_pages, slot_mapping, value)

    return joined_pages if "kv_pages" in arguments else pair


def by_torch(arguments: Mapping[str, Any]) -> suite.TorchFunction | None:
    """``index_copy_`` of PyTorch, eager, which takes no slots that are negative."""
    if not is_plain(arguments):
        return None

    def stored(pages: Any, slots: Any, rows: Any) -> Any:
        pages.flatten(0, 1).index_copy_(0, slots.long(), rows)
        return pages

    def joined_pages(key: Any, value: Any, kv_pages: Any, slot_mapping: Any) -> Any:
        import torch

        return stored(kv_pages, slot_mapping, torch.stack([key, value], 2).flatten(1, 2))

    def pair(key: Any, value: Any, key_pages: Any, value_pages: Any, slot_mapping: Any) -> Any:
        return stored(key_pages, slot_mapping, key), stored(value_pages, slot_mapping, value)

    return suite.TorchFunction(joined_pages if "kv_pages" in arguments else pair)


def is_plain(arguments: Mapping[str, Any]) -> bool:
    """Whether a call has a slot for each token and nothing optional, and pages of more than 8 bits."""
    optional = ("first_page", "num_slices", "k_scale", "v_scale")
    has_slots, is_wide = arguments["slot_mapping"].ndim == 1, pages_of(arguments)[0].dtype.itemsize > 1
    return has_slots and is_wide and all(arguments.get(name) is None for name in optional)
