"""Kernels that are one function of an invocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ._hooks import hookimpl
from ._invocation import Invocation

_PLATFORMS = ("cpu", "gpu", "tpu")


@attrs.frozen(eq=False)
class PlainKernel:
    """What a module with these attributes would be."""

    run_backend: Callable[..., Any]
    heuristic_cfg: Callable[..., None]
    #: Its rank on each platform.
    PLATFORMS: Mapping[str, int]
    #: The operations that it calls.
    PARTS: tuple[str, ...]
    VERSION: int | None
    #: What a kernel without a version is known by.
    CODE: tuple[Callable[..., Any], ...]


def plain_kernel(
    run: Callable[[Invocation], Any],
    rank: int | Mapping[str, int],
    *,
    check: Callable[[Invocation], object] | None = None,
    parts: tuple[str, ...] = (),
    version: int | None = None,
) -> Any:
    """A kernel without configurations: what an entry point names, or ``register`` takes.

    >>> double = plain_kernel(lambda inv: 2 * inv["x"], rank=0)
    >>> double.PLATFORMS["tpu"]
    0

    Args:
      run: The results for an invocation, as ``run_backend`` gives them.
      rank: The rank on each platform by its name, or one for ``"cpu"``, ``"gpu"`` and ``"tpu"``.
      check: Raises ``Unsupported`` for calls that it does not take; by default it takes all.
      parts: The operations that it calls, as in ``PARTS``.
      version: As ``VERSION``.
    """

    @hookimpl
    def run_backend(inv: Invocation, cfg: None) -> Any:
        return run(inv)

    @hookimpl
    def heuristic_cfg(inv: Invocation) -> None:
        if check is not None:
            check(inv)

    ranks = rank if isinstance(rank, Mapping) else dict.fromkeys(_PLATFORMS, rank)
    return PlainKernel(run_backend, heuristic_cfg, ranks, parts, version, (run, *((check,) if check else ())))
