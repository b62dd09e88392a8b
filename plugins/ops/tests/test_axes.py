"""What follows from the axes of attention, beyond what its calls show: how it may be cut over devices, and what counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import registry
from ejkernel_ops.flash_attention.axes import AXES, BACKWARD


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def arguments(kv_heads: int = 2) -> dict[str, Any]:
    return {
        "query": struct(2, 6, 4, 8),
        "key": struct(2, 9, kv_heads, 8),
        "value": struct(2, 9, kv_heads, 5),
        "bias": struct(1, 4, 6, 9),
        "q_segment_ids": struct(2, 6),
        "kv_segment_ids": struct(2, 9),
        "softmax_aux": struct(4, 3),
        "out": struct(2, 6, 4, 5),
        "lse": struct(2, 4, 6),
        "wrt": ("query", "key", "bias", "softmax_aux"),
    }


# The factors of query heads and of key heads, and over which of them the gradient of a key is a sum.
GROUPS = {
    4: (("kv_heads",), ("kv_heads",), ()),
    2: (("kv_heads", "heads/kv_heads"), ("kv_heads",), ("heads/kv_heads",)),
    1: (("heads",), ("kv_heads",), ("heads",)),
}


@pytest.mark.parametrize("kv_heads", GROUPS)
def test_batch_and_heads_may_be_cut(kv_heads: int) -> None:
    heads, keys, sums = GROUPS[kv_heads]
    batch, q_len, kv_len = ("batch",), ("q_len",), ("kv_len",)
    rule = AXES.partitioning(arguments(kv_heads))
    assert rule.arrays == {
        "query": (batch, q_len, heads, ("head_dim",)),
        "key": (batch, kv_len, keys, ("head_dim",)),
        "value": (batch, kv_len, keys, ("value_dim",)),
        "bias": (("bias.0",), heads, q_len, kv_len),
        "q_segment_ids": (batch, q_len),
        "kv_segment_ids": (batch, kv_len),
        "softmax_aux": (heads, ("sinks",)),
    }
    assert rule.results == {"out": (batch, q_len, heads, ("value_dim",)), "lse": (batch, heads, q_len)}
    assert rule.whole == {"q_len", "kv_len", "head_dim", "value_dim", "sinks", "bias.0"}
    assert rule.sums == {}
    gradients = BACKWARD.partitioning(arguments(kv_heads))
    assert {name: {*over} for name, over in gradients.sums.items()} == {
        **({"key": {*sums}} if sums else {}),
        "bias": {"batch"},
        "softmax_aux": {"batch"},
    }
    assert gradients.results == {name: gradients.arrays[name] for name in arguments()["wrt"]}


def part(rule: Any, dimensions: Any, array: Any, factor: str, index: int) -> Any:
    """Half of the array, along one factor of its dimensions; all of it, where none of them has it."""
    flat = [name for own in dimensions for name in own]
    if factor not in flat:
        return array
    split = array.reshape([rule.sizes[name] for name in flat])
    place = flat.index(factor)
    half = np.split(np.asarray(split), 2, place)[index]
    sizes = [[rule.sizes[name] // (2 if name == factor else 1) for name in own] for own in dimensions]
    return jnp.asarray(half.reshape([int(np.prod(own)) for own in sizes]))


def joined(rule: Any, name: str, parts: Any, factor: str) -> Any:
    dimensions = rule.results[name]
    if factor in rule.sums.get(name, ()):
        return sum(parts)
    flat = [each for own in dimensions for each in own]
    sizes = [rule.sizes[each] // (2 if each == factor else 1) for each in flat]
    whole = np.concatenate([np.asarray(each).reshape(sizes) for each in parts], flat.index(factor))
    return whole.reshape([int(np.prod([rule.sizes[each] for each in own])) for own in dimensions])


@pytest.mark.parametrize("kv_heads", GROUPS)
def test_halves_along_every_factor_that_may_be_cut_give_the_whole(kv_heads: int) -> None:
    shapes = {name: like for name, like in arguments(kv_heads).items() if name not in ("out", "lse", "wrt")}
    arrays = AXES.samples(shapes, jax.random.key(0))
    ids = np.random.default_rng(0).integers(1, 3, (2, 9)).astype(np.int32)
    arrays |= {"q_segment_ids": jnp.asarray(ids[:, :6]), "kv_segment_ids": jnp.asarray(ids)}
    wrt = ("query", "key", "value", "bias", "softmax_aux")

    def forward(given: Any) -> dict[str, Any]:
        out, lse = registry.call("flash_attention", **given, return_lse=True, softmax_scale=0.3, backend="reference")
        return {"out": out, "lse": lse}

    def backward(given: Any) -> dict[str, Any]:
        gradients = registry.call("flash_attention_bwd", **given, softmax_scale=0.3, wrt=wrt, backend="reference")
        return dict(zip(wrt, gradients, strict=True))

    results = forward(arrays)
    saved = {**arrays, **results, "d_out": results["out"] + 1, "d_lse": results["lse"] - 1}
    for run, axes, given in ((forward, AXES, arrays), (backward, BACKWARD, {**saved, "wrt": wrt})):
        rule = axes.partitioning(given)
        given = {name: value for name, value in given.items() if name != "wrt"}
        free = [name for name, size in rule.sizes.items() if name not in rule.whole and size > 1]
        assert "batch" in free
        for factor in free:
            halves = [
                run({name: part(rule, rule.arrays[name], value, factor, i) for name, value in given.items()})
                for i in range(2)
            ]
            for name, wanted in run(given).items():
                got = joined(rule, name, [half[name] for half in halves], factor)
                np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5, err_msg=f"{factor} {name}")


def test_what_counts() -> None:
    assert AXES.counted(arguments()) == {
        "query": ("batch", "q_len", "heads", None),
        "key": ("batch", "kv_len", "kv_heads", None),
        "value": ("batch", "kv_len", "kv_heads", None),
        "bias": (None, "heads", "q_len", "kv_len"),  # one for all of the batch
        "q_segment_ids": ("batch", "q_len"),
        "kv_segment_ids": ("batch", "kv_len"),
        "softmax_aux": ("heads", None),
    }
