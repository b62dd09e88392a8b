"""A kernel plugin, loaded and checked against the hooks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import attrs
import pluggy

from ._discovery import Entry, version_of
from ._errors import PluginError, Unsupported
from ._hookspecs import OPTIONAL_HOOKS, PROJECT, KernelHooks, specifications
from ._invocation import Invocation
from ._keys import code_fingerprint, short_hash

#: The rank of a kernel that does not say: it was installed to be used, so it goes before the general ones.
DEFAULT_RANK = 50


@attrs.frozen(eq=False)
class LoadedKernel:
    """One (operation, backend) pair. It has a plugin manager of its own, so no other plugin can answer for it."""

    op: str
    backend: str
    provider: str
    #: Platform to rank: where it runs, and how strongly it is preferred there. None: everywhere, DEFAULT_RANK.
    platforms: Mapping[str, int] | None
    config_type: type | None
    #: The versions of its distribution and of the compilers it names.
    software: Mapping[str, str] = attrs.field(repr=False)
    _hooks: pluggy.HookRelay = attrs.field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.op}.{self.backend}"

    def rank(self, platform: str) -> int | None:
        """How strongly it is preferred on this platform; None where it does not run."""
        return DEFAULT_RANK if self.platforms is None else self.platforms.get(platform)

    def heuristic_cfg(self, inv: Invocation) -> Any:
        return self._hooks.heuristic_cfg(inv=inv)

    def config_space(self, inv: Invocation) -> Iterable[Any]:
        space = self._hooks.config_space(inv=inv)
        return [self.heuristic_cfg(inv)] if space is None else space

    def offers(self, inv: Invocation, cfg: Any) -> bool:
        """Whether its ``config_space`` has it here and now; without one there is no telling, and it may."""
        try:
            space = self._hooks.config_space(inv=inv)
        except Unsupported:
            return False
        return space is None or cfg in list(space)

    def run_backend(self, inv: Invocation, cfg: Any) -> tuple[Any, ...]:
        results = self._hooks.run_backend(inv=inv, cfg=cfg)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def load_kernel(entry: Entry, plugin: Any) -> LoadedKernel:
    """The kernel that ``plugin``, a module or any object with the hooks as attributes, makes."""
    op, _, backend = entry.name.rpartition(".")
    if not op:
        raise PluginError(f"kernel {entry.name!r} of {entry.provider}: a kernel is named <operation>.<backend>")
    manager = hook_manager(entry, plugin, KernelHooks)
    return LoadedKernel(
        op,
        backend,
        entry.provider,
        getattr(plugin, "PLATFORMS", None),
        getattr(plugin, "Config", None),
        _software(entry, plugin),
        manager.hook,
    )


def _software(entry: Entry, plugin: Any) -> dict[str, str]:
    """What a distribution's version says about its kernels, the code itself says about one registered at run time."""
    if entry.is_local:
        hooks = [getattr(plugin, name) for name in specifications(KernelHooks) if hasattr(plugin, name)]
        own = {entry.name: short_hash([code_fingerprint(function) for function in getattr(plugin, "CODE", hooks)])}
    else:
        own = {entry.distribution: entry.version}
    return {**own, **{name: version_of(name) for name in getattr(plugin, "COMPILERS", ())}}


def hook_manager(entry: Entry, plugin: Any, hooks: type) -> pluggy.PluginManager:
    """A manager with these hooks and this plugin alone. Every fault of the plugin is told at once, by name."""
    specs = specifications(hooks)
    faults = [*_wrong_names(plugin), *_missing(plugin, specs), *_misspelt(plugin, specs), *_malformed(plugin, specs)]
    if faults:
        raise PluginError(
            f"{entry.name!r} of {entry.provider} ({entry.value or type(plugin).__name__}): " + "; ".join(faults)
        )
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hooks)
    try:
        manager.register(plugin, entry.name)
    except pluggy.PluginValidationError as fault:
        raise PluginError(f"{entry.name!r} of {entry.provider}: {fault}") from fault
    return manager


def _wrong_names(plugin: Any) -> Iterator[str]:
    platforms, config = getattr(plugin, "PLATFORMS", None), getattr(plugin, "Config", None)
    ranks = platforms.values() if isinstance(platforms, Mapping) else ()
    if platforms is not None and not (isinstance(platforms, Mapping) and all(isinstance(r, int) for r in ranks)):
        yield f"PLATFORMS takes {{platform: rank}} with whole numbers; got {platforms!r}"
    compilers = getattr(plugin, "COMPILERS", ())
    if not (isinstance(compilers, tuple) and all(isinstance(name, str) for name in compilers)):
        yield f"COMPILERS takes a tuple of the names of distributions; got {compilers!r}"
    if not isinstance(getattr(plugin, "RANK", 0), int):
        yield f"RANK takes a whole number; got {plugin.RANK!r}"
    if config is not None and not isinstance(config, type):
        yield f"Config is the type of the configurations; got {config!r}"


def _missing(plugin: Any, specs: Mapping[str, Any]) -> Iterator[str]:
    for name in specs:
        if not hasattr(plugin, name) and name not in OPTIONAL_HOOKS:
            yield f"the hook {name} is missing"


def _misspelt(plugin: Any, specs: Mapping[str, Any]) -> Iterator[str]:
    names = vars(plugin) if isinstance(plugin, ModuleType) else dir(plugin)
    for name in list(names):
        if name not in specs and _is_marked(getattr(plugin, name, None)):
            near = difflib.get_close_matches(name, specs, 1)
            yield f"{name} is marked @hookimpl but is no hook" + (f"; did you mean {near[0]}?" if near else "")


def _malformed(plugin: Any, specs: Mapping[str, Any]) -> Iterator[str]:
    for name, spec in specs.items():
        function = getattr(plugin, name, None)
        if function is None:
            continue
        if not (
            inspect.isfunction(function) or inspect.ismethod(function)
        ):  # pluggy would pass it over, or call it wrong
            kind = f"{type(function).__module__}.{type(function).__qualname__}"
            yield f"{name} is a {kind}: a hook is a plain function; jit or bind what it calls instead"
            continue
        options = getattr(function, f"{PROJECT}_impl", None)
        if not isinstance(options, dict):
            yield f"{name} is not marked @hookimpl"
        elif options["specname"] or options["wrapper"] or options["hookwrapper"]:
            # Under another name it would never be called; a wrapper's answer is not a hook's.
            yield f"{name} is marked with specname or wrapper: a hook is found by its own name, and answers itself"
        yield from _wrong_parameters(name, function, spec)


def _wrong_parameters(name: str, function: Callable[..., Any], spec: Callable[..., Any]) -> Iterator[str]:
    takes = list(inspect.signature(spec).parameters)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in takes:
            yield f"{name} takes no argument {parameter.name!r}: its arguments are ({', '.join(takes)})"
        elif parameter.default is not parameter.empty:  # pluggy would never pass it
            yield f"{name} has a default for {parameter.name!r}: hook arguments have none"


def _is_marked(function: Any) -> bool:
    return isinstance(getattr(function, f"{PROJECT}_impl", None), dict)
