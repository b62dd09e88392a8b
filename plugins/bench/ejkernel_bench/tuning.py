"""What tuning gives and costs: against the heuristic, in a second process, and when something hangs."""

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
from ejkernel_tuning import Tuned, autotune, tune

from ._fresh import in_fresh_process
from ._problem import Problem
from ._report import Bar, Report, Table
from ._timing import COLUMNS, interleaved

PROBLEM = Problem(2, 2048, 8, 64)
ROUNDS = 30
BUDGET_S = 55.0
TUNING_BAR_S = 60.0
#: A chosen configuration may be slower than the heuristic's by what one run differs from the next.
SLOWER_BAR = 1.02
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
    """On this device; what is tuned here is forgotten afterwards."""
    with nothing_remembered():
        return _measured(backend, rounds)


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """No record is there at the beginning, and none is left."""
    with tempfile.TemporaryDirectory() as folder, kept_in(folder):
        yield


@contextmanager
def kept_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """What is measured is remembered there, and nowhere else."""
    before = os.environ.get("EJKERNEL_CACHE_DIR")
    os.environ["EJKERNEL_CACHE_DIR"] = os.fspath(folder)
    default_cache.cache_clear()  # another benchmark may have used the user's
    try:
        yield
    finally:
        ejkernel_core.registry.forget()
        default_cache.cache_clear()
        os.environ.pop("EJKERNEL_CACHE_DIR")
        os.environ.update({} if before is None else {"EJKERNEL_CACHE_DIR": before})


def _measured(backend: str | None, rounds: int) -> Report:
    tuned, table, bars, wrong = against_the_heuristic(backend, rounds)
    second = in_a_second_process(tuned)
    wrong += second[1]
    kept = budget_with_a_hanging_candidate()
    bars += [
        Bar(f"tuning {PROBLEM}", tuned.seconds, TUNING_BAR_S, "s"),
        Bar("a budget of 2 s, while a candidate hangs in the compiler", kept, SHORT_BUDGET_S * 1.2, "s"),
    ]
    return Report("tuning", [table, second[0]], bars, wrong, str(tuned))


def against_the_heuristic(backend: str | None, rounds: int) -> tuple[Tuned, Table, list[Bar], list[str]]:
    """Tune, then measure the winner and the heuristic's choice in turn."""
    arrays = PROBLEM.arrays()[:3]
    heuristic = ejkernel_core.plan("flash_attention", *arrays, backend=backend, **PROBLEM.options)
    (tuned,) = autotune("flash_attention", *arrays, backend=backend, budget_s=BUDGET_S, **PROBLEM.options).tuned
    chosen = ejkernel_core.plan("flash_attention", *arrays, backend=backend, **PROBLEM.options)
    runs = {"tuned": _compiled(chosen, arrays), "heuristic": _compiled(heuristic, arrays)}
    results = [np.asarray(run()[0]) for run in runs.values()]
    wrong = [] if np.allclose(*results, atol=1e-5) else ["tuned and heuristic give different results"]
    times = interleaved(runs, rounds, warm_up=2)
    rows = [
        (name, str(plan.cfg), *times[name].scaled(1e-3)) for name, plan in zip(runs, (chosen, heuristic), strict=True)
    ]
    table = Table(f"{PROBLEM}: milliseconds, {rounds} rounds in turn", ("", "configuration", *COLUMNS), rows)
    ratio = times["tuned"].median / times["heuristic"].median
    return tuned, table, [Bar("tuned / heuristic", ratio, SLOWER_BAR, "times")], wrong


def _compiled(plan: Any, arrays: tuple[jax.Array, ...]) -> Any:
    def attention(*values: Any) -> Any:
        return plan.run(plan.invocation.with_arrays(dict(zip(("query", "key", "value"), values, strict=True))))

    run = jax.jit(attention).lower(*arrays).compile()
    return lambda: jax.block_until_ready(run(*arrays))


def in_a_second_process(tuned: Tuned) -> tuple[Table, list[str]]:
    """Who answers there, and how long the import and the first plan take."""
    origin, cfg, seconds = in_fresh_process(
        _SECOND, json.dumps(PROBLEM.shape), PROBLEM.dtype, json.dumps(PROBLEM.options)
    )
    best = tuned.best
    right = best is not None and (origin, cfg) == ("disk", str(best.cfg))
    table = Table("a second process", ("", "by", "seconds to the plan"), [(cfg, origin, seconds)])
    return table, [] if right else [f"the second process has {cfg} by {origin}"]


@attrs.frozen
class _Config:
    hangs: bool = False


def budget_with_a_hanging_candidate() -> float:
    """The seconds that a contest takes in which one candidate never comes back from compiling."""
    released = threading.Event()

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        return _Config()

    @hookimpl
    def config_space(inv: Any) -> Any:
        return [_Config(), _Config(hangs=True)]

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        if cfg.hangs:
            released.wait()
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
        released.set()
