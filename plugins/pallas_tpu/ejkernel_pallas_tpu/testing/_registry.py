"""A registry in which kernels that are written for a TPU are found on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ejkernel_core import Invocation, Registry, hookimpl


def interpreted_registry(
    kernels: Mapping[str, ModuleType],
    *,
    device_kind: str = "TPU v5e",
    races: bool = False,
    order: int = 0,
    plugins: str | None = None,
) -> Registry:
    """What is installed, and the given kernels, by name, as if the CPU were this TPU.

    Their hooks see an invocation on that TPU, so that they choose and refuse as they would there. They run in Pallas'
    interpreter; with ``races``, in that of a whole TPU: slower, with the memories and copies of one, with NaN in what
    nobody wrote, and with an error for two accesses of which nobody knows the order. Independent steps are then done in
    an order that ``order`` draws.
    """
    watched = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=order)
    interpret = watched if races else True
    registry = Registry(plugins)
    for name, module in kernels.items():
        registry.register(_as_if(module, device_kind, interpret), name)
    return registry


def _as_if(module: Any, device_kind: str, interpret: Any) -> Any:
    """The kernel with its hooks called with the invocation that it would get on the TPU."""

    def there(inv: Invocation) -> Invocation:
        return attrs.evolve(inv, platform="tpu", device_kind=device_kind, compute_capability=None)

    @hookimpl
    def heuristic_cfg(inv: Invocation) -> Any:
        return module.heuristic_cfg(there(inv))

    @hookimpl
    def config_space(inv: Invocation) -> Any:
        return module.config_space(there(inv))

    @hookimpl
    def run_backend(inv: Invocation, cfg: Any) -> Any:
        if interpret is True:
            return module.compute(there(inv), cfg, True)
        return _apart(lambda inv: module.compute(inv, cfg, interpret), there(inv))

    return SimpleNamespace(
        heuristic_cfg=heuristic_cfg,
        config_space=config_space,
        run_backend=run_backend,
        Config=module.Config,
        # The highest rank of all: who registers a kernel here wants to see it run.
        PLATFORMS={"cpu": 60},
        CODE=[module.heuristic_cfg, module.config_space, module.compute],
    )


def _apart(compute: Callable[[Invocation], Any], inv: Invocation) -> Any:
    """The computation, called back: the interpreter of a whole TPU acts in an order that the call's code has no word
    for. It gets a device of its own where there is one: the first waits for the result.
    """
    arrays = {name: value for name, value in inv.items() if isinstance(value, jax.Array)}

    def computed(given: Mapping[str, Any]) -> Any:
        return compute(inv.with_arrays(given))

    def called(given: Mapping[str, Any]) -> Any:
        with jax.default_device(jax.local_devices(backend="cpu")[-1]):
            found = jax.jit(computed)({name: np.asarray(value) for name, value in given.items()})
            return jax.tree.map(np.asarray, found)

    return jax.pure_callback(called, jax.eval_shape(computed, arrays), arrays)
