"""The calls for benchmarks, records and compilers: names, uses, shapes and numbers."""

from __future__ import annotations

import doctest

import jax
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops.flash_attention import sizes
from ejkernel_ops.flash_attention.sizes import boundaries, self_attention

EXAMPLES = sizes.sizes()


def test_doctests():
    outcome = doctest.testmod(sizes)
    assert outcome.attempted
    assert not outcome.failed


def test_the_operation_has_these_examples():
    names = [example.name for example in ejkernel_core.registry.operation("flash_attention").examples()]
    assert len(names) == len(set(names))
    assert {example.name for example in EXAMPLES} <= {*names}
    assert all(example.checks == frozenset() for example in EXAMPLES)


@pytest.mark.parametrize(("use", "count"), [("benchmark", 44), ("resources", 10), ("vmem", 9), ("estimate", 6)])
def test_the_number_of_calls_of_each_use(use, count):
    assert sum(use in example.uses for example in EXAMPLES) == count


def test_a_call_with_two_uses_is_one_example():
    name = "B1 S4096 H16 D128 bfloat16 causal"
    (example,) = (example for example in EXAMPLES if example.name == name)
    assert example.uses == {"benchmark", "resources"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_example_is_a_valid_call(example):
    inv = ejkernel_core.invocation("flash_attention", **example.abstract())
    assert inv["query"].dtype == example.dtype


def test_the_name_of_a_call_has_all_its_options():
    example = self_attention(
        1, 64, 4, 16, kv_heads=2, window=9, soft_cap=0.7, bias=True, sinks=True, sequences=3, causal=True
    )
    assert example.name == "B1 S64 H4/2 D16 float32 causal, window 9, soft cap 0.7, bias, sinks, 3 sequences"
    shapes = {name: value.shape for name, value in example.abstract().items() if hasattr(value, "shape")}
    assert shapes == {
        "query": (64, 4, 16),
        "key": (64, 2, 16),
        "value": (64, 2, 16),
        "bias": (1, 4, 64, 64),
        "softmax_aux": (4,),
        "cum_seqlens_q": (4,),
        "cum_seqlens_k": (4,),
    }
    options = {name: value for name, value in example.abstract().items() if not hasattr(value, "shape")}
    assert options == {"causal": True, "sliding_window": (9, 0), "logits_soft_cap": 0.7}
    assert self_attention(1, 64, 4, 16, causal=False, window=9).abstract()["sliding_window"] == (9, 9)


def test_the_numbers_of_recorded_comparisons_do_not_change():
    arguments = self_attention(2, 8, 4, 16, kv_heads=2, sinks=True).arguments(0)
    keys = jax.random.split(jax.random.key(0), 4)
    np.testing.assert_array_equal(arguments["query"], jax.random.normal(keys[0], (2, 8, 4, 16)))
    np.testing.assert_array_equal(arguments["value"], jax.random.normal(keys[2], (2, 8, 2, 16)))
    sinks = jax.random.normal(jax.random.key(8), (4,), "bfloat16").astype("float32")
    np.testing.assert_array_equal(arguments["softmax_aux"], sinks)


def test_the_bias_has_the_same_numbers_in_every_dtype_and_other_numbers_in_another_draw():
    rounded, exact = (self_attention(1, 8, 2, 16, dtype, bias=True) for dtype in ("bfloat16", "float32"))
    np.testing.assert_array_equal(np.asarray(rounded.arguments(0)["bias"], np.float32), exact.arguments(0)["bias"])
    first, second = (exact.arguments(draw) for draw in (0, 1))
    assert all((first[name] != second[name]).any() for name in ("query", "key", "value", "bias"))


def test_packed_sequences_fill_the_length():
    np.testing.assert_array_equal(boundaries(64, 64), np.arange(65))
    five = boundaries(64, 5)
    assert (five[0], five[-1], len(five), five.dtype) == (0, 64, 6, np.int32)
    assert (np.diff(five) > 0).all()
    with pytest.raises(ValueError, match="packed sequences are a batch of 1; got 2"):
        self_attention(2, 64, 2, 16, sequences=5)
