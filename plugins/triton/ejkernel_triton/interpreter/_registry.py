"""A registry in which kernels for a GPU are kernels for the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs

from ejkernel_core import Invocation, Registry, hookimpl


def interpreted_registry(
    kernels: Mapping[str, Any],
    *,
    device_kind: str = "NVIDIA H200",
    compute_capability: tuple[int, int] = (9, 0),
    plugins: str | None = None,
) -> Registry:
    """The installed plugins, and these kernels by name as kernels for the CPU.

    Their hooks get invocations on this GPU, so that they choose and refuse as they do there. Calls run only inside
    ``interpreted()``.
    """
    registry = Registry(plugins)
    for name, module in kernels.items():
        registry.register(_interpreted_kernel(module, device_kind, compute_capability), name)
    return registry


def _interpreted_kernel(module: Any, device_kind: str, compute_capability: tuple[int, int]) -> Any:
    """The kernel, whose hooks get the invocation that they would get on the GPU."""

    def on_card(inv: Invocation) -> Invocation:
        return attrs.evolve(inv, platform="gpu", device_kind=device_kind, compute_capability=compute_capability)

    def hook(name: str) -> Callable[..., Any]:
        """The kernel's hook, which takes the arguments that it names."""
        function = getattr(module, name)
        parameters = inspect.signature(function).parameters
        return lambda **arguments: function(**{key: value for key, value in arguments.items() if key in parameters})

    @hookimpl
    def heuristic_cfg(inv: Invocation) -> Any:
        return hook("heuristic_cfg")(inv=on_card(inv))

    @hookimpl
    def config_space(inv: Invocation) -> Any:
        return hook("config_space")(inv=on_card(inv))

    @hookimpl
    def check_cfg(inv: Invocation, cfg: Any) -> None:
        hook("check_cfg")(inv=on_card(inv), cfg=cfg)

    @hookimpl
    def run_backend(inv: Invocation, cfg: Any) -> Any:
        return hook("run_backend")(inv=on_card(inv), cfg=cfg)

    hooks: dict[str, Any] = {
        function.__name__: function
        for function in (heuristic_cfg, config_space, check_cfg, run_backend)
        if hasattr(module, function.__name__)
    }
    hook_functions = [getattr(module, name) for name in hooks]
    attributes = {name: getattr(module, name) for name in ("Config", "COMPILERS") if hasattr(module, name)}
    # The highest rank of all, so that the kernel runs.
    return SimpleNamespace(**hooks, **attributes, PLATFORMS={"cpu": 60}, CODE=getattr(module, "CODE", hook_functions))
