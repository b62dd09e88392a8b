"""``flash_attention`` of few queries on TPUs, in Pallas: decoding, with each key fetched once for all heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import jax
from attrs.validators import in_, instance_of

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_pallas_tpu.flash_attention_decode import _tuning
from ejkernel_pallas_tpu.flash_attention_decode._refusals import check, check_arguments

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there: before the general kernel.
PLATFORMS = {"tpu": 55}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@attrs.frozen
class Config:
    """The slots of a block, and into how many parts the keys of each batch entry are split."""

    k_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))
    #: Two for the two cores of a v4 or v5p, each of which reads half of the blocks that are seen.
    splits: int = attrs.field(default=1, validator=in_(_tuning.SPLITS))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Blocks of about 2 MiB, or 4 on v7x, and as many splits as cores share a kernel."""
    check(inv)
    return Config(*_tuning.shapes(inv)[0])


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """One split; smaller and larger blocks."""
    check(inv)
    return [Config(*shape) for shape in _tuning.shapes(inv)]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    (check_arguments if cfg.interpret else check)(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse of every row."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, jax.Array | None]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_pallas_tpu.flash_attention._problem import problem
    from ejkernel_pallas_tpu.flash_attention._scalars import scalars
    from ejkernel_pallas_tpu.flash_attention_decode._attend import attend, unpacked
    from ejkernel_pallas_tpu.flash_attention_decode._combine import combine
    from ejkernel_pallas_tpu.flash_attention_decode._visits import visits

    p = attrs.evolve(problem(inv, cfg.k_block, cfg.k_block), q_block=_tuning.rows(inv))
    plan = visits(inv, p, cfg.splits)
    launch = attend(inv, p, plan, cfg.splits)
    out, *rest = launch((plan.table, plan.fetched, scalars(inv)), interpret, _tuning.vmem_limit(inv))
    if cfg.splits > 1:
        out, *rest = combine(out, *(x[..., :1] for x in rest))
    else:
        out, rest = out[0], [lse[0, ..., :1] for lse in rest]
    out = unpacked(out, p).astype(inv["value"].dtype)
    return out, unpacked(rest[0], p)[..., 0].swapaxes(1, 2) if inv.needs("lse") else None


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return _tuning.vmem_bytes(inv, cfg.k_block)


def examples() -> Iterable[Example]:
    """Decoding, for estimates of time and memory."""
    from ejkernel_pallas_tpu.flash_attention_decode._examples import examples

    return examples()


def peers(example: Example) -> Iterable[Any]:
    """The general kernel."""
    from ejkernel_pallas_tpu.flash_attention_decode._peers import peers

    return peers(example)
