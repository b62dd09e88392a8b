"""What ``ejkernel doctor`` looks at. Every examination yields findings, and none of them raises.

The first ones need neither JAX nor the core. Where these cannot be imported, one finding says so.
"""

from __future__ import annotations

import importlib
import importlib.resources
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from ._environment import core_environment
from ._metadata import (
    COMMANDS,
    CORE,
    EXTRAS,
    POLICIES,
    absent_distributions,
    check_selection,
    distribution,
    entry_points,
    extras,
    is_selected,
    name_of,
    provider,
    selection,
    unreadable_distributions,
    version,
)
from ._output import Failure
from ._permissions import writable_by_others

if TYPE_CHECKING:
    from ejkernel_core import Registry

OK, NOTE, BROKEN = "ok", "note", "broken"
#: What is not ours and matters to speed and faults.
COMPILERS = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "libtpu",
    "triton",
    "jax-triton",
)
FUSION_FLAG: str = core_environment().FUSION_FLAG


@attrs.frozen
class Finding:
    """One thing that was looked at, and what to do about it."""

    subject: str
    #: "ok"; "note", which may be as it is; "broken".
    status: str
    text: str
    advice: str = ""


Findings = Iterator[Finding]


# -- without JAX -------------------------------------------------------------------------------------------------------


def software() -> Findings:
    """The versions of Python, JAX and the compilers."""
    yield Finding("python", OK, platform.python_version())
    for name in COMPILERS:
        if (installed := version(name)) is not None:
            yield Finding(name, OK, installed)


def distributions() -> Findings:
    """The distributions of the project: one version for all, and nothing missing that they require."""
    for folder, fault in unreadable_distributions().items():
        yield Finding(folder, BROKEN, f"cannot be read: {fault}", f"rm -r {folder}, and install the package again")
    expected = version(CORE)
    for name in _family():
        installed = version(name)
        missing = _missing_requirements(name)
        if installed != expected:
            text = f"{installed}, and {CORE} has {expected}; all are released together"
            yield Finding(name, BROKEN, text, f"pip install -U {CORE} {name}")
        elif missing:
            text = f"{installed}, and {', '.join(missing)}, which it requires, is not installed"
            yield Finding(name, BROKEN, text, f"pip install {' '.join(missing)}")
        else:
            yield Finding(name, OK, str(installed))


def _family() -> list[str]:
    """The installed distributions of the project."""
    names = {name_of(dist) for dist in metadata.distributions()}
    return sorted(names & {CORE, *(name for extra in extras().values() for name in extra)})


def _missing_requirements(name: str) -> list[str]:
    """The distributions that one requires, without those for an extra or another platform, and that are absent."""
    lines = [line for line in metadata.requires(name) or () if ";" not in line]
    names = [match[0] for line in lines if (match := re.match(r"[\w.-]+", line))]
    return [name for name in names if version(name) is None]


def environment() -> Findings:
    """The variables of the project that are set, and those that look like one and are read by nothing."""
    core = core_environment()
    fault = _selection_fault()
    for variable in core.VARIABLES:
        if variable.name in os.environ and not (fault and variable.name == "EJKERNEL_PLUGINS"):
            yield Finding(variable.name, OK, repr(os.environ[variable.name]))
    if fault:
        yield Finding("EJKERNEL_PLUGINS", BROKEN, fault, "unset EJKERNEL_PLUGINS; ejkernel list")
    for name, similar in core.unread_variables().items():
        if similar:
            yield Finding(name, BROKEN, "nothing reads it", f"unset {name}; the name is {similar}")
        else:
            yield Finding(name, NOTE, "nothing of this project reads it")


def _selection_fault() -> str:
    try:
        check_selection(selection())
    except Failure as fault:
        return fault.message
    return ""


