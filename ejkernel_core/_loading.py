"""From what an entry point names to a plugin, checked against the hooks."""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pluggy

from ._discovery import KERNELS, POLICIES, Broken, Entry, duplicates, version_of
from ._errors import PASSING, EjkernelError, PluginError, described
from ._hookspecs import BUILT_IN_PREFIX, PROJECT, REQUIRED_HOOKS, KernelHooks, PolicyHooks, specifications
from ._kernel import LoadedKernel, changeable_type
from ._keys import code_fingerprint, short_hash
from ._operation import Operation

#: By the names of kernels, the types of their configurations, as they were loaded last in this process.
config_types: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def load(entries: tuple[Entry, ...]) -> Any:
    """The operation, kernel or policy that the entry names, or Broken."""
    entry = entries[0]
    if len(entries) > 1:
        return Broken(entry, f"{entry.name!r} is {duplicates(entries)}")
    try:
        return checked(entry, entry.load())
    except EjkernelError as fault:
        return Broken(entry, str(fault))
    except PASSING:
        raise
    except BaseException as fault:  # whatever its import raises, it is the plugin that is broken
        return Broken(entry, f"{entry.title} does not load: {described(fault)}")


def checked(entry: Entry, plugin: Any) -> Any:
    """What the registry keeps of a plugin; ``PluginError`` where it does not keep the contract."""
    if entry.group == KERNELS:
        return load_kernel(entry, plugin)
    if entry.group == POLICIES:
        if entry.name.startswith(BUILT_IN_PREFIX):
            raise PluginError(f"policy {entry.title}: such names are the core's own")
        hook_manager(entry, plugin, PolicyHooks)
        return plugin
    if not isinstance(plugin, Operation):
        raise PluginError(f"{entry.title} is a {type(plugin).__name__}, no Operation")
    return plugin


def load_kernel(entry: Entry, plugin: Any) -> LoadedKernel:
    """The kernel that ``plugin``, a module or any object with the hooks as attributes, makes."""
    op, _, backend = entry.name.rpartition(".")
    if not (op and backend):
        raise PluginError(
            f"{entry.title}: a kernel is named <operation>.<backend>, and a policy has select_config or measure"
        )
    manager = hook_manager(entry, plugin, KernelHooks)
    config_type = getattr(plugin, "Config", None)
    if config_type is not None:
        config_types[entry.name] = config_type
    return LoadedKernel(
        op,
        backend,
        entry.provider,
        getattr(plugin, "PLATFORMS", None),
        config_type,
        _software(entry, plugin),
        manager.hook,
    )


def _software(entry: Entry, plugin: Any) -> dict[str, str]:
    """The versions of the kernel, by its name, and of all that its results come through."""
    compilers = ("jax", "jaxlib", *getattr(plugin, "COMPILERS", ()))
    return {**{name: version_of(name) for name in compilers}, entry.name: _version(entry, plugin)}


def _version(entry: Entry, plugin: Any) -> str:
    """As the kernel says. Else its distribution says it; of one registered at run time, the code itself."""
    if (version := getattr(plugin, "VERSION", None)) is not None:
        return str(version)
    if not entry.is_local:
        return f"{entry.distribution} {entry.version}"
    hooks = [hook for name in specifications(KernelHooks) if (hook := getattr(plugin, name, None)) is not None]
    return short_hash([code_fingerprint(function) for function in getattr(plugin, "CODE", hooks)])


def hook_manager(entry: Entry, plugin: Any, hooks: type) -> pluggy.PluginManager:
    """A manager with these hooks and this plugin alone. Every fault of the plugin is told at once, by name."""
    specs = specifications(hooks)
    faults = [*_wrong_names(plugin), *_missing(plugin, specs), *_misspelt(plugin, specs), *_malformed(plugin, specs)]
    if faults:
        raise PluginError(f"{entry.title}: " + "; ".join(faults))
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hooks)
    try:
        manager.register(plugin, entry.name)
    except pluggy.PluginValidationError as fault:
        raise PluginError(f"{entry.title}: {fault}") from fault
    return manager


def _wrong_names(plugin: Any) -> Iterator[str]:
    platforms, config = getattr(plugin, "PLATFORMS", None), getattr(plugin, "Config", None)
    ranks = platforms if isinstance(platforms, Mapping) else {None: None}
    if platforms is not None and not all(isinstance(k, str) and isinstance(r, int) for k, r in ranks.items()):
        yield f"PLATFORMS takes {{platform: rank}} with whole numbers; got {platforms!r}"
    compilers = getattr(plugin, "COMPILERS", ())
    if not (isinstance(compilers, tuple) and all(isinstance(name, str) for name in compilers)):
        yield f"COMPILERS takes a tuple of the names of distributions; got {compilers!r}"
    if type(version := getattr(plugin, "VERSION", 0)) is not int:
        yield f"VERSION takes a whole number; got {version!r}"
    if not isinstance(getattr(plugin, "RANK", 0), int):
        yield f"RANK takes a whole number; got {plugin.RANK!r}"
    if config is not None and not isinstance(config, type):
        yield f"Config is the type of the configurations; got {config!r}"
    elif config is not None and (reason := changeable_type(config)):
        yield f"Config takes values that cannot be changed; {reason}"


def _missing(plugin: Any, specs: Mapping[str, Any]) -> Iterator[str]:
    # None is what a name is set to after an import that failed.
    present = {name for name in specs if getattr(plugin, name, None) is not None}
    if "measure" not in present:  # what measures has nothing to look up
        yield from (f"the hook {name} is missing" for name in specs if name in REQUIRED_HOOKS - present)


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
