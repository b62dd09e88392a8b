"""The order of given experts in Triton: the values of every configuration, and what the heuristic chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Unsupported
from ejkernel_triton import moe_order
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.moe_order import BLOCKS, Config
from ejkernel_triton.moe_route import order

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)


@pytest.fixture(scope="module", name="registry")
def _registry() -> Iterator[Any]:
    with interpreted():
        yield interpreted_registry({"moe_order.triton": moe_order})


def check(registry: Any, experts: np.ndarray, count: int, cfg: Config | None = None) -> None:
    """Compare both results with NumPy's."""
    numbers = np.where((experts >= 0) & (experts < count), experts, count).reshape(-1)
    sizes, token_order = registry.call("moe_order", jnp.asarray(experts), count, backend="triton", cfg=cfg)
    np.testing.assert_array_equal(sizes, np.bincount(numbers, minlength=count + 1)[:count])
    np.testing.assert_array_equal(token_order, np.argsort(numbers, kind="stable"))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("count", [1, 7, 8, 300])
@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (1, 1), (32, 1), (67, 3), (128, 2)])
def test_every_configuration_orders(registry: Any, tokens: int, k: int, count: int, block: int) -> None:
    experts = np.random.default_rng([tokens, k, count]).integers(-2, count + 2, (tokens, k))
    check(registry, experts, count, Config(block))


def test_many_blocks_are_added_up(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "HEIGHT", 8)
    check(registry, np.random.default_rng(0).integers(0, 12, (700, 1)), 11, Config(32))


@pytest.mark.parametrize("expert", [0, 4, 5])
def test_one_expert_for_all(registry: Any, expert: int) -> None:
    """The first, the last, and none."""
    check(registry, np.full((75, 2), expert), 5, Config(64))


def test_mapped(registry: Any) -> None:
    experts = jnp.asarray(np.random.default_rng(1).integers(-1, 6, (3, 20, 2)))
    call = lambda experts: registry.call("moe_order", experts, 5, backend="triton")
    for mapped, one in zip(zip(*jax.vmap(call)(experts), strict=True), map(call, experts), strict=True):
        for result, array in zip(mapped, one, strict=True):
            np.testing.assert_array_equal(result, array)


def on_card(tokens: int, k: int, count: int) -> Any:
    inv = ejkernel_core.invocation("moe_order", jax.ShapeDtypeStruct((tokens, k), jnp.int32), count)
    return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))


@pytest.mark.parametrize(
    ("tokens", "k", "count", "block"),
    [(64, 8, 128, 32), (16384, 2, 8, 32), (16384, 4, 32, 64), (65536, 8, 128, 64), (16384, 8, 1024, 128)],
)
def test_blocks_fill_the_card(tokens: int, k: int, count: int, block: int) -> None:
    inv = on_card(tokens, k, count)
    assert moe_order.heuristic_cfg(inv) == Config(block)
    assert [*moe_order.config_space(inv)] == [*map(Config, BLOCKS)]


def test_more_experts_are_refused() -> None:
    moe_order.check_cfg(on_card(8, 2, 1024), Config())
    with pytest.raises(Unsupported, match="counts up to 1024 experts; not 1025"):
        moe_order.heuristic_cfg(on_card(8, 2, 1025))
