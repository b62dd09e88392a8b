"""The cost of the framework: an eager call, a remembered configuration, a lookup on disk, the import.

A call is compared with the bare jitted function, a call with a record in memory with one without, and the import with
that of JAX alone.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ejkernel_core
from ejkernel_cache import PersistentCache
from ejkernel_core import Candidate, Key, Plan, Record, Registry
from ejkernel_ops.flash_attention.sizes import self_attention

from ._calls import options_of
from ._fresh import in_new_process
from ._report import Bar, Report, Table
from ._rows import announced_table
from ._timing import COLUMNS, Times, interleaved, once

#: So small that hardly anything but the framework takes time.
TINY = self_attention(1, 16, 2, 16)
NAMES = ("query", "key", "value")
ROUNDS = 4000
IMPORTS = 15
LOOKUPS = 500
ENTRIES = 10_000
CALL_LIMIT_US = 15.0
MEMORY_LIMIT_US = 3.0
DISK_LIMIT_MS = 1.0
IMPORT_LIMIT_MS = 60.0

#: What importing the core must not load, apart from plugins: parts of a module's dotted name. An import of JAX does not
#: load its own pallas.
FORBIDDEN = ("triton", "pallas", "cattrs", "platformdirs", "pytest", "ejkernel_testing")

_IMPORT = """
import json, sys, time
start = time.perf_counter()
import jax
middle = time.perf_counter()
if sys.argv[1] == "core":
    import ejkernel_core
