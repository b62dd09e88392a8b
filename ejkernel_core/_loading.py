"""Load what an entry point names, and check it against the hooks."""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pluggy

from ._discovery import KERNELS, POLICIES, Broken, PluginEntry, conflict, version_of
from ._display import brief
from ._errors import EjkernelError, PluginError, description, plugin_faults
from ._hooks import BUILT_IN_PREFIX, PROJECT, REQUIRED_HOOKS, KernelHooks, PolicyHooks, specifications
from ._kernel import LoadedKernel, why_mutable_type
from ._operation import Operation

#: By the name of a kernel: the type of its configurations, as last loaded in this process.
config_types: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def load(entries: tuple[PluginEntry, ...]) -> Any:
    """Import the operation, kernel or policy that the entry names; Broken where that fails."""
    entry = entries[0]
    if len(entries) > 1:
        return Broken(entry, f"{entry.name!r} is {conflict(entries)}")
    try:
        return check_plugin(entry, entry.load())
    except EjkernelError as fault:
        return Broken(entry, str(fault))
    except plugin_faults() as fault:  # an import may raise anything, and a broken plugin must not break other calls
        return Broken(entry, f"{entry.title} does not load: {description(fault)}")


def check_plugin(entry: PluginEntry, plugin: Any) -> Any:
    """Return the plugin, or the ``LoadedKernel`` made of it. Raise ``PluginError`` where it breaks the contract."""
    if entry.group == KERNELS:
        return load_kernel(entry, plugin)
    if entry.group == POLICIES:
        if entry.name.startswith(BUILT_IN_PREFIX):
            raise PluginError(f"policy {entry.title}: such names are the core's own")
        hook_manager(entry, plugin, PolicyHooks)
        return plugin
    if not isinstance(plugin, Operation):
        # Importing a module of a package sets an attribute of the package.
        is_replaced = isinstance(plugin, ModuleType) and ":" in entry.value
        hint = "; a module has the name of the operation, and took its place: rename the file" if is_replaced else ""
        raise PluginError(f"{entry.title} is of type {type(plugin).__name__}, not an Operation{hint}")
    return plugin


def load_kernel(entry: PluginEntry, plugin: Any) -> LoadedKernel:
    """The kernel of ``plugin``, which is a module or any object with the hooks as attributes."""
    op, _, backend = entry.name.rpartition(".")
    if not (op and backend):
        raise PluginError(
            f"{entry.title}: a kernel is named <operation>.<backend>, and a policy has select_config, measure or settle"
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
        _config_name(plugin, config_type),
        _software(entry, plugin),
        getattr(plugin, "OPAQUE", ()),
        getattr(plugin, "PARTS", ()),
        manager.hook,
    )


def _config_name(plugin: Any, config_type: type | None) -> str | None:
    """The name in the plugin's own module: the type may be defined in a private one."""
    if config_type is None:
        return None
    if isinstance(plugin, ModuleType):
        return f"{plugin.__name__}.Config"
    return f"{config_type.__module__}.{config_type.__qualname__}"


def _software(entry: PluginEntry, plugin: Any) -> dict[str, str]:
    """The versions of the kernel (by its name), of JAX and of the compilers it uses."""
    compilers = ("jax", "jaxlib", *getattr(plugin, "COMPILERS", ()))
    return {**{name: version_of(name) for name in compilers}, entry.name: _version(entry, plugin)}


def _version(entry: PluginEntry, plugin: Any) -> str:
    """The kernel's ``VERSION``; else that of its distribution, or of a kernel registered at run time, a code hash."""
    if (version := getattr(plugin, "VERSION", None)) is not None:
        return str(version)
    if not entry.is_local:
        return f"{entry.distribution} {entry.version}"
    from ._code import code_fingerprint  # imported here, because most kernels have a VERSION

    hooks = [hook for name in specifications(KernelHooks) if (hook := getattr(plugin, name, None)) is not None]
    return code_fingerprint(getattr(plugin, "CODE", hooks))


def hook_manager(entry: PluginEntry, plugin: Any, hooks: type) -> pluggy.PluginManager:
    """A plugin manager for these hooks and this plugin alone. ``PluginError`` lists all faults of the plugin."""
    specs = specifications(hooks)
    faults = [
        *_wrong_attributes(plugin),
        *_missing_hooks(plugin, specs),
        *_misspelt_hooks(plugin, specs),
        *_wrong_functions(plugin, specs),
    ]
    if faults:
        raise PluginError(f"{entry.title}: " + "; ".join(faults))
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hooks)
    try:
        manager.register(plugin, entry.name)
    except pluggy.PluginValidationError as fault:
        raise PluginError(f"{entry.title}: {fault}") from fault
    return manager


