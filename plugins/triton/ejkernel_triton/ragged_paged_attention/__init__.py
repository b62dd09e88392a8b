"""``ragged_paged_attention`` on NVIDIA GPUs, in Triton: tiles of tokens, with keys that are split over programs."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
from attrs.validators import in_

from ejkernel_core import Invocation, hookimpl
from ejkernel_triton.flash_attention_decode._tiling import BLOCKS, SPLITS
from ejkernel_triton.ragged_paged_attention import _launch, _tiling
from ejkernel_triton.ragged_paged_attention._refusals import check

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 20}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@attrs.frozen
class Config:
    """Over how many programs the keys are split, the keys of a step, and the warps and stages of each program."""

    #: The programs that read the keys of a tile for a key head, each a share of those that the tile sees. With
    #: ``split_size`` each has some of the parts, and the bits do not depend on it.
    splits: int = attrs.field(default=1, validator=in_(SPLITS))
    #: The keys of a step.
    block: int = attrs.field(default=64, validator=in_(BLOCKS))
    num_warps: int = attrs.field(default=4, validator=in_((1, 2, 4, 8)))
    #: Steps whose keys are fetched at a time.
    num_stages: int = attrs.field(default=3, validator=in_((1, 2, 3, 4, 5, 6)))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """So many splits that the card is busy, in blocks that leave room for two programs."""
    check(inv)
    return Config(*_tiling.shapes(inv)[0])


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """More and fewer splits; other blocks, warps and stages, but with ``split_size`` stages alone."""
    check(inv)
    return [Config(*shape) for shape in _tiling.shapes(inv)]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for a call or a configuration that does not fit the card."""
    check(inv)
    _tiling.check_shape(inv, attrs.astuple(cfg))


def shared_memory(inv: Invocation, cfg: Config) -> dict[str, int]:
    """At most how many bytes of shared memory a program takes."""
    return {"attend": _tiling.shared_memory(inv, attrs.astuple(cfg))}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse of every row."""
    return _launch.attention(inv, *attrs.astuple(cfg))