def cache() -> Findings:
    """Whether the folder of measured configurations can be read and written."""
    if version("ejkernel-cache") is None:
        yield Finding("cache", NOTE, "measured configurations are not kept", "pip install ejkernel-cache")
        return
    if not _selection_fault() and not is_selected("ejkernel-cache", selection()):
        yield Finding("cache", NOTE, "EJKERNEL_PLUGINS leaves ejkernel-cache out")
        return
    yield _folder_finding(cache_folder())


def cache_folder() -> Path:
    """The folder of ejkernel-cache, which is not imported."""
    import platformdirs

    folder = os.environ.get("EJKERNEL_CACHE_DIR")
    return (
        Path(folder or Path(platformdirs.user_cache_dir("ejkernel", appauthor=False), "configs"))
        .expanduser()
        .absolute()
    )


def _folder_finding(folder: Path) -> Finding:
    advice = "set EJKERNEL_CACHE_DIR to a folder that can be written to"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        os.listdir(existing)
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"ejkernel")
            file.flush()
    except OSError as fault:
        return Finding("cache", BROKEN, f"{folder} cannot be used: {existing}: {fault.strerror or fault}", advice)
    if existing != folder:
        return Finding("cache", OK, f"{folder}, which is made when there is something to store")
    path = next(writable_by_others(folder), None)
    if path is not None:
        status = NOTE if os.environ.get("EJKERNEL_CACHE_STRICT", "") in ("", "0") else BROKEN
        text = f"{path} can be written to by other users, who choose configurations then"
        return Finding(
            "cache", status, text, f"chmod -R go-w {folder}, or set EJKERNEL_CACHE_DIR to a folder of your own"
        )
    damaged = len(list(folder.glob(".damaged/*")))
    if damaged:
        files = "1 damaged file that was" if damaged == 1 else f"{damaged} damaged files that were"
        return Finding("cache", NOTE, f"{folder}, with {files} moved to .damaged")
    return Finding("cache", OK, str(folder))


# -- with JAX ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Machine:
    """JAX's devices, and the registry of the core; None where they are not to be had."""

    devices: tuple[Any, ...] = ()
    registry: Registry | None = None

    @property
    def platform(self) -> str | None:
        return self.devices[0].platform if self.devices else None


def start() -> tuple[Machine, list[Finding]]:
    """Import JAX and the core, and have JAX look for devices."""
    try:
        import jax

        import ejkernel_core
    except Exception as fault:  # a library that does not load may raise anything
        text = f"JAX or the core cannot be imported: {_description(fault)}"
        return Machine(), [Finding("jax", BROKEN, text, f"pip install -U jax jaxlib {CORE}")]
    registry = ejkernel_core.registry
    try:
        devices = tuple(jax.local_devices())
        return Machine(devices, registry), list(_device_findings(devices))
    except Exception as fault:
        platforms = os.environ.get("JAX_PLATFORMS")
        other = 'pip install -U "jax[cuda13]", or "jax[tpu]"'
        advice = f"unset JAX_PLATFORMS, which is {platforms!r}" if platforms else other
        return Machine((), registry), [Finding("devices", BROKEN, f"JAX has none: {_description(fault)}", advice)]


def _description(fault: BaseException) -> str:
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def _device_findings(devices: tuple[Any, ...]) -> Findings:
    """The devices by name, with the versions that their client knows."""
    counts: dict[tuple[str, str], int] = {}
    for device in devices:
        key = device.platform, _device_name(device)
        counts[key] = counts.get(key, 0) + 1
    for (platform_name, name), count in counts.items():
        device = next(d for d in devices if d.platform == platform_name)
        versions = " ".join(str(device.client.platform_version).split())
        capability = getattr(device, "compute_capability", None)
        text = f"{count} x {name}" + (f", compute capability {capability}" if capability else "")
        yield Finding(platform_name, OK, text + (f" ({versions})" if versions != platform_name else ""))
    if devices[0].platform == "cpu" and _has_nvidia_device():
        text = "there is an NVIDIA GPU, and JAX does not use it"
        yield Finding("gpu", NOTE, text, 'pip install -U "jax[cuda13]", or "jax[cuda12]" for an older driver')


