"""``flash_attention`` of few queries on Hopper, in Gluon: decoding, with keys that the copy engine fetches."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
from attrs.validators import in_

from ejkernel_core import Invocation, hookimpl
from ejkernel_triton.flash_attention_decode._tiling import SPLITS
from ejkernel_triton.flash_attention_decode_sm90 import _launch, _tiling
from ejkernel_triton.flash_attention_decode_sm90._refusals import check
from ejkernel_triton.split_keys import shapes

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 2
#: With fewer keys, and more than one query, the portable kernel is up to 10 % faster.
MANY_KEYS = 512


def rank(inv: Invocation) -> int:
    """First, before cuDNN; with several queries and few keys after the portable kernel."""
    return 72 if inv["query"].shape[1] == 1 or inv["key"].shape[1] >= MANY_KEYS else 64


#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@attrs.frozen
class Config:
    """Into how many parts the keys are split, the keys of a step, the stages and warps of a program, and the programs
    of a multiprocessor.
    """

    #: The parts of the keys that a row of the batch sees, for each key head.
    splits: int = attrs.field(default=1, validator=in_(SPLITS))
    #: The keys of a step.
    block: int = attrs.field(default=64, validator=in_(shapes.BLOCKS))
    #: Steps whose keys and values are on their way or in use at a time.
    stages: int = attrs.field(default=4, validator=in_(shapes.STAGES))
    #: The warps that compute.
    num_warps: int = attrs.field(default=4, validator=in_(shapes.WARPS))
    #: The programs of a multiprocessor.
    programs: int = attrs.field(default=1, validator=in_(shapes.PROGRAMS))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """As few splits as keep the multiprocessors busy, and nearly all shared memory for keys on their way."""
    check(inv)
    return Config(*shapes.shapes(_tiling.problem(inv))[0])


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """One program of a multiprocessor or two; fewer stages; larger blocks; more and fewer splits."""
    check(inv)
    return [Config(*shape) for shape in shapes.shapes(_tiling.problem(inv))]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for a call or a configuration that does not fit."""
    check(inv)
    shapes.check_fits(_tiling.problem(inv), attrs.astuple(cfg))


def shared_memory(inv: Invocation, cfg: Config) -> dict[str, int]:
    """At most how many bytes of shared memory a program takes."""
    return {"attend": shapes.shared_memory(_tiling.problem(inv), attrs.astuple(cfg))}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse of every row."""
    return _launch.attention(inv, *attrs.astuple(cfg))
