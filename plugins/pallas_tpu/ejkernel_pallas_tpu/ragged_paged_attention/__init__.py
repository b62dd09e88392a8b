"""``ragged_paged_attention`` on TPUs, in Pallas: decoding and chunks of prompts, by the tokens of a tile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_pallas_tpu.ragged_paged_attention import _tuning
from ejkernel_pallas_tpu.ragged_paged_attention._refusals import check
from ejkernel_pallas_tpu.ragged_paged_attention._tuning import Config

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"tpu": 50}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """One token in a tile where all sequences decode, and as many as fill the rows of a tile for prompts."""
    return next(iter(config_space(inv)))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Tiles and blocks of half and twice the size."""
    check(inv)
    return _tuning.configs(inv)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    _tuning.check_config(inv, cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, jax.Array | None]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_pallas_tpu.ragged_paged_attention._attend import attend, pages_of_table
    from ejkernel_pallas_tpu.ragged_paged_attention._plan import plan
    from ejkernel_pallas_tpu.ragged_paged_attention._sizes import sizes
    from ejkernel_pallas_tpu.ragged_paged_attention._tokens import to_tokens

    s, cores = sizes(inv, cfg.q_tile, cfg.k_block), _tuning.cores(inv)
    tiles = plan(inv, s, cores)
    scalars = (tiles.numbers, pages_of_table(inv))
    out, *lse = attend(inv, s, tiles, cores)(scalars, interpret, _tuning.vmem_limit(inv))
    tokens = inv["query"].shape[0]
    out = to_tokens(out, s, tiles, tokens, 0.0)
    if not inv.needs("lse"):
        return out, None
    return out, to_tokens(lse[0][..., :1], s, tiles, tokens, -float("inf"))[..., 0].T


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return _tuning.vmem_bytes(inv, cfg.q_tile, cfg.k_block)


def examples() -> Iterable[Example]:
    """Calls for estimates of time and memory."""
    from ejkernel_pallas_tpu.ragged_paged_attention._examples import examples

    return examples()


def peers(example: Example) -> Iterable[Any]:
    """JAX's own kernel."""
    from ejkernel_pallas_tpu.ragged_paged_attention._peers import peers

    return peers(example)
