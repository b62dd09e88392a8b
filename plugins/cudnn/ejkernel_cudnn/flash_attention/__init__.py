"""``flash_attention`` by cuDNN, for calls that it computes exactly as the operation defines them."""

from __future__ import annotations

import attrs
import jax

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.symbolic import refuse_symbolic

from . import library

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1


def rank(inv: Invocation) -> int:
    """First for a single query, else after Triton: only cuDNN splits the keys of a query over programs."""
    return 70 if inv["query"].shape[1] == 1 else 40


#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": rank}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
#: The library's versions; one of the two is installed, or none where the system has cuDNN.
COMPILERS = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


@attrs.frozen
class Config:
    """Empty: cuDNN has heuristics of its own."""


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The only configuration; ``Unsupported`` where cuDNN would compute something else."""
    refuse_symbolic(inv)
    reason = library.refusal(inv)
    if reason is not None:
        raise Unsupported(reason)
    return Config()


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse of every row."""
    return library.forward(inv)
