"""A registry in which kernels for TPUs run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ejkernel_core import Invocation, Registry, hookimpl


def interpreted_registry(
    kernels: Mapping[str, Any],
    *,
    device_kind: str = "TPU v5e",
    races: bool = False,
    order: int = 0,
    plugins: str | None = None,
) -> Registry:
    """The installed plugins and these kernels, by name, on a CPU that stands for this TPU.

    Their hooks get an invocation on that TPU, so that they choose and refuse as they would there. They run in Pallas'
    interpreter, or with ``races`` in the interpreter of a whole TPU. It is slower, and has the memories and copies of a
    TPU, NaN in memory that was not written, and an error for two accesses whose order is not determined. Independent
    steps are then run in a random order, drawn by ``order``.
    """
    whole_tpu = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=order)
    interpret = whole_tpu if races else True
    registry = Registry(plugins)
    for name, module in kernels.items():
        registry.register(_interpreted_kernel(module, device_kind, interpret), name)
    return registry


def _interpreted_kernel(module: Any, device_kind: str, interpret: Any) -> Any:
    """The kernel, whose hooks get the invocation that they would get on the TPU."""

    def on_tpu(inv: Invocation) -> Invocation:
        return attrs.evolve(inv, platform="tpu", device_kind=device_kind, compute_capability=None)

    @hookimpl
    def heuristic_cfg(inv: Invocation) -> Any:
        return module.heuristic_cfg(on_tpu(inv))

    @hookimpl
    def run_backend(inv: Invocation, cfg: Any) -> Any:
        if interpret is True:
            return module.compute(on_tpu(inv), cfg, True)
        return _by_callback(lambda inv: module.compute(inv, cfg, interpret), on_tpu(inv))

    kernel = SimpleNamespace(
        heuristic_cfg=heuristic_cfg,
        run_backend=run_backend,
        # The highest rank of all, because a kernel is registered here in order to run.
        PLATFORMS={"cpu": 60},
        CODE=[module.heuristic_cfg, module.compute],
    )
    if hasattr(module, "Config"):

        @hookimpl
        def config_space(inv: Invocation) -> Any:
            return module.config_space(on_tpu(inv))

        @hookimpl
        def check_cfg(inv: Invocation, cfg: Any) -> None:
            module.check_cfg(on_tpu(inv), cfg)

        kernel.Config, kernel.config_space, kernel.check_cfg = module.Config, config_space, check_cfg
        kernel.CODE.append(module.config_space)
    return kernel


def _by_callback(compute: Callable[[Invocation], Any], inv: Invocation) -> Any:
    """The computation in a callback: the interpreter of a whole TPU has side effects whose order the code of the call
    cannot express. It runs on the last device, because the first may be waiting for the result.
    """
    arrays = {name: value for name, value in inv.items() if isinstance(value, jax.Array)}

    def run(arrays: Mapping[str, Any]) -> Any:
        return compute(inv.with_arrays(arrays))

    def callback(arrays: Mapping[str, Any]) -> Any:
        with jax.default_device(jax.local_devices(backend="cpu")[-1]):
            results = jax.jit(run)({name: np.asarray(value) for name, value in arrays.items()})
            return jax.tree.map(np.asarray, results)

    return jax.pure_callback(callback, jax.eval_shape(run, arrays), arrays)
