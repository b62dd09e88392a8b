"""A registry in which kernels that are written for a GPU are found on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs

from ejkernel_core import Invocation, Registry, hookimpl


def interpreted_registry(
    kernels: Mapping[str, ModuleType],
    *,
    device_kind: str = "NVIDIA H200",
    compute_capability: tuple[int, int] = (9, 0),
    plugins: str | None = None,
) -> Registry:
    """What is installed, and the given kernels, by name, as if the CPU were this GPU.

    Their hooks see an invocation on that GPU, so that they choose and refuse as they would there. Calls run inside
    ``interpreted()`` only.
    """
    registry = Registry(plugins)
    for name, module in kernels.items():
        registry.register(_as_if(module, device_kind, compute_capability), name)
    return registry


def _as_if(module: Any, device_kind: str, compute_capability: tuple[int, int]) -> Any:
    """The kernel with its hooks called with the invocation that it would get on the GPU."""

    def there(inv: Invocation) -> Invocation:
        return attrs.evolve(inv, platform="gpu", device_kind=device_kind, compute_capability=compute_capability)

    def hook(name: str) -> Callable[..., Any]:
        """The kernel's own; like all hooks, it takes those arguments that it names."""
        function = getattr(module, name)
        wanted = inspect.signature(function).parameters
        return lambda **given: function(**{key: value for key, value in given.items() if key in wanted})

    @hookimpl
    def heuristic_cfg(inv: Invocation) -> Any:
        return hook("heuristic_cfg")(inv=there(inv))

    @hookimpl
    def config_space(inv: Invocation) -> Any:
        return hook("config_space")(inv=there(inv))

    @hookimpl
    def run_backend(inv: Invocation, cfg: Any) -> Any:
        return hook("run_backend")(inv=there(inv), cfg=cfg)

    hooks: dict[str, Any] = {
        function.__name__: function
        for function in (heuristic_cfg, config_space, run_backend)
        if hasattr(module, function.__name__)
    }
    own = [getattr(module, name) for name in hooks]
    kept = {name: getattr(module, name) for name in ("Config", "COMPILERS") if hasattr(module, name)}
    # The highest rank of all: who registers a kernel here wants to see it run.
    return SimpleNamespace(**hooks, **kept, PLATFORMS={"cpu": 60}, CODE=getattr(module, "CODE", own))
