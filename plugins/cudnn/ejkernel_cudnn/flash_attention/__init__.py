"""``flash_attention`` by cuDNN, where it does exactly what is asked."""

from __future__ import annotations

import attrs
import jax

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.flash_attention.symbolic import refuse_symbolic

from . import library

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1


def rank(inv: Invocation) -> int:
    """First for one query, else after the Triton kernels: cuDNN alone divides the keys of one query among programs."""
    return 70 if inv["query"].shape[1] == 1 else 40


#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": rank}
#: The library's versions; one of the two is installed, or none where the system has cuDNN.
COMPILERS = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


@attrs.frozen
class Config:
    """Nothing to choose: cuDNN has heuristics of its own."""


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The only one; ``Unsupported`` where cuDNN would compute something else."""
    refuse_symbolic(inv)
    reason = library.refusal(inv)
    if reason is not None:
        raise Unsupported(reason)
    return Config()


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp of every row."""
    return library.forward(inv)
