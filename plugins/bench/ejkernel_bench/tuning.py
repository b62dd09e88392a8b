"""Tuning against the heuristic, in a second process, and while a candidate hangs."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_core
from ejkernel_cache import default_cache
from ejkernel_core import Operation, Registry, hookimpl
from ejkernel_ops.flash_attention.sizes import self_attention
from ejkernel_tuning import Tuned, autotune, tune

from ._calls import describe, options_of
from ._fresh import in_new_process
from ._report import Bar, Report, Table
from ._rows import announced_table
from ._timing import COLUMNS, interleaved

EXAMPLE = self_attention(2, 2048, 8, 64)
NAMES = ("query", "key", "value")
ROUNDS = 30
BUDGET_S = 55.0
TUNING_LIMIT_S = 60.0
#: The heuristic's time, and the difference between two runs of one program.
SLOWER_LIMIT = 1.02
SHORT_BUDGET_S = 2.0

_SECOND = """
import json, sys, time
import jax
start = time.perf_counter()
import ejkernel_core
array = jax.ShapeDtypeStruct(tuple(json.loads(sys.argv[1])), sys.argv[2])
plan = ejkernel_core.plan("flash_attention", array, array, array, **json.loads(sys.argv[3]))
print(json.dumps([plan.origin.split()[0], str(plan.cfg), time.perf_counter() - start]))
"""


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """On this device. Its records are forgotten afterwards."""
    with temporary_store():
        return _measured(backend, rounds)


@contextmanager
def temporary_store() -> Iterator[None]:
    """Records are stored in a new folder, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder, store_in(folder):
        yield


@contextmanager
def store_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Records are stored in this folder, and nowhere else."""
    previous_folder = os.environ.get("EJKERNEL_CACHE_DIR")
    os.environ["EJKERNEL_CACHE_DIR"] = os.fspath(folder)
    default_cache.cache_clear()  # another benchmark may have used the user's
    try:
        yield
    finally:
        ejkernel_core.registry.forget()
        default_cache.cache_clear()
        os.environ.pop("EJKERNEL_CACHE_DIR")
        os.environ.update({} if previous_folder is None else {"EJKERNEL_CACHE_DIR": previous_folder})


def _measured(backend: str | None, rounds: int) -> Report:
    tuned, table, bars, faults = against_the_heuristic(backend, rounds)
    second_table, second_faults = in_a_second_process(tuned)
    faults += second_faults
    seconds = time_with_a_hanging_candidate()
    bars += [
        Bar(f"tuning {EXAMPLE.name}", tuned.seconds, TUNING_LIMIT_S, "s"),
        Bar("a budget of 2 s, while a candidate hangs in the compiler", seconds, SHORT_BUDGET_S * 1.2, "s"),
    ]
    return Report("tuning", [table, second_table], bars, faults, str(tuned))


def against_the_heuristic(backend: str | None, rounds: int) -> tuple[Tuned, Table, list[Bar], list[str]]:
    """Tune, then measure the fastest configuration and the heuristic in turn."""
    arguments, options = EXAMPLE.arguments(0), options_of(EXAMPLE)
    arrays = tuple(arguments[name] for name in NAMES)
    heuristic = ejkernel_core.plan("flash_attention", *arrays, backend=backend, **options)
    (tuned,) = autotune("flash_attention", *arrays, backend=backend, budget_s=BUDGET_S, **options).tuned
    chosen = ejkernel_core.plan("flash_attention", *arrays, backend=backend, **options)
    runs = {"tuned": _compiled(chosen, arrays), "heuristic": _compiled(heuristic, arrays)}
    results = [np.asarray(run()[0]) for run in runs.values()]
    faults = [] if np.allclose(results[0], results[1], atol=1e-5) else ["tuned and heuristic give different results"]
    times = interleaved(runs, rounds, warm_up=2)
    rows = [
        (name, str(plan.cfg), *times[name].scaled(1e-3)) for name, plan in zip(runs, (chosen, heuristic), strict=True)
    ]
    title = f"{EXAMPLE.name}: milliseconds, {rounds} rounds in turn"
    table = announced_table(title, ("", "configuration", *COLUMNS), rows, series=("median",))
    ratio = times["tuned"].median / times["heuristic"].median
    return tuned, table, [Bar("tuned / heuristic", ratio, SLOWER_LIMIT, "times")], faults


def _compiled(plan: Any, arrays: tuple[jax.Array, ...]) -> Any:
    def attention(*values: Any) -> Any:
        return plan.run(plan.invocation.with_arrays(dict(zip(NAMES, values, strict=True))))

    run = jax.jit(attention).lower(*arrays).compile()
    return lambda: jax.block_until_ready(run(*arrays))


def in_a_second_process(tuned: Tuned) -> tuple[Table, list[str]]:
    """The origin of the configuration there, and the time of the import and the first plan."""
    shape = describe(EXAMPLE)["query"].shape
    arguments = json.dumps(shape), EXAMPLE.dtype, json.dumps(options_of(EXAMPLE))
    origin, cfg, seconds = in_new_process(_SECOND, *arguments)
    best = tuned.best
    is_right = best is not None and (origin, cfg) == ("disk", str(best.cfg))
    table = announced_table("a second process", ("", "origin", "seconds to the plan"), [(cfg, origin, seconds)])
    return table, [] if is_right else [f"the second process has {cfg}, origin {origin}"]


@attrs.frozen
class _Config:
    hangs: bool = False


def time_with_a_hanging_candidate() -> float:
    """The seconds of a measurement in which one configuration never ends compiling."""
    is_over = threading.Event()

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        return _Config()

    @hookimpl
    def config_space(inv: Any) -> Any:
        return [_Config(), _Config(hangs=True)]

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        if cfg.hangs:
            is_over.wait()
        return inv["x"] * 2

    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None, outputs=lambda a: (a["x"],)))
    hooks = SimpleNamespace(heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend)
    registry.register(SimpleNamespace(Config=_Config, **vars(hooks)), "double.hanging")
    inv = registry.invocation("double", jnp.ones(1000))
    candidates = [ejkernel_core.Candidate(registry.kernel("double", "hanging"), _Config())]
    try:
        return tune(inv, candidates, None, SHORT_BUDGET_S).seconds
    finally:
        is_over.set()
