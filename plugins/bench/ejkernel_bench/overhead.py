"""What the framework costs: an eager call over the bare jitted function, a memory that knows its configuration, a
lookup on disk, and the import over JAX's own.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ejkernel_core
from ejkernel_cache import PersistentCache
from ejkernel_core import Candidate, Key, Plan, Record, Registry

from ._fresh import in_fresh_process
from ._problem import Problem, through_core
from ._report import Bar, Report, Table
from ._timing import COLUMNS, Times, interleaved, once

#: So small that hardly anything but the way there and back takes time.
TINY = Problem(1, 16, 2, 16)
ROUNDS = 4000
IMPORTS = 15
LOOKUPS = 500
ENTRIES = 10_000
CALL_BAR_US = 15.0
MEMORY_BAR_US = 3.0
DISK_BAR_MS = 1.0
IMPORT_BAR_MS = 60.0

#: What an import of the core alone must not have loaded, beside every plugin: parts of a module's dotted name. JAX has
#: a pallas inside, which importing JAX does not load.
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
    """All the costs, and what importing loads."""
    costs = [call_overhead(backend, rounds), memory_overhead(backend, rounds), disk_lookup(ENTRIES, LOOKUPS)]
    tables, bars, wrongs = zip(*costs, strict=True)
    import_table, import_bar = import_overhead(IMPORTS)
    wrong = [fault for faults in wrongs for fault in faults]
    wrong += [f"importing ejkernel_core loads {name}" for name in loaded_too_early()]
    return Report("overhead", [*tables, import_table], [*bars, import_bar], wrong)


# -- the call -----------------------------------------------------------------------------------------------------


def call_overhead(backend: str | None, calls: int) -> tuple[Table, Bar, list[str]]:
    """A cached eager call against the same kernel, with the same configuration, in a jitted function of its own."""
    arrays = TINY.arrays()[:3]
    attention, bare = through_core(TINY, backend), bare_function(arrays, backend)
    same = np.array_equal(attention(*arrays), bare(*arrays))
    taken = interleaved(
        {"ejkernel_core.call": lambda: attention(*arrays), "bare jax.jit": lambda: bare(*arrays)}, calls, warm_up=50
    )
    table = _call_table("an eager call", taken, calls)
    more = taken["ejkernel_core.call"].median - taken["bare jax.jit"].median
    bar = Bar("a cached eager call, over the bare jitted function", more * 1e6, CALL_BAR_US, "us")
    return table, bar, [] if same else ["the call and the bare function give different results"]


def bare_function(arrays: tuple[jax.Array, ...], backend: str | None = None) -> Callable[..., Any]:
    """What somebody would write who knows the kernel, its configuration and JAX, and not this framework."""
    plan = ejkernel_core.plan("flash_attention", *arrays, backend=backend, **TINY.options)
    names = ("query", "key", "value")

    def attention(*values: Any) -> Any:
        return plan.run(plan.invocation.with_arrays(dict(zip(names, values, strict=True))))[0]

    return jax.jit(attention)


def _call_table(title: str, taken: dict[str, Times], calls: int) -> Table:
    return Table(
        f"{title}, microseconds, of {calls} each in turn",
        ("", "median", "quartile range", "10 %", "90 %", "99 %"),
        [(name, *_microseconds(times)) for name, times in taken.items()],
    )


def _microseconds(times: Times) -> tuple[float, ...]:
    seconds = (times.median, times.spread, *(times.percentile(percent) for percent in (10, 90, 99)))
    return tuple(value * 1e6 for value in seconds)


# -- what is remembered -------------------------------------------------------------------------------------------


def memory_overhead(backend: str | None, calls: int) -> tuple[Table, Bar, list[str]]:
    """A cached eager call whose configuration is in memory against the same call by the heuristic."""
    arrays, plain, remembering = TINY.arrays()[:3], Registry(), Registry()
    plan = _planned(plain, arrays, backend)
    remembering.remember(plan.invocation.key, Record(plan.cfg, plan.kernel.backend))
    origin = _planned(remembering, arrays, backend).origin

    def through(registry: Registry) -> Callable[[], Any]:
        return lambda: registry.call("flash_attention", *arrays, backend=backend, **TINY.options)

    same = np.array_equal(through(plain)(), through(remembering)())
    taken = interleaved({"by the heuristic": through(plain), "remembered": through(remembering)}, calls, warm_up=50)
    table = _call_table("an eager call whose configuration is in memory", taken, calls)
    more = taken["remembered"].median - taken["by the heuristic"].median
    bar = Bar("a remembered configuration, over none", more * 1e6, MEMORY_BAR_US, "us")
    wrong = [] if same else ["with a remembered configuration the call gives a different result"]
    return table, bar, wrong + ([] if origin == "memory" else [f"what is in memory was not used, but {origin}"])


def _planned(registry: Registry, arrays: tuple[jax.Array, ...], backend: str | None) -> Plan:
    return registry.plan("flash_attention", *arrays, backend=backend, **TINY.options)


def disk_lookup(entries: int, lookups: int) -> tuple[Table, Bar, list[str]]:
    """One configuration from a full cache, each time by an instance that has read nothing, for another key."""
    plan = _planned(Registry(), TINY.arrays()[:3], None)
    candidate, right = Candidate(plan.kernel, plan.cfg), Record(plan.cfg, plan.kernel.backend)
    keys = [_key_of_length(plan, length) for length in range(1, entries + 1)]
    with tempfile.TemporaryDirectory() as folder:
        _fill(PersistentCache(folder), keys, right)
        chosen = keys[:: max(1, entries // lookups)]
        taken = [once(lambda key=key: PersistentCache(folder).find(key, candidate)) for key in chosen]
        missed = once(lambda: PersistentCache(folder).find(_key_of_length(plan, entries + 1), candidate))
    times = Times([seconds for seconds, _ in taken])
    title = f"a cold lookup on disk among {entries} entries, milliseconds, {len(taken)} keys"
    table = Table(title, ("", *COLUMNS), [("a configuration that is there", *times.scaled(1e-3))])
    bar = Bar("a cold lookup on disk", times.median * 1e3, DISK_BAR_MS, "ms")
    lost = sum(found != right for _, found in taken)
    wrong = [f"{lost} of {len(taken)} configurations on disk are not found"] if lost else []
    return table, bar, wrong + (["a configuration is found that nobody has put there"] if missed[1] else [])


def _key_of_length(plan: Plan, length: int) -> Key:
    shape = (1, length, *TINY.shape[2:])
    arrays = dict.fromkeys(("query", "key", "value"), jax.ShapeDtypeStruct(shape, TINY.dtype))
    return plan.invocation.with_arrays(arrays).key


def _fill(cache: PersistentCache, keys: Sequence[Key], record: Record) -> None:
    """As ``put`` would, without waiting for the disk every time."""
    cache.put(keys[0], record)
    for key in keys[1:]:
        Path(cache.file(key, record.backend)).write_text(ejkernel_core.record_to_json(key, record))


# -- the import ---------------------------------------------------------------------------------------------------


def import_overhead(imports: int) -> tuple[Table, Bar]:
    """``import jax`` and ``import jax, ejkernel_core`` in fresh processes, in turn."""
    taken: dict[str, list[tuple[float, float]]] = {"jax": [], "core": []}
    for name in ("jax", "core"):  # once each for the file system's and the bytecode's sake
        in_fresh_process(_IMPORT, name)
    for number in range(imports):
        for name in ("jax", "core") if number % 2 == 0 else ("core", "jax"):
            taken[name].append(in_fresh_process(_IMPORT, name))
    alone, both = (Times([total for total, _ in taken[name]]) for name in ("jax", "core"))
    added = Times([extra for _, extra in taken["core"]])
    labelled = {"import jax": alone, "import jax, ejkernel_core": both, "its second half": added}
    table = Table(
        f"imports, milliseconds, {imports} fresh processes each in turn",
        ("", *COLUMNS),
        [(name, *times.scaled(1e-3)) for name, times in labelled.items()],
    )
    return table, Bar("import ejkernel_core, over import jax", added.median * 1e3, IMPORT_BAR_MS, "ms")


def loaded_too_early() -> list[str]:
    """The modules that importing the core loads and should not."""
    loaded = in_fresh_process(_LOADED)
    forbidden = {*FORBIDDEN, *plugin_packages()}
    return [name for name in loaded if any(f".{part}." in f".{name}." for part in forbidden)]


def plugin_packages() -> set[str]:
    """The top-level packages of everything that is plugged in."""
    groups = ("ejkernel.operations", "ejkernel.kernels", "ejkernel.policies")
    points = (point for group in groups for point in importlib.metadata.entry_points(group=group))
    return {point.module.partition(".")[0] for point in points}
