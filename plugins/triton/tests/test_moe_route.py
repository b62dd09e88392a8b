"""Routing in Triton: the values of every kind of configuration, and what the heuristic chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_triton import moe_route
from ejkernel_triton.interpreter import compiled_for, interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.moe_route import Config, order

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

H200 = "NVIDIA H200"
#: All tokens in one program; some of a program at a time; all of a program at a time; one token.
CONFIGS = (Config(64, 64), Config(16, 4), Config(8, 8), Config(2, 1), Config(1, 1))
CALLS: dict[str, dict[str, Any]] = {
    "softmax": {"k": 4},
    "not renormalized": {"k": 4, "renormalize": False, "scaling_factor": 2.5},
    "softmax_after": {"k": 5, "score": "softmax_after"},
    "groups": {"k": 4, "num_groups": 3, "group_topk": 2},
    "bias": {"k": 4, "expert_bias": 0.2},
    "bias and groups": {"k": 4, "score": "sigmoid", "expert_bias": 0.2, "num_groups": 3, "group_topk": 2},
    "all experts": {"k": 12, "score": "sigmoid"},
}


@pytest.fixture(scope="module", name="registry")
def _registry() -> Iterator[Any]:
    with interpreted():
        yield interpreted_registry({"moe_route.triton": moe_route})


def logits(tokens: int, experts: int, dtype: str = "float32", step: float = 0.0) -> jax.Array:
    """Normal numbers, of which many are equal if they are multiples of a step. No zero has a sign: in XLA 0 beats -0."""
    numbers = np.random.default_rng([tokens, experts]).standard_normal((tokens, experts))
    return jnp.asarray(np.round(numbers / step) * step + 0.0 if step else numbers, dtype)


def check(registry: Any, router_logits: jax.Array, cfg: Config | None, **arguments: Any) -> None:
    """Compare all results with those of the definition."""
    if "expert_bias" in arguments:
        arguments["expert_bias"] *= jnp.sin(jnp.arange(router_logits.shape[1], dtype=jnp.float32))
    expected = ejkernel_core.call("moe_route", router_logits, **arguments, backend="reference")
    actual = registry.call("moe_route", router_logits, **arguments, backend="triton", cfg=cfg)
    np.testing.assert_allclose(actual[0], expected[0], rtol=3e-6, atol=1e-7)
    for own, reference in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(own, reference)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["different", "often equal"])
def test_every_kind_of_configuration_routes(registry: Any, name: str, step: float, cfg: Config) -> None:
    check(registry, logits(37, 12, step=step), cfg, **CALLS[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_expert_has_tokens_of_many_blocks(registry: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "HEIGHT", 8)
    check(registry, logits(150, 40, dtype), Config(4, 4), k=6)


def test_equal_logits_of_one_token_change_no_other(registry: Any) -> None:
    different = logits(24, 20)
    for equal in (different.at[13, 5:9].set(9.0), different.at[13].set(-jnp.inf)):
        check(registry, equal, Config(16, 8), k=6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after"])
def test_no_expert_of_another_group_is_chosen(registry: Any, score: str) -> None:
    """Not even where the best groups have too few experts with a finite score, or the lowest ones."""
    bias = jnp.array([0, -jnp.inf, 1, -jnp.inf, -jnp.inf, -jnp.inf, -2, -jnp.inf, jnp.inf, -jnp.inf, 0, 0])
    groups = {"score": score, "num_groups": 3, "group_topk": 1}
    numbers = logits(40, 12).at[:9, 8:].set(-jnp.inf).at[3, :6].set(-3e38)
    expected = ejkernel_core.call("moe_route", numbers, 4, expert_bias=bias, **groups, backend="reference")
    actual = registry.call("moe_route", numbers, 4, expert_bias=bias, **groups, backend="triton", cfg=Config(16, 4))
    np.testing.assert_array_equal(actual[1], expected[1])
    assert (np.ptp(actual[1] // 4, axis=1) == 0).all()


def configurations(tokens: int, experts: int, **arguments: Any) -> list[Config]:
    """Those that are offered; the first is the heuristic's."""
    router_logits = jax.ShapeDtypeStruct((tokens, experts), jnp.float32)
    inv = ejkernel_core.invocation("moe_route", router_logits, k=2, **arguments)
    on_card = attrs.evolve(inv, platform="gpu", device_kind=H200, compute_capability=(9, 0))
    offered = list(moe_route.config_space(on_card))
    assert offered[0] == moe_route.heuristic_cfg(on_card)
    return offered


@pytest.mark.parametrize(
    ("tokens", "experts", "cfg"),
    [
        (65536, 128, Config(32, 4)),
        (16384, 128, Config(16, 4)),
        (16384, 256, Config(16, 4)),
        (16384, 32, Config(16, 16)),
        (16384, 8, Config(16, 16)),
        (65536, 8, Config(32, 32)),
        (2048, 128, Config(2, 2)),
        (1_000_000, 1024, Config(32, 1)),
        (64, 128, Config(1, 1)),
        (1, 8, Config(1, 1)),
    ],
)
def test_programs_have_few_scores_and_fill_the_card(tokens: int, experts: int, cfg: Config) -> None:
    assert configurations(tokens, experts)[0] == cfg


def test_the_configurations_are_around_the_heuristic_and_fit_into_registers() -> None:
    pairs = lambda *shape, **arguments: {attrs.astuple(cfg) for cfg in configurations(*shape, **arguments)}
    assert pairs(16384, 128) == {(16, 4), (32, 4), (8, 4), (16, 2), (16, 8), (32, 8)}
    assert pairs(16384, 256) == {(16, 4), (32, 4), (8, 4), (16, 2)}
    assert pairs(16384, 32) == {(16, 16), (32, 16), (8, 8), (16, 8), (32, 32)}
    assert pairs(64, 128) == {(1, 1), (2, 1), (2, 2)}
    # Three groups take 4 x 512 columns, more than a warp has.
    assert pairs(64, 1023, num_groups=3, group_topk=1) == {(1, 1), (2, 1)}


@pytest.mark.parametrize("experts", [32, 128])
def test_a_warp_has_whole_rows(experts: int) -> None:
    """No reduction over a row goes through shared memory, and those of integers are single instructions."""
    call = lambda x: ejkernel_core.call("moe_route", x, 2, backend="triton", cfg=Config(8, 4))
    choose = compiled_for(H200, call, jax.ShapeDtypeStruct((65, experts), jnp.float32))[0]
    assert choose.count("redux.sync") >= 2 * 2 * 4
    if _jax_triton.triton_version() >= (3, 8):  # the barriers of a single warp have the same name in older versions
        assert choose.count("bar.sync") <= 1  # for the sum over experts, at the end