def _device_name(device: Any) -> str:
    from ejkernel_core.extend import device_name

    return device_name(device)


def _has_nvidia_device() -> bool:
    return Path("/dev/nvidiactl").exists()


def flags(machine: Machine) -> Findings:
    """Whether XLA_FLAGS has what jaxlib 0.10 needs on a CPU."""
    if machine.platform == "cpu" and lacks_fusion_flag(os.environ):
        text = f"jaxlib {version('jaxlib')} can give wrong sums in float32 on a CPU without {FUSION_FLAG}"
        yield Finding("XLA_FLAGS", NOTE, text, f'export XLA_FLAGS="{FUSION_FLAG} $XLA_FLAGS"')


def lacks_fusion_flag(environment: Mapping[str, str]) -> bool:
    """Whether the installed jaxlib needs the flag, and XLA_FLAGS does not have it."""
    return bool(core_environment().lacks_fusion_flag(environment, version("jaxlib")))


def plugins(machine: Machine) -> Findings:
    """The plugins that cannot be used."""
    registry = machine.registry
    if registry is None or registry.selection_fault:  # both have findings of their own
        return
    claims: dict[tuple[str, str], list[str]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for entry, fault in registry.inspect():
        key = entry.group, entry.name
        claims.setdefault(key, []).append(entry.distribution)
        if fault:
            reasons[key] = " ".join(fault.reason.split())
    for key, reason in reasons.items():
        owners = claims[key]
        advice = f"pip uninstall {owners[0]}, or export EJKERNEL_PLUGINS=-{owners[0]}"
        yield Finding(key[1], BROKEN, reason, _uninstall_one(owners) if len(owners) > 1 else advice)
    yield Finding("plugins", OK, f"{len(claims) - len(reasons)} of {len(claims)} can be used")


def _uninstall_one(owners: list[str]) -> str:
    """The advice for a name that several distributions claim, of which any one may stay."""
    return f"uninstall {' or '.join(dict.fromkeys(owners))}"


def commands() -> Findings:
    """The subcommands that cannot be used."""
    points: dict[str, list[metadata.EntryPoint]] = {}
    for point in entry_points(COMMANDS):
        points.setdefault(point.name, []).append(point)
    for name, claims in points.items():
        if len(claims) > 1:
            text = f"claimed by {' and '.join(f'{provider(point)} ({point.value})' for point in claims)}"
            yield Finding(f"ejkernel {name}", BROKEN, text, _uninstall_one([distribution(point) for point in claims]))
    for point in (claims[0] for claims in points.values() if len(claims) == 1):
        try:
            value = point.load()
        except Exception as fault:
            text = f"{point.value} of {provider(point)} cannot be imported: {_description(fault)}"
            yield Finding(f"ejkernel {point.name}", BROKEN, text, f"pip install -U {distribution(point)}")
            continue
        if not isinstance(value, click.Command):
            text = f"{point.value} of {provider(point)} is not a click.Command"
            yield Finding(f"ejkernel {point.name}", BROKEN, text, f"pip install -U {distribution(point)}")


def speed(machine: Machine) -> Findings:
    """What would make calls faster on this machine."""
    if machine.platform is None:
        return
    names = absent_distributions(machine.platform)
    if names:
        text = f"not installed: {', '.join(names)}"
        yield Finding("plugins", NOTE, text, f'pip install "{CORE}[{EXTRAS[machine.platform]}]"')
    if machine.registry is not None and not machine.registry.selection_fault:
        from ._here import kernels_here

        needs: dict[str, list[str]] = {}
        for row in kernels_here(machine.registry, machine.platform):
            if row.status == "needs":
                needs.setdefault(row.reason, []).append(f"{row.operation}.{row.backend}")
        for reason, kernels in needs.items():
            yield Finding(", ".join(kernels), NOTE, reason)
        yield from _records(_device_name(machine.devices[0]), machine.registry)


def _records(device: str, registry: Registry) -> Findings:
    """How many records answer on this device: of this machine, and of packages."""
    if version("ejkernel-cache") is None:
        return
    answering, others = _cache_counts(device, registry)
    counts = {source: count for source, count in {"the cache": answering, **_package_counts(device)}.items() if count}
    if counts:
        text = ", ".join(f"{count} in {source}" for source, count in counts.items())
        yield Finding("records", OK, f"for {device}: {text}")
    elif version("ejkernel-tuning") is not None:
        yield Finding("records", NOTE, f"none for {device}: heuristics choose", "ejkernel tune --help")
    if others:
        yield Finding(
            "old records", NOTE, f"{others} in the cache, of other versions or absent kernels: they are not used"
        )


def _cache_counts(device: str, registry: Registry) -> tuple[int, int]:
    """How many records of the cache are of the kernels here, and how many are not."""
    if not is_selected("ejkernel-cache", selection()):
        return 0, 0
    documents = importlib.import_module("ejkernel_cache._contents").contents_of(cache_folder()).documents
    is_current = [_is_current(document, registry) for document in documents if document.key.device == device]
    return sum(is_current), len(is_current) - sum(is_current)


def _is_current(document: Any, registry: Registry) -> bool:
    """Whether a record was measured with the kernels that are installed, or put there by hand for one of them."""
    kernels, _ = registry.kernels(document.key.op)
    if document.backend is not None and document.backend not in [kernel.backend for kernel in kernels]:
        return False
    software = {name: number for kernel in kernels for name, number in kernel.software.items()}
    return not (document.provenance and document.provenance.changes(software))


def _package_counts(device: str) -> dict[str, int]:
    """By distribution: the records of packages. They count with all versions."""
    # By name, because it is examined where it is installed, and not required.
    records_type = importlib.import_module("ejkernel_cache").PackagedRecords
    folder = importlib.import_module("ejkernel_cache._names").component(device)
    counts: dict[str, int] = {}
    for point in entry_points(POLICIES):
        if not is_selected(distribution(point), selection()):
            continue
        try:
            policy = point.load()
        except Exception:  # it has a finding as a plugin
            continue
        if isinstance(policy, records_type):
            root = importlib.resources.files(policy.where) if isinstance(policy.where, str) else Path(policy.where)
            counts[distribution(point)] = _count(root.joinpath(folder))
    return counts


def _count(folder: Any) -> int:
    """The number of records below a folder: files, and lines of files that have several."""
    try:
        entries = list(folder.iterdir())
        files = [entry for entry in entries if entry.is_file()]
        lines = [len(file.read_bytes().splitlines()) for file in files if file.name.endswith(".jsonl")]
        records = sum(file.name.endswith(".json") for file in files)
        # A link may lead back to where it is.
        folders = [e for e in entries if e.is_dir() and not (isinstance(e, Path) and e.is_symlink())]
        return int(records + sum(lines)) + sum(map(_count, folders))
    except OSError:
        return 0


# -- all ---------------------------------------------------------------------------------------------------------------


def examine() -> dict[str, list[Finding]]:
    """All findings, by heading."""
    early = {
        "software": software,
        "distributions": distributions,
        "environment": environment,
        "cache": cache,
        "commands": commands,
    }
    findings = {heading: _findings(heading, examination) for heading, examination in early.items()}
    machine, devices = start()
    late: dict[str, Callable[[Machine], Findings]] = {"plugins": plugins, "speed": speed}
    return {
        "devices": [*devices, *_findings("devices", lambda: flags(machine))],
        **findings,
        **{name: _findings(name, lambda call=call: call(machine)) for name, call in late.items()},  # type: ignore[misc]
    }


def _findings(heading: str, examination: Callable[[], Findings]) -> list[Finding]:
    """The findings of one examination. Where it fails itself, that is the finding, and the others go on."""
    try:
        return list(examination())
    except Exception as fault:
        return [Finding(heading, BROKEN, f"could not be examined: {_description(fault)}")]
