"""The kernels: each serves ``rms_norm`` and ``layer_norm``, and centers rows by the operation that it is called for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from ejkernel_core import Invocation, hookimpl
from ejkernel_triton.norms import BackwardConfig, Config, _launch, _tiling


def _kernel(
    kind: type,
    *,
    rank: Callable[[Invocation], int],
    check: Callable[[Invocation], None],
    first: Callable[[Invocation], Any],
    others: Callable[[Invocation], Iterable[Any]],
    run: Callable[[Invocation, Any], tuple[Any, ...]],
    version: int,
) -> Any:
    """What a module with these hooks would be. ``first`` is the configuration for a call without measurements."""

    @hookimpl
    def heuristic_cfg(inv: Invocation) -> Any:
        check(inv)
        return first(inv)

    @hookimpl
    def config_space(inv: Invocation) -> Iterable[Any]:
        return _tiling.unique(heuristic_cfg(inv), others(inv))

    @hookimpl
    def check_cfg(inv: Invocation, cfg: Any) -> None:
        _tiling.check_config(inv, cfg)

    @hookimpl
    def run_backend(inv: Invocation, cfg: Any) -> tuple[Any, ...]:
        return run(inv, cfg)

    return SimpleNamespace(
        heuristic_cfg=heuristic_cfg,
        config_space=config_space,
        check_cfg=check_cfg,
        run_backend=run_backend,
        Config=kind,
        PLATFORMS={"gpu": rank},
        OPAQUE=("gpu",),  # XLA sees a custom call, which it cannot partition
        COMPILERS=("triton", "jax-triton"),
        VERSION=version,
    )


forward = _kernel(
    Config,
    rank=_tiling.rank,
    check=_tiling.check,
    first=_tiling.forward,
    others=_tiling.forward_space,
    run=_launch.forward,
    version=1,
)
backward = _kernel(
    BackwardConfig,
    rank=_tiling.backward_rank,
    check=_tiling.check,
    first=_tiling.backward,
    others=_tiling.backward_space,
    run=_launch.gradients,
    version=1,
)
quantized = _kernel(
    Config,
    rank=_tiling.quantized_rank,
    check=_tiling.check_quantized,
    first=_tiling.forward,
    others=_tiling.forward_space,
    run=_launch.quantized,
    version=1,
)
