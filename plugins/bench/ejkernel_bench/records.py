"""The records of the calls that benchmarks measure: tuned, and written as packages of records have them.

The measurements are stored in a folder of their own, so that an interrupted run can be continued; several cards can
share the work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_cache import PersistentCache
from ejkernel_cache._names import component
from ejkernel_core import Example, Invocation, Record
from ejkernel_core.extend import OPERATIONS
from ejkernel_tuning import autotune_recorded, recording

from ._calls import abstract_inputs, benchmark_examples, by_core, shapes_of, with_gradients
from ._stores import store_in

MEASUREMENTS = "measurements"


def measure(
    folder: Path, operations: Sequence[str], seconds: float, part: tuple[int, int], report: Callable[[str], object]
) -> int:
    """Tune the examples of these operations, by default of all, each for at most so many seconds.

    ``part`` is (i, n): every n-th of the examples, from the i-th on. Every result is reported when it is there. Returns
    the number of calls that could not be measured.
    """
    registry, (number, count), failures = ejkernel_core.registry, part, 0
    operations = operations or registry.names(OPERATIONS)
    examples = [example for operation in operations for example in benchmark_examples(operation)[number - 1 :: count]]
    with store_in(folder / MEASUREMENTS):
        for place, example in enumerate(examples, 1):
            report(f"{place} of {len(examples)}: {example.op} {example.name}")
            for inv in calls_of(example):
                for tuned in autotune_recorded([inv], seconds).tuned:
                    failures += not tuned.records
                    report(str(tuned))
    return failures


def calls_of(example: Example) -> list[Invocation]:
    """The example forward, backward for its gradients, and backward for the gradients of all arrays that have them."""
    operation, shapes = ejkernel_core.registry.operation(example.op), shapes_of(example)
    floating_arrays = [name for name in operation.differentiable if name in shapes and _is_floating(shapes[name])]
    function, inputs = by_core(example), abstract_inputs(example)
    with recording() as invocations:
        jax.jit(lambda arrays: function(**arrays)).lower(shapes)
        for wrt in dict.fromkeys((example.wrt, tuple(floating_arrays))) if example.wrt else ():
            others = {name: shape for name, shape in shapes.items() if name not in wrt}
            arrays = [shapes[name] for name in wrt]
            jax.jit(with_gradients(function, wrt)).lower(others, arrays, inputs.cotangents)
    return list(invocations)


def _is_floating(array: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def write_records(folder: Path) -> list[Path]:
    """Write the latest record of each measured call. A record of the same call with other software stays."""
    lines: dict[Path, list[str]] = {}
    for key, records in PersistentCache(folder / MEASUREMENTS).items():
        if measured := [record for record in records if record.provenance is not None]:
            latest = max(measured, key=_when)
            document = json.loads(ejkernel_core.record_to_json(key, latest))
            file = folder / component(key.device) / f"{component(key.op)}.jsonl"
            lines.setdefault(file, []).append(json.dumps(document, sort_keys=True, separators=(",", ":")))
    for file, new_lines in lines.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        old_lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        by_call = {_call(line): line for line in (*old_lines, *new_lines)}
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text("\n".join(_sorted(by_call.values())) + "\n", encoding="utf-8")
        temporary.replace(file)
    return list(lines)


def _when(record: Record) -> str:
    assert record.provenance is not None
    return record.provenance.when


def _call(line: str) -> str:
    """The call of a record, and the software that it was measured with."""
    document = json.loads(line)
    return json.dumps([document["problem"], (document["provenance"] or {}).get("software")], sort_keys=True)


def _sorted(lines: Iterable[str]) -> list[str]:
    return sorted(lines, key=_call)
