"""The kernels: each serves ``rms_norm`` and ``layer_norm``, and centers rows by the operation that it is called for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_pallas_tpu.norms import Config, _launch, _tuning


def _kernel(
    compute: Callable[[Invocation, Config, Any], tuple[Any, ...]],
    *,
    rank: int | Callable[[Invocation], int],
    version: int,
    **further: Callable[..., Any],
) -> Any:
    """What a module with these hooks would be, and with ``further`` functions for the checks of kernels for TPUs."""

    @hookimpl
    def heuristic_cfg(inv: Invocation) -> Config:
        return config_space(inv)[0]

    @hookimpl
    def config_space(inv: Invocation) -> list[Config]:
        _tuning.check(inv)
        return [Config(rows) for rows in _tuning.block_rows(inv)]

    @hookimpl
    def check_cfg(inv: Invocation, cfg: Config) -> None:
        _tuning.check_config(inv, cfg)

    @hookimpl
    def run_backend(inv: Invocation, cfg: Config) -> tuple[Any, ...]:
        return compute(inv, cfg, cfg.interpret)

    return SimpleNamespace(
        heuristic_cfg=heuristic_cfg,
        config_space=config_space,
        check_cfg=check_cfg,
        run_backend=run_backend,
        Config=Config,
        PLATFORMS={"tpu": rank},
        OPAQUE=("tpu",),  # XLA sees a custom call, which it cannot partition
        COMPILERS=("jaxlib",),
        VERSION=version,
        compute=compute,
        vmem=lambda inv, cfg: _tuning.vmem(inv, cfg.rows),
        **further,
    )


def _peers(example: Example) -> Iterable[Any]:
    """Plain JAX."""
    from ejkernel_pallas_tpu.norms._peers import peers

    return peers(example)


def _rank_of_quantized(inv: Invocation) -> int:
    """Before plain JAX with a scale for each 128 entries, for which XLA copies the array several times."""
    return 15 if inv["quantize"] == "fp8_block128" else 5


#: The first two are behind plain JAX, which XLA fuses into the matrix products around it: see docs/pallas-tpu.md.
forward = _kernel(_launch.forward, rank=5, version=1, peers=_peers)
backward = _kernel(_launch.gradients, rank=5, version=1)
quantized = _kernel(_launch.quantized, rank=_rank_of_quantized, version=1, peers=_peers)
