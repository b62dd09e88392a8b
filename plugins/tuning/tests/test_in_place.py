"""Measurements of kernels that update an argument: right results, arrays of the caller that stay, and no copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Axes, Operation, Registry, hookimpl
from ejkernel_tuning._autotune import tune
from ejkernel_tuning._in_place import InPlace, compile_in_place

AXES = Axes({"x": "n", "cache": "m n"}, {"total": "", "new_cache": "m n"}, whole="n m")
OPERATION = Operation(
    name="roll",
    signature=lambda x, cache: None,
    axes=AXES,
    aliases={"new_cache": "cache"},
)


@attrs.frozen
class Config:
    row: int = 0


def roll(inv: Any, row: int = 0) -> Any:
    """The row of the cache is x, and the sum is that of x."""
    return inv["x"].sum(), inv["cache"].at[row].set(inv["x"])


def make_registry() -> Registry:
    """``roll``: of two configurations one writes into the wrong row."""
    registry = Registry(plugins="ejkernel-tuning")

    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        return Config()

    @hookimpl
    def config_space(inv: Any) -> Any:
        return [Config(), Config(1)]

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return roll(inv, 0 if cfg is None else cfg.row)

    registry.register(OPERATION)
    kernel = SimpleNamespace(
        Config=Config, heuristic_cfg=heuristic_cfg, config_space=config_space, run_backend=run_backend
    )
    registry.register(kernel, "roll.kinds")
    registry.register(SimpleNamespace(run_backend=run_backend, PLATFORMS={"cpu": 0}), "roll.reference")
    return registry


X, CACHE = jnp.arange(1.0, 9.0), jnp.arange(32.0).reshape(4, 8)


def test_a_kernel_is_measured_in_place() -> None:
    registry = make_registry()
    inv = registry.invocation("roll", X, CACHE)
    candidates, _ = registry.candidates(inv)
    tuned = tune(inv, candidates, registry.reference(inv), 20.0, {"x": X, "cache": CACHE}, calls=(2, 8))
    assert tuned.best is not None
    assert tuned.best.cfg != Config(1)
    outcomes = {entry.cfg: entry.reason for entry in tuned.entries}
    assert outcomes[Config(1)].startswith("wrong: result new_cache is off by")
    assert outcomes[Config()] == ""
    np.testing.assert_array_equal(CACHE, np.arange(32.0).reshape(4, 8))  # not taken away


def test_each_call_gets_what_the_one_before_returned() -> None:
    def step(x: Any, cache: Any) -> Any:
        return cache[0, 0], cache + x

    avals = {"x": jax.ShapeDtypeStruct((8,), "float32"), "cache": jax.ShapeDtypeStruct((4, 8), "float32")}
    compiled = compile_in_place(OPERATION, step, avals)
    assert isinstance(compiled, InPlace)
    assert compiled.memory_analysis().alias_size_in_bytes == 4 * 8 * 4
    for _ in range(2):
        np.testing.assert_array_equal(compiled(X, CACHE)[1], CACHE + X)  # before begin, those that it is given
    compiled.begin([X, CACHE])
    for count in range(3):
        first, _ = compiled(X, CACHE)
        assert float(first) == float(CACHE[0, 0] + count * X[0])
    compiled.end()
    np.testing.assert_array_equal(compiled(X, CACHE)[1], CACHE + X)
    plain = compile_in_place(None, step, avals)
    assert plain.memory_analysis().alias_size_in_bytes == 0
