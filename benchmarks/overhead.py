"""What the framework costs: a repeated call, one with a record in memory, a lookup on disk, and the import.

    python benchmarks/overhead.py

A call is compared with the same kernel under ``jax.jit``, which has to give the same result.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

import ejkernel_core
from ejkernel_bench._report import joined
from ejkernel_bench._timing import COLUMNS, Times, interleaved, once
from ejkernel_bench.suite import Bar, Report, Table
from ejkernel_cache import PersistentCache
from ejkernel_core import Candidate, Key, Plan, Record, Registry

#: So small that hardly anything but the framework takes time.
SHAPE = (1, 16, 2, 16)
NAMES = ("query", "key", "value")
CALL, REMEMBERED, BARE = "ejkernel_core.call", "with a record in memory", "bare jax.jit"
CALL_LIMIT_US, MEMORY_LIMIT_US, DISK_LIMIT_MS, IMPORT_LIMIT_MS = 15.0, 3.0, 1.0, 60.0

IMPORT = """
import time
import jax
start = time.perf_counter()
import ejkernel_core
print(time.perf_counter() - start)
"""


def plan_of(registry: Registry, *arrays: Any) -> Plan:
    """Of attention that is causal, as all calls here."""
    return registry.plan("flash_attention", *arrays, causal=True)


def repeated_call(calls: int) -> Report:
    """Eager, by the heuristic and with a record, against the bare function."""
    arrays = [jax.random.normal(key, SHAPE) for key in jax.random.split(jax.random.key(0), 3)]
    plain, with_record = Registry(), Registry()
    plan = plan_of(plain, *arrays)
    with_record.remember(plan.invocation.key, Record(plan.cfg, plan.kernel.backend))
    bare: Any = jax.jit(lambda arrays: plan.run(plan.invocation.with_arrays(arrays))[0])
    by_name = dict(zip(NAMES, arrays, strict=True))
    runs: dict[str, Callable[[], Any]] = {
        CALL: lambda: plain.call("flash_attention", *arrays, causal=True),
        REMEMBERED: lambda: with_record.call("flash_attention", *arrays, causal=True),
        BARE: lambda: bare(by_name),
    }
    expected = np.asarray(runs[BARE]())
    faults = [f"{name} has another result" for name, run in runs.items() if not np.array_equal(run(), expected)]
    if (origin := plan_of(with_record, *arrays).origin) != "memory":
        faults.append(f"the record in memory was not used, but {origin}")
    times = interleaved(runs, calls, warm_up=50)
    rows = [(name, *one.scaled(1e-6)) for name, one in times.items()]
    call, remembered, of_bare = (1e6 * one.median for one in times.values())
    bars = [
        Bar("over the bare function", call - of_bare, CALL_LIMIT_US, "us"),
        Bar("a record in memory, over none", remembered - call, MEMORY_LIMIT_US, "us"),
    ]
    return Report("an eager call", [Table("microseconds, in turn", (f"{calls} calls", *COLUMNS), rows)], bars, faults)


def disk_lookup(entries: int, lookups: int) -> Report:
    """Each by a cache that has read nothing before."""
    plan = plan_of(Registry(), *[jax.ShapeDtypeStruct(SHAPE, "float32")] * 3)
    candidate, record = Candidate(plan.kernel, plan.cfg), Record(plan.cfg, plan.kernel.backend)

    def key_of(length: int) -> Key:
        array = jax.ShapeDtypeStruct((1, length, 2, 16), "float32")
        return plan.invocation.with_arrays(dict.fromkeys(NAMES, array)).key

    def lookup(folder: str, key: Key) -> Record | None:
        return PersistentCache(folder).find(key, candidate)

    keys = [key_of(length) for length in range(1, entries + 1)]
    with tempfile.TemporaryDirectory() as folder:
        (cache := PersistentCache(folder)).put(keys[0], record)
        for key in keys[1:]:  # as ``put`` does, without waiting for the disk each time
            Path(cache.file(key, record.backend)).write_text(ejkernel_core.record_to_json(key, record))
        results = [once(partial(lookup, folder, key)) for key in keys[:: max(1, entries // lookups)]]
        other = lookup(folder, key_of(entries + 1))
    lost = sum(result != record for _, result in results)
    faults = [f"{lost} of {len(results)} records are not found"] if lost else []
    faults += ["a record is found that is not there"] if other else []
    times = Times([seconds for seconds, _ in results])
    rows = [(f"{len(results)} of {entries} records", *times.scaled(1e-3))]
    bar = Bar("median", times.median * 1e3, DISK_LIMIT_MS, "ms")
    return Report("a lookup on disk", [Table("milliseconds", ("a lookup on disk", *COLUMNS), rows)], [bar], faults)


def core_import(imports: int) -> Report:
    """In new processes, of which the first one writes bytecode."""
    program = [sys.executable, "-c", IMPORT]
    seconds = [float(subprocess.run(program, capture_output=True, check=True).stdout) for _ in range(imports + 1)]
    times = Times(seconds[1:])
    table = Table("milliseconds, after that of jax", (f"{imports} imports", *COLUMNS), [("core", *times.scaled(1e-3))])
    return Report("the import", [table], [Bar("median", times.median * 1e3, IMPORT_LIMIT_MS, "ms")])


@click.command(help=__doc__)
@click.option("--calls", default=4000)
@click.option("--entries", default=10_000)
@click.option("--lookups", default=500)
@click.option("--imports", default=15)
def main(calls: int, entries: int, lookups: int, imports: int) -> None:
    report = joined("overhead", [repeated_call(calls), disk_lookup(entries, lookups), core_import(imports)])
    print(report)
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
