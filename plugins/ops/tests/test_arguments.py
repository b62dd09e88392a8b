"""Wrong arguments are refused by name, with the value and what the argument takes, before anything is compiled."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Registry, hookimpl
from ejkernel_ops import flash_attention, layer_norm, rms_norm
from ejkernel_ops.flash_attention import other_names
from ejkernel_ops.flash_attention.arguments import prepare
from ejkernel_ops.flash_attention.operation import backward, forward


class UncalledKernel:
    """A kernel that fails the test if a call reaches the choice of a kernel."""

    @staticmethod
    @hookimpl
    def heuristic_cfg(inv: Any) -> None:
        raise AssertionError("the call reached a kernel")

    @staticmethod
    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> None: ...


@pytest.fixture(scope="module")
def call() -> Any:
    registry = Registry(plugins="")
    registry.register(forward)
    registry.register(backward)
    registry.register(UncalledKernel, "flash_attention.never")
    return lambda *args, **kwargs: registry.call("flash_attention", *args, **kwargs)


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


Q, K, V = array(2, 6, 4, 8), array(2, 9, 2, 8), array(2, 9, 2, 5)
PACKED = {"query": array(6, 4, 8), "key": array(9, 2, 8), "value": array(9, 2, 5)}
CU_Q, CU_K = np.array([0, 2, 6]), np.array([0, 4, 9])
IDS_Q, IDS_K = array(2, 6, dtype=np.int32), array(2, 9, dtype=np.int32)

WRONG = {
    "rank": (
        {"query": array(6, 4, 8)},
        ValueError,
        "query: takes (batch, q_len, heads, head_dim); got shape (6, 4, 8)",
    ),
    "batch": (
        {"key": array(3, 9, 2, 8), "value": array(3, 9, 2, 5)},
        ValueError,
        "key: batch must be 2, as in query; got 3",
    ),
    "heads": (
        {"key": array(2, 9, 3, 8), "value": array(2, 9, 3, 5)},
        ValueError,
        "query: heads must be a multiple of kv_heads, which is 3 in key; got 4",
    ),
    "head dim": ({"key": array(2, 9, 2, 16)}, ValueError, "key: head_dim must be 8, as in query; got 16"),
    "no head dim": ({"value": array(2, 9, 2, 0)}, ValueError, "value: value_dim must be at least 1; got 0"),
    "value": ({"value": array(2, 8, 2, 5)}, ValueError, "value: kv_len must be 9, as in key; got 8"),
    "integer query": (
        {"query": array(2, 6, 4, 8, dtype=np.int32)},
        TypeError,
        "query: takes float16, bfloat16, float32 or float64; got int32",
    ),
    "complex key": ({"key": array(2, 9, 2, 8, dtype=np.complex64)}, TypeError, "key: takes float16"),
    "mixed dtypes": (
        {"value": array(2, 9, 2, 5, dtype=np.float16)},
        TypeError,
        "key, value: take the query's dtype float32; got float32 and float16",
    ),
    "one cum_seqlens": (
        {**PACKED, "cum_seqlens_q": CU_Q},
        ValueError,
        "cum_seqlens_k: cum_seqlens_q and cum_seqlens_k",
    ),
    "other cum_seqlens": (
        {**PACKED, "cum_seqlens_k": CU_K},
        ValueError,
        "cum_seqlens_q: cum_seqlens_q and cum_seqlens_k",
    ),
    "padded and packed": (
        {"cum_seqlens_q": CU_Q, "cum_seqlens_k": CU_K},
        ValueError,
        "query: takes (total, heads, head_dim) with cum_seqlens; got shape (2, 6, 4, 8)",
    ),
    "float cum_seqlens": (
        {**PACKED, "cum_seqlens_q": CU_Q.astype(np.float32), "cum_seqlens_k": CU_K},
        TypeError,
        "cum_seqlens_q: takes integers; got float32",
    ),
    "unequal cum_seqlens": (
        {**PACKED, "cum_seqlens_q": CU_Q, "cum_seqlens_k": np.array([0, 4])},
        ValueError,
        "cum_seqlens_k: takes sequences+1 = 3, with the sequences of cum_seqlens_q; got 2",
    ),
    "cum_seqlens of rank 2": (
        {**PACKED, "cum_seqlens_q": CU_Q[None], "cum_seqlens_k": CU_K[None]},
        ValueError,
        "cum_seqlens_q: takes (sequences+1,); got shape (1, 3)",
    ),
    "dropout without a seed": ({"dropout_prob": 0.5}, ValueError, "dropout_seed: dropout_prob above 0 takes a seed"),
    "probability 1": ({"dropout_prob": 1.0, "dropout_seed": 1}, ValueError, "takes a probability in [0, 1); got 1.0"),
    "negative probability": (
        {"dropout_prob": -0.1, "dropout_seed": 1},
        ValueError,
        "dropout_prob: takes a probability",
    ),
    "float seed": ({"dropout_prob": 0.5, "dropout_seed": 1.5}, TypeError, "dropout_seed: takes integers; got float32"),
    "seeds": (
        {"dropout_prob": 0.5, "dropout_seed": CU_Q},
        ValueError,
        "dropout_seed: takes a single number; got shape (3,)",
    ),
    "key as seed": (
        {"dropout_prob": 0.5, "dropout_seed": jax.random.key(0)},
        TypeError,
        "dropout_seed: takes an integer; got a random key",
    ),
    "float causal": ({"causal": 1.0}, TypeError, "causal: takes True or False; got float 1.0"),
    "int causal": ({"causal": 1}, TypeError, "causal: takes True or False; got int 1"),
    "array causal": ({"causal": np.array(True)}, TypeError, "causal is a static option"),
    "float return_lse": ({"return_lse": 0.0}, TypeError, "return_lse: takes True or False; got float 0.0"),
    "unknown keyword": ({"casual": True}, TypeError, "unexpected keyword argument 'casual'; did you mean 'causal'?"),
    "float mask": (
        {"attention_mask": array(2, 4, 6, 9)},
        TypeError,
        "attention_mask: takes booleans; got float32 (numbers to add are bias)",
    ),
    "boolean bias": (
        {"bias": array(2, 4, 6, 9, dtype=np.bool_)},
        TypeError,
        "bias: takes floats; got bool (a boolean mask is attention_mask)",
    ),
    "bias of kv heads": (
        {"bias": array(2, 2, 6, 9)},
        ValueError,
        "bias: must broadcast to (batch, heads, q_len, kv_len) = (2, 4, 6, 9); got (2, 2, 6, 9)",
    ),
    "bias of rank 5": ({"bias": array(1, 2, 4, 6, 9)}, ValueError, "bias: must broadcast"),
    "mask shape": (
        {"attention_mask": array(6, 8, dtype=np.bool_)},
        ValueError,
        "attention_mask: must broadcast",
    ),
    "one segment ids": (
        {"q_segment_ids": IDS_Q},
        ValueError,
        "kv_segment_ids: q_segment_ids and kv_segment_ids must be",
    ),
    "segment shape": (
        {"q_segment_ids": IDS_Q, "kv_segment_ids": IDS_Q},
        ValueError,
        "kv_segment_ids: kv_len must be 9, as in key; got 6",
    ),
    "float segments": (
        {"q_segment_ids": IDS_Q.astype(np.float32), "kv_segment_ids": IDS_K},
        TypeError,
        "q_segment_ids: takes integers; got float32",
    ),
    "sinks of kv heads": (
        {"softmax_aux": array(2)},
        ValueError,
        "softmax_aux: heads must be 4, as in query; got 2",
    ),
    "integer sinks": ({"softmax_aux": array(4, dtype=np.int32)}, TypeError, "softmax_aux: takes floats; got int32"),
    "window of floats": (
        {"sliding_window": 3.0},
        TypeError,
        "sliding_window: takes an int, a pair (left, right) of ints",
    ),
    "window of three": ({"sliding_window": (1, 2, 3)}, TypeError, "sliding_window: takes an int, a pair"),
    "window of bools": ({"sliding_window": True}, TypeError, "sliding_window: takes an int, a pair"),
    "window as a list": ({"sliding_window": [4, 4]}, TypeError, "sliding_window is a static option"),
    "negative window": (
        {"sliding_window": (-1, 2)},
        ValueError,
        "sliding_window: takes sizes of at least 0; got (-1, 2)",
    ),
    "negative cap": (
        {"logits_soft_cap": -30.0},
        ValueError,
        "logits_soft_cap: takes a number above 0, or None; got -30.0",
    ),
    "boolean cap": ({"logits_soft_cap": True}, TypeError, "logits_soft_cap: takes a number, known while tracing"),
    "scale as text": (
        {"softmax_scale": "big"},
        TypeError,
        "softmax_scale: takes a number, known while tracing; got str",
    ),
    "scale beyond floats": (
        {"softmax_scale": 10**400},
        ValueError,
        "softmax_scale: takes a number that a float holds; got 1000",
    ),
    "scale of more digits than Python writes": (
        {"softmax_scale": 10**5000},
        ValueError,
        "softmax_scale: takes a number that a float holds; got int of thousands of digits",
    ),
    "scale beyond float32": (
        {"softmax_scale": 1e39},
        ValueError,
        "softmax_scale: takes a number that float32 holds; got 1e+39",
    ),
    "cap that is 0 in float32": (
        {"logits_soft_cap": Fraction(1, 10**50)},
        ValueError,
        "logits_soft_cap: takes a number that float32 holds; got Fraction(1, 1000",
    ),
    "fraction below every float": (
        {"logits_soft_cap": Fraction(1, 10**400)},
        ValueError,
        "logits_soft_cap: takes a number above 0, or None; got Fraction(1, 1000",
    ),
    "probability that is 1 as a float": (
        {"dropout_prob": Fraction(10**30 - 1, 10**30), "dropout_seed": 1},
        ValueError,
        "dropout_prob: takes a probability in [0, 1); got Fraction(999",
    ),
    "window of a fraction": ({"sliding_window": Fraction(2)}, TypeError, "sliding_window: takes an int, a pair"),
    "window far below 0": ({"sliding_window": -(10**5000)}, ValueError, "sliding_window: takes sizes of at least 0"),
    "bias of a fraction": ({"bias": Fraction(1, 2)}, TypeError, "bias takes an array; got Fraction Fraction(1, 2)"),
    **{
        f"{name} beyond 32 bits": (
            {name: number, **more},
            ValueError,
            f"flash_attention: {name} takes an int from -2**31 to 2**31 - 1, as JAX does, or a number with a dtype, "
            "as jnp.uint32 is; got ",
        )
        for name, number, more in (
            ("dropout_seed", 2**40, {"dropout_prob": 0.5}),
            ("dropout_seed", -(2**40), {}),
            ("bias", 2**70, {}),
            ("attention_mask", 10**5000, {}),
            ("cum_seqlens_q", 2**31, {"cum_seqlens_k": 1}),
        )
    },
    "infinite scale": ({"softmax_scale": np.inf}, ValueError, "softmax_scale: takes a finite number; got inf"),
    "eight bits": (
        {name: array(2, 9, 2, 8, dtype=jnp.float8_e4m3fn) for name in ("query", "key", "value")},
        TypeError,
        "query: takes float16, bfloat16, float32 or float64; got float8_e4m3fn",
    ),
    "no query": ({"query": None}, TypeError, "query takes an array; got NoneType None"),
    "query as a list": ({"query": [[1.0]]}, TypeError, "query takes an array; got list [[1.0]]"),
    "mask as text": ({"attention_mask": "all"}, TypeError, "attention_mask takes an array; got str 'all'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused_before_a_kernel_is_chosen(call: Any, what: str) -> None:
    changes, error, message = WRONG[what]
    arguments = {"query": Q, "key": K, "value": V, **changes}
    with pytest.raises(error, match=re.escape(message)):
        call(**arguments)


def test_the_front_door_raises_the_same_error() -> None:
    with pytest.raises(ValueError, match="key: batch must be 2, as in query; got 3"):
        flash_attention(Q, array(3, 9, 2, 8), array(3, 9, 2, 5))


def test_the_front_door_names_what_is_not_taken_by_position() -> None:
    message = (
        "flash_attention: takes query, key, value, bias by position; got 5 arguments; write the others by name: att"
    )
    with pytest.raises(TypeError, match=message):
        flash_attention(*[np.ones((1, 2, 2, 4))] * 5)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "advice"),
    {
        "mask_info": "'attention_mask' takes its mask, or 'q_segment_ids' and 'kv_segment_ids' its segments",
        "mesh": "call it inside jax.shard_map",
        "in_specs": "call it inside jax.shard_map, which takes in_specs",
        "normalize_output": "the output is always normalized; return_lse=True returns the log-sum-exp too",
        "block_tables": "call ragged_paged_attention for a cache of pages; 'kv_lengths' is for one that has a row for each sequence",
    }.items(),
)
def test_arguments_of_ejkernel_are_answered(name: str, advice: str) -> None:
    with pytest.raises(TypeError) as error:
        flash_attention(*[np.ones((1, 2, 2, 4))] * 3, **{name: None})  # type: ignore[call-overload]
    assert str(error.value) == f"flash_attention: got an unexpected keyword argument {name!r}; {advice}"


def test_the_front_door_refuses_none_for_causal() -> None:
    with pytest.raises(TypeError, match="causal: takes True or False; got NoneType None"):
        flash_attention(Q, K, V, causal=None)  # type: ignore[arg-type]


def test_traced_options_are_refused(call: Any) -> None:
    with pytest.raises(TypeError, match="softmax_scale is a static option.*a traced array"):
        jax.jit(lambda q, s: call(q, K, V, softmax_scale=s))(Q, 0.5)


@pytest.mark.parametrize("name", ["softmax_scale", "logits_soft_cap", "dropout_prob"])
def test_fractions_are_converted_to_floats(name: str) -> None:
    query = np.random.default_rng(0).standard_normal((1, 5, 2, 8), np.float32)
    seed = {"dropout_seed": np.uint32(2**32 - 1)}
    result, expected = (
        flash_attention(query, query, query, **{name: number}, **seed, backend="reference")
        for number in (Fraction(1, 8), 0.125)
    )
    np.testing.assert_array_equal(result, expected)


def test_a_huge_window_shows_all_keys() -> None:
    query = np.random.default_rng(0).standard_normal((1, 5, 2, 8), np.float32)
    result, expected = (
        flash_attention(query, query, query, sliding_window=window, backend="reference")
        for window in ((2**70, 10**5000), None)
    )
    np.testing.assert_array_equal(result, expected)


def complete(**changes: Any) -> dict[str, Any]:
    arrays = {name: jnp.asarray(v) for name, v in {"query": Q, "key": K, "value": V}.items() if name not in changes}
    return forward.complete({**arrays, **changes})


def test_prepared_arguments_are_canonical() -> None:
    prepared, restore = prepare(
        complete(
            bias=jnp.zeros((6, 9)),
            attention_mask=jnp.ones((4, 1, 9), bool),
            softmax_aux=jnp.zeros(4),
            sliding_window=np.int64(3),
            q_segment_ids=jnp.ones((2, 6), jnp.int8),
            kv_segment_ids=jnp.ones((2, 9), jnp.int8),
            dropout_prob=0.5,
            dropout_seed=jnp.asarray(-1),
            softmax_scale=2,
            causal=np.True_,
        )
    )
    assert prepared["bias"].shape == (1, 1, 6, 9)
    assert prepared["attention_mask"].shape == (1, 4, 1, 9)
    assert prepared["softmax_aux"].shape == (4, 1)
    assert prepared["sliding_window"] == (3, 3)
    assert prepared["q_segment_ids"].dtype == prepared["kv_segment_ids"].dtype == jnp.int32
    assert prepared["dropout_seed"].dtype == jnp.uint32
    assert int(prepared["dropout_seed"]) == 2**32 - 1
    assert type(prepared["softmax_scale"]) is float
    assert prepared["causal"] is True
    assert restore(("out", "lse")) == "out"


def test_a_packed_call_is_a_batch_of_one() -> None:
    arrays = {name: jnp.asarray(value) for name, value in PACKED.items()}
    prepared, restore = prepare(
        complete(**arrays, cum_seqlens_q=jnp.asarray(CU_Q), cum_seqlens_k=jnp.asarray(CU_K), return_lse=True)
    )
    assert prepared["query"].shape == (1, 6, 4, 8)
    assert prepared["value"].shape == (1, 9, 2, 5)
    assert restore(("o", "l")) == ("o", "l")
    assert prepared["softmax_scale"] == 8**-0.5


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.uint32])
def test_boundaries_of_any_integers_count_all_tokens(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(300, 2, 8)), jnp.float32) for _ in range(3))
    bounds = np.array([0, 100, 200])

    def attend(bounds: Any) -> Any:
        return flash_attention(q, k, v, cum_seqlens_q=bounds, cum_seqlens_k=bounds, causal=True, backend="reference")

    np.testing.assert_array_equal(attend(bounds.astype(dtype)), attend(bounds))


def test_a_window_is_no_wider_than_all_tokens() -> None:
    wide, _ = prepare(complete(sliding_window=(2**40, 3)))
    assert wide["sliding_window"] == (15, 3)


def test_preparing_canonical_arguments_changes_nothing() -> None:
    once, _ = prepare(complete(bias=jnp.zeros((6, 9)), sliding_window=2, softmax_aux=jnp.zeros((4, 3))))
    twice, _ = prepare(dict(once))
    assert {name: getattr(v, "shape", v) for name, v in once.items()} == {
        name: getattr(v, "shape", v) for name, v in twice.items()
    }


OTHER_NAMES = {
    "scale": "'softmax_scale'",
    "is_causal": "'causal'",
    "window_size": "'sliding_window'",
    "mask": "'attention_mask'",
    "implementation": "'backend'",
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_the_names_of_other_libraries_are_translated(call: Any, name: str) -> None:
    for function in (call, flash_attention):
        with pytest.raises(TypeError) as error:
            function(Q, K, V, **{name: None})
        ending = f"unexpected keyword argument {name!r}; {name!r} is called {OTHER_NAMES[name]} here"
        assert str(error.value) == f"flash_attention: got an {ending}"


def test_every_other_name_of_attention_has_one_meaning_here() -> None:
    names = [other for others in other_names.BY_NAME.values() for other in others.split()]
    assert sorted(set(names)) == sorted(names)
    assert forward.other_names["sm_scale"] == backward.other_names["sm_scale"] == "softmax_scale"


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_the_names_of_other_libraries_for_norms_are_translated(norm: Any) -> None:
    for kwargs in ({"eps": 1e-5}, {"eps": 1e-5, "quantize": "int8_row"}):
        with pytest.raises(TypeError, match=f"^{norm.__name__}: got an .* 'eps'; 'eps' is called 'epsilon' here$"):
            norm(np.ones((2, 8), np.float32), **kwargs)
    with pytest.raises(TypeError, match="'axis'; the last axis is normalized: jnp.moveaxis"):
        norm(np.ones((2, 8), np.float32), axis=0)