end = time.perf_counter()
print(json.dumps([end - start, end - middle]))
"""

_LOADED = """
import json, sys
import ejkernel_core
print(json.dumps(sorted(sys.modules)))
"""


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """All costs, and the modules that importing the core loads."""
    costs = [call_overhead(backend, rounds), memory_overhead(backend, rounds), disk_lookup(ENTRIES, LOOKUPS)]
    tables, bars, fault_lists = zip(*costs, strict=True)
    import_table, import_bar = import_overhead(IMPORTS)
    faults = [fault for fault_list in fault_lists for fault in fault_list]
    faults += [f"importing ejkernel_core loads {name}" for name in modules_loaded_too_early()]
    return Report("overhead", [*tables, import_table], [*bars, import_bar], faults)


# -- the call -----------------------------------------------------------------------------------------------------


def call_overhead(backend: str | None, calls: int) -> tuple[Table, Bar, list[str]]:
    """A cached eager call against the same kernel, with the same configuration, in a jitted function of its own."""
    arrays = tiny_arrays()
    attention, bare = eager_call(backend), bare_function(arrays, backend)
    is_same = np.array_equal(attention(*arrays), bare(*arrays))
    times = interleaved(
        {"ejkernel_core.call": lambda: attention(*arrays), "bare jax.jit": lambda: bare(*arrays)}, calls, warm_up=50
    )
    table = _call_table("an eager call", times, calls)
    difference = times["ejkernel_core.call"].median - times["bare jax.jit"].median
    bar = Bar("a cached eager call, over the bare jitted function", difference * 1e6, CALL_LIMIT_US, "us")
    return table, bar, [] if is_same else ["the call and the bare function give different results"]


def tiny_arrays() -> tuple[jax.Array, ...]:
    """Query, key and value."""
    arguments = TINY.arguments(0)
    return tuple(arguments[name] for name in NAMES)


def eager_call(backend: str | None, registry: Registry = ejkernel_core.registry) -> Callable[..., Any]:
    """The call through the core."""
    options = options_of(TINY)
    return lambda *arrays: registry.call(TINY.op, *arrays, backend=backend, **options)


def bare_function(arrays: tuple[jax.Array, ...], backend: str | None = None) -> Callable[..., Any]:
    """The same kernel with the same configuration under ``jax.jit``, without the framework."""
    plan = _planned(ejkernel_core.registry, arrays, backend)

    def attention(*values: Any) -> Any:
        return plan.run(plan.invocation.with_arrays(dict(zip(NAMES, values, strict=True))))[0]

    return jax.jit(attention)


def _call_table(title: str, times: dict[str, Times], calls: int) -> Table:
    return announced_table(
        f"{title}, microseconds, of {calls} each in turn",
        ("", "median", "quartile range", "10 %", "90 %", "99 %"),
        [(name, *_microseconds(contender_times)) for name, contender_times in times.items()],
    )


def _microseconds(times: Times) -> tuple[float, ...]:
    seconds = (times.median, times.spread, *(times.percentile(percent) for percent in (10, 90, 99)))
    return tuple(value * 1e6 for value in seconds)


# -- memory and disk ----------------------------------------------------------------------------------------------


def memory_overhead(backend: str | None, calls: int) -> tuple[Table, Bar, list[str]]:
    """A cached eager call whose configuration is in memory against the same call by the heuristic."""
    arrays, plain, with_record = tiny_arrays(), Registry(), Registry()
    plan = _planned(plain, arrays, backend)
    with_record.remember(plan.invocation.key, Record(plan.cfg, plan.kernel.backend))
    origin = _planned(with_record, arrays, backend).origin
    calls_by_name = {"by the heuristic": eager_call(backend, plain), "remembered": eager_call(backend, with_record)}
    runs = {name: partial(call, *arrays) for name, call in calls_by_name.items()}
    is_same = np.array_equal(*(run() for run in runs.values()))
    times = interleaved(runs, calls, warm_up=50)
    table = _call_table("an eager call whose configuration is in memory", times, calls)
    difference = times["remembered"].median - times["by the heuristic"].median
    bar = Bar("a remembered configuration, over none", difference * 1e6, MEMORY_LIMIT_US, "us")
    faults = [] if is_same else ["with a remembered configuration the call gives a different result"]
    return table, bar, faults + ([] if origin == "memory" else [f"the record in memory was not used, but {origin}"])


def _planned(registry: Registry, arrays: tuple[jax.Array, ...], backend: str | None) -> Plan:
    return registry.plan(TINY.op, *arrays, backend=backend, **options_of(TINY))


def disk_lookup(entries: int, lookups: int) -> tuple[Table, Bar, list[str]]:
    """One configuration from a full cache, each time for another key and by an instance that has read nothing."""
    plan = _planned(Registry(), tiny_arrays(), None)
    candidate, record = Candidate(plan.kernel, plan.cfg), Record(plan.cfg, plan.kernel.backend)
    keys = [_key_of_length(plan, length) for length in range(1, entries + 1)]
    with tempfile.TemporaryDirectory() as folder:

        def lookup(key: Key) -> Record | None:
            return PersistentCache(folder).find(key, candidate)

        _fill(PersistentCache(folder), keys, record)
        sample = keys[:: max(1, entries // lookups)]
        results = [once(partial(lookup, key)) for key in sample]
        _, other = once(partial(lookup, _key_of_length(plan, entries + 1)))
    times = Times([seconds for seconds, _ in results])
    title = f"a cold lookup on disk among {entries} entries, milliseconds, {len(results)} keys"
    table = announced_table(title, ("", *COLUMNS), [("a configuration that is there", *times.scaled(1e-3))])
    bar = Bar("a cold lookup on disk", times.median * 1e3, DISK_LIMIT_MS, "ms")
    lost = sum(result != record for _, result in results)
    faults = [f"{lost} of {len(results)} configurations on disk are not found"] if lost else []
    return table, bar, faults + (["a configuration is found for a key that is not on disk"] if other else [])


def _key_of_length(plan: Plan, length: int) -> Key:
    arrays = dict.fromkeys(NAMES, jax.ShapeDtypeStruct((1, length, 2, 16), TINY.dtype))
    return plan.invocation.with_arrays(arrays).key


def _fill(cache: PersistentCache, keys: Sequence[Key], record: Record) -> None:
    """As ``put`` does, without waiting for the disk each time."""
    cache.put(keys[0], record)
    for key in keys[1:]:
        Path(cache.file(key, record.backend)).write_text(ejkernel_core.record_to_json(key, record))


# -- the import ---------------------------------------------------------------------------------------------------


def import_overhead(imports: int) -> tuple[Table, Bar]:
    """``import jax`` and ``import jax, ejkernel_core`` in new processes, in turn."""
    samples: dict[str, list[tuple[float, float]]] = {"jax": [], "core": []}
    for name in ("jax", "core"):  # so that bytecode is written and files are cached
        in_new_process(_IMPORT, name)
    for number in range(imports):
        for name in ("jax", "core") if number % 2 == 0 else ("core", "jax"):
            samples[name].append(in_new_process(_IMPORT, name))
    jax_alone, jax_and_core = (Times([total for total, _ in samples[name]]) for name in ("jax", "core"))
    core_alone = Times([second_half for _, second_half in samples["core"]])
    times_by_name = {"import jax": jax_alone, "import jax, ejkernel_core": jax_and_core, "its second half": core_alone}
    table = announced_table(
        f"imports, milliseconds, {imports} new processes each in turn",
        ("", *COLUMNS),
        [(name, *times.scaled(1e-3)) for name, times in times_by_name.items()],
    )
    return table, Bar("import ejkernel_core, over import jax", core_alone.median * 1e3, IMPORT_LIMIT_MS, "ms")


def modules_loaded_too_early() -> list[str]:
    """The modules that importing the core loads and should not."""
    modules = in_new_process(_LOADED)
    forbidden = {*FORBIDDEN, *plugin_packages()}
    return [name for name in modules if any(f".{part}." in f".{name}." for part in forbidden)]


def plugin_packages() -> set[str]:
    """The top-level packages of all plugins."""
    groups = ("ejkernel.operations", "ejkernel.kernels", "ejkernel.policies")
    points = (point for group in groups for point in importlib.metadata.entry_points(group=group))
    return {point.module.partition(".")[0] for point in points}
