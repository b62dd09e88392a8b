"""The collectives in the compiled programs are those of the documentation's table, and there is no branch."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

KINDS = ("collective-permute", "all-gather", "all-to-all", "reduce-scatter", "all-reduce", "conditional")


def collectives(function: Any, *arguments: Any) -> dict[str, int]:
    """How many of each kind the compiled program has."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS}
    return {kind: count for kind, count in counts.items() if count}


def forward(case: Any) -> dict[str, int]:
    return collectives(lambda arrays: case.on_shards(arrays)[0], case.in_order(case.arrays()))


def backward(case: Any) -> dict[str, int]:
    """Of the backward alone, from what the forward has saved."""
    arrays = case.in_order(case.arrays())
    out = case.in_order(case.cotangents())["out"]
    _, pull_back = jax.vjp(lambda arrays: case.on_shards(arrays)[0], arrays)
    return collectives(pull_back, out.astype(jnp.float32))


#: By backend: of the forward, and of the backward.
TABLE = {
    "gather": ({"all-gather": 2}, {"all-gather": 2, "reduce-scatter": 2}),
    "ulysses": ({"all-to-all": 4}, {"all-to-all": 9}),
    "ring": ({"collective-permute": 3}, {"collective-permute": 7}),
}


@pytest.mark.parametrize("backend", TABLE)
def test_causal_forward(make_case: Any, backend: str) -> None:
    assert forward(make_case(backend=backend, options={"causal": True})) == TABLE[backend][0]


@pytest.mark.parametrize("backend", TABLE)
def test_causal_backward(make_case: Any, backend: str) -> None:
    assert backward(make_case(backend=backend, options={"causal": True})) == TABLE[backend][1]


@pytest.mark.long
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("backend", TABLE)
def test_full_and_other_value_dim(make_case: Any, backend: str, check_vma: bool) -> None:
    """The keys and values of a ring are one array also where their shapes differ."""
    case = make_case(backend=backend, dims=(8, 16), check_vma=check_vma)
    assert (forward(case), backward(case)) == TABLE[backend]


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 8])
def test_a_ring_of_other_sizes(make_case: Any, devices: int) -> None:
    case = make_case(backend="ring", devices=devices, length=64, options={"causal": True})
    assert forward(case) == {"collective-permute": devices - 1}
    assert backward(case) == {"collective-permute": 2 * devices - 1}


@pytest.mark.long
def test_ids_travel_with_the_keys(make_case: Any) -> None:
    case = make_case(backend="ring", has_ids=True, options={"causal": True})
    assert forward(case) == {"collective-permute": 6}


@pytest.mark.parametrize("backend", TABLE)
def test_nothing_on_one_device(make_case: Any, backend: str) -> None:
    case = make_case(backend=backend, devices=1, options={"causal": True})
    assert forward(case) == {}


@pytest.mark.parametrize("backend", TABLE)
def test_only_the_arrays_and_the_results_are_saved(make_case: Any, backend: str) -> None:
    """Nothing of a step, and nothing of other devices."""
    case = make_case(backend=backend, options={"causal": True})
    arrays = case.in_order(case.arrays())
    results, pull_back = jax.vjp(case.on_shards, arrays)
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(pull_back))
    assert saved <= sum(array.nbytes for array in (*arrays.values(), *results))