def _wrong_attributes(plugin: Any) -> Iterator[str]:
    platforms, config = getattr(plugin, "PLATFORMS", None), getattr(plugin, "Config", None)
    ranks = platforms if isinstance(platforms, Mapping) else {None: None}
    are_ranks = all(isinstance(k, str) and (isinstance(r, int) or callable(r)) for k, r in ranks.items())
    if platforms is not None and not are_ranks:
        takes = "{platform: rank} with whole numbers, or functions that give them"
        yield f"PLATFORMS takes {takes}; got {brief(platforms)}"
    for name in ("cuda", "rocm"):
        if name in ranks:
            yield f"PLATFORMS has the platforms of jax.default_backend(), where {name} is 'gpu'; got {brief(platforms)}"
    for name, meaning in (("COMPILERS", "distributions"), ("OPAQUE", "platforms"), ("PARTS", "operations")):
        names = getattr(plugin, name, ())
        if not (isinstance(names, tuple) and all(isinstance(one, str) for one in names)):
            yield f"{name} takes a tuple of the names of {meaning}; got {brief(names)}"
        elif name == "OPAQUE" and isinstance(platforms, Mapping) and not {*names} <= {*platforms}:
            yield f"OPAQUE names platforms that PLATFORMS has; got {brief(names)}"
    if (version := getattr(plugin, "VERSION", None)) is not None and type(version) is not int:
        yield f"VERSION takes a whole number; got {brief(version)}"
    if not isinstance(getattr(plugin, "RANK", 0), int):
        yield f"RANK takes a whole number; got {brief(plugin.RANK)}"
    if not isinstance(getattr(plugin, "IS_SAME_EVERYWHERE", False), bool):
        yield f"IS_SAME_EVERYWHERE takes True or False; got {brief(plugin.IS_SAME_EVERYWHERE)}"
    if config is not None and not isinstance(config, type):
        yield f"Config is the type of the configurations; got {brief(config)}"
    elif config is not None and (reason := why_mutable_type(config)):
        yield f"Config takes values that cannot be changed; {reason}"


def _missing_hooks(plugin: Any, specs: Mapping[str, Any]) -> Iterator[str]:
    # A plugin may set a name to None after an import that failed.
    present = {name for name in specs if getattr(plugin, name, None) is not None}
    optional = {"select_config"} if present & {"measure", "settle"} else set()
    # A kernel that neither has configurations nor refuses anything has nothing to say before it runs.
    if getattr(plugin, "Config", None) is None and not hasattr(plugin, "heuristic_cfg"):
        optional.add("heuristic_cfg")
    yield from (f"the hook {name} is missing" for name in specs if name in REQUIRED_HOOKS - present - optional)


def _misspelt_hooks(plugin: Any, specs: Mapping[str, Any]) -> Iterator[str]:
    names = vars(plugin) if isinstance(plugin, ModuleType) else dir(plugin)
    for name in list(names):
        if name not in specs and _is_marked(getattr(plugin, name, None)):
            matches = difflib.get_close_matches(name, specs, 1)
            yield f"{name} is marked @hookimpl but is not a hook" + (f"; did you mean {matches[0]}?" if matches else "")


def _wrong_functions(plugin: Any, specs: Mapping[str, Any]) -> Iterator[str]:
    for name, spec in specs.items():
        function = getattr(plugin, name, None)
        if function is None:
            continue
        # pluggy would ignore anything else, or call it with wrong arguments.
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            kind = f"{type(function).__module__}.{type(function).__qualname__}"
            yield f"{name} is a {kind}: a hook is a plain function; jit or bind what it calls instead"
            continue
        options = getattr(function, f"{PROJECT}_impl", None)
        if not isinstance(options, dict):
            yield f"{name} is not marked @hookimpl"
        elif options["specname"] or options["wrapper"] or options["hookwrapper"]:
            # A hook with another name is never called, and a wrapper does not return what a hook returns.
            yield f"{name} is marked with specname or wrapper: a hook is found by its own name, and answers itself"
        yield from _wrong_parameters(name, function, spec)


def _wrong_parameters(name: str, function: Callable[..., Any], spec: Callable[..., Any]) -> Iterator[str]:
    parameters = list(inspect.signature(spec).parameters)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in parameters:
            yield f"{name} takes no argument {parameter.name!r}: its arguments are ({', '.join(parameters)})"
        elif parameter.default is not parameter.empty:  # pluggy would never pass it
            yield f"{name} has a default for {parameter.name!r}: hook arguments have none"


def _is_marked(function: Any) -> bool:
    return isinstance(getattr(function, f"{PROJECT}_impl", None), dict)
