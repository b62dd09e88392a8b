"""The axes of attention: how a call may be sharded, and which sizes count things."""

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


# The factors of query heads and of key heads, and those that the gradient of a key is summed over.
GROUPS = {
    4: (("kv_heads",), ("kv_heads",), ()),
    2: (("kv_heads", "heads/kv_heads"), ("kv_heads",), ("heads/kv_heads",)),
    1: (("heads",), ("kv_heads",), ("heads",)),
}


@pytest.mark.parametrize("kv_heads", GROUPS)
def test_batch_and_heads_may_be_sharded(kv_heads: int) -> None:
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


def half_of(rule: Any, dimensions: Any, array: Any, factor: str, index: int) -> Any:
    """Half of the array, along one factor of its dimensions; the whole array, if it does not have the factor."""
    flat = [name for names in dimensions for name in names]
    if factor not in flat:
        return array
    split = array.reshape([rule.sizes[name] for name in flat])
    piece = np.split(np.asarray(split), 2, flat.index(factor))[index]
    sizes = [[rule.sizes[name] // (2 if name == factor else 1) for name in names] for names in dimensions]
    return jnp.asarray(piece.reshape([int(np.prod(dimension)) for dimension in sizes]))


def join(rule: Any, name: str, halves: Any, factor: str) -> Any:
    dimensions = rule.results[name]
    if factor in rule.sums.get(name, ()):
        return sum(halves)
    flat = [name for names in dimensions for name in names]
    sizes = [rule.sizes[axis] // (2 if axis == factor else 1) for axis in flat]
    whole = np.concatenate([np.asarray(half).reshape(sizes) for half in halves], flat.index(factor))
    return whole.reshape([int(np.prod([rule.sizes[axis] for axis in axes])) for axes in dimensions])


@pytest.mark.parametrize("kv_heads", GROUPS)
def test_halves_along_every_factor_that_may_be_sharded_give_the_whole(kv_heads: int) -> None:
    shapes = {name: shape for name, shape in arguments(kv_heads).items() if name not in ("out", "lse", "wrt")}
    arrays = AXES.samples(shapes, jax.random.key(0))
    ids = np.random.default_rng(0).integers(1, 3, (2, 9)).astype(np.int32)
    arrays |= {"q_segment_ids": jnp.asarray(ids[:, :6]), "kv_segment_ids": jnp.asarray(ids)}
    wrt = ("query", "key", "value", "bias", "softmax_aux")

    def forward(arguments: Any) -> dict[str, Any]:
        out, lse = registry.call(
            "flash_attention", **arguments, return_lse=True, softmax_scale=0.3, backend="reference"
        )
        return {"out": out, "lse": lse}

    def backward(arguments: Any) -> dict[str, Any]:
        gradients = registry.call("flash_attention_bwd", **arguments, softmax_scale=0.3, wrt=wrt, backend="reference")
        return dict(zip(wrt, gradients, strict=True))

    results = forward(arrays)
    residuals = {**arrays, **results, "d_out": results["out"] + 1, "d_lse": results["lse"] - 1}
    for run, axes, call in ((forward, AXES, arrays), (backward, BACKWARD, {**residuals, "wrt": wrt})):
        rule = axes.partitioning(call)
        call = {name: value for name, value in call.items() if name != "wrt"}
        shardable = [name for name, size in rule.sizes.items() if name not in rule.whole and size > 1]
        assert "batch" in shardable
        for factor in shardable:
            halves = [
                run({name: half_of(rule, rule.arrays[name], value, factor, i) for name, value in call.items()})
                for i in range(2)
            ]
            for name, expected in run(call).items():
                actual = join(rule, name, [half[name] for half in halves], factor)
                np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5, err_msg=f"{factor} {name}")


def test_sizes_that_count_things() -> None:
    assert AXES.counted(arguments()) == {
        "query": ("batch", "q_len", "heads", None),
        "key": ("batch", "kv_len", "kv_heads", None),
        "value": ("batch", "kv_len", "kv_heads", None),
        "bias": (None, "heads", "q_len", "kv_len"),  # the batch shares it
        "q_segment_ids": ("batch", "q_len"),
        "kv_segment_ids": ("batch", "kv_len"),
        "softmax_aux": ("heads", None),
    }
