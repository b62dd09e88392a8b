"""moe_route on a GPU: all of it in one call, against its definition in plain JAX, by the device's clock.

Experts are compared with the definition's: those of scores that are nearly equal may differ. The sizes of the groups
and the order of the tokens have to be exactly those of the experts that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_ops.moe_route import definition
from ejkernel_ops.moe_route.examples import large

from . import suite
from ._report import Cell
from .suite import OURS

XLA = "XLA"
#: The most milliseconds of a call.
LIMITS = {"65536 tokens, 8 of 128": 0.1}
#: The most time of a choice, relative to the best kernel.
CHOICE_LIMIT = 1.03
#: The largest share of experts that may differ from the definition's, and the largest distance of a weight.
NEAR_TIES, WEIGHT_ERROR = 1e-4, 1e-5
SMALL = large(96, 16, 4)


def run(backend: str | None = None, rounds: int = suite.ROUNDS, small: bool = False) -> suite.Report:
    """The measured calls of the operation, or with ``small`` one that a CPU can run."""
    backends = [name for name in ejkernel_core.registry.backends("moe_route") if name != "reference"]

    def columns(one: suite.Measurement) -> dict[str, Cell]:
        best = one.over_best(backends)
        return {**one.over_ours([XLA]), **({} if best is None else {"over the best": best})}

    def bars(measurements: Sequence[suite.Measurement]) -> Iterator[suite.Bar]:
        for one in measurements:
            name = one.example.name
            if name in LIMITS:
                yield suite.Bar(name, 1e3 * one.seconds[OURS], LIMITS[name], "ms")
            if (best := one.over_best(backends)) is not None:
                yield suite.Bar(f"{name}: chosen / best", best, CHOICE_LIMIT, "times")

    return suite.run(
        "moe_route",
        peers(),
        examples=[SMALL] if small else None,
        names={SMALL.name} if small else None,
        backend=backend,
        backends=backends,
        check=lambda example, inputs, contender, results, expected: wrong_routes(results, jax.device_get(expected)),
        columns=columns,
        bars=bars,
        rounds=rounds,
    )


def peers() -> dict[str, suite.Peer | str | None]:
    """The peers of a call at any shape."""
    return {XLA: by_definition}


def by_definition(arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """For XLA to fuse what it can."""
    options = {"score": "softmax", "expert_bias": None, "num_groups": None, "renormalize": True, "scaling_factor": 1.0}
    given = {name: value for name, value in arguments.items() if not hasattr(value, "shape")}
    return lambda **arrays: definition.forward({**options, **given, **arrays})


def wrong_routes(results: Sequence[Any], expected: Sequence[Any]) -> Iterator[str]:
    """A sentence for each result that is wrong."""
    share, distance, are_sizes_right, is_order_right = jax.device_get(_differences(tuple(results), tuple(expected)))
    if not share <= NEAR_TIES:
        yield f"a share of {share:.1e} of the experts differs; {NEAR_TIES:.1e} is allowed"
    if not distance <= WEIGHT_ERROR:
        yield f"weights of the same experts are off by up to {distance:.1e}; {WEIGHT_ERROR:.1e} is allowed"
    if not are_sizes_right:
        yield "group_sizes are not those of the experts"
    if not is_order_right:
        yield "token_order is not that of the experts"


@jax.jit
def _differences(results: Sequence[Any], expected: Sequence[Any]) -> tuple[Any, ...]:
    (weights, experts, sizes, order), (expected_weights, expected_experts, *_) = results, expected
    is_same = experts == expected_experts
    distance = jnp.where(is_same, jnp.abs(weights - expected_weights), 0).max(initial=0)
    own_sizes, own_order = definition.ordered(experts, sizes.shape[0])
    return (~is_same).mean(), distance, (sizes == own_sizes).all(), (order == own_order).all()
