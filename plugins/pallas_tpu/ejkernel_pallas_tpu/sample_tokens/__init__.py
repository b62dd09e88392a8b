"""``sample_tokens`` on TPUs, in Pallas: each row of logits is read from main memory once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_pallas_tpu.sample_tokens import _tuning
from ejkernel_pallas_tpu.sample_tokens._tuning import Config

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Behind plain JAX, until the compiler for TPUs has estimated it or a TPU measured it: see docs/pallas-tpu.md.
PLATFORMS = {"tpu": 5}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The rows for this generation of TPUs."""
    return next(iter(config_space(inv)))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The rows that fit into vector memory, and other ways to search."""
    _tuning.check(inv)
    return _tuning.configs(inv)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernel does not support; the interpreter runs on any device."""
    _tuning.check_config(inv, cfg)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The tokens, and their log-probabilities where they are needed."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, jax.Array | None]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_pallas_tpu.sample_tokens._draw import draw

    needs_logprobs = inv.needs("logprobs")
    if inv["logits"].shape[0] == 0:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32) if needs_logprobs else None
    launch = draw(inv, _tuning.blocks_of(inv, cfg), cfg, needs_logprobs)
    token, *logprobs = [output[:, 0] for output in launch((), interpret, _tuning.vmem_limit(inv))]
    return token, logprobs[0] if needs_logprobs else None


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return _tuning.vmem_bytes(inv, cfg)


def peers(example: Example) -> Iterable[Any]:
    """Plain JAX."""
    from ejkernel_pallas_tpu.sample_tokens._peers import peers

    return peers(example)


def examples() -> Iterable[Example]:
    """Further calls, which the compiler for TPUs compiles."""
    from ejkernel_pallas_tpu.sample_tokens._examples import examples

    return examples()
