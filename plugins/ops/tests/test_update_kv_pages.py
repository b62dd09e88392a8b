"""``update_kv_pages`` against loops in NumPy: values, who owns the pages, copies, shards, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_core
from ejkernel_core import NotDifferentiable, Registry
from ejkernel_ops import update_kv_pages
from ejkernel_ops.update_kv_pages import reference
from ejkernel_ops.update_kv_pages.operation import forward, pair

RNG = np.random.default_rng(11)
BACKENDS = ("reference", "xla")
#: Of a pool of several layers.
LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, TOKENS = 3, 5, 4, 8, 6, 7
SLOTS = np.array([3, -1, 19, 0, 12, -20, 7], np.int32)
KEY, VALUE = RNG.normal(size=(2, TOKENS, HEADS, DIM)).astype(np.float32)
POOL = RNG.normal(size=(LAYERS * PAGES, PAGE_SIZE, 2 * HEADS, DIM)).astype(np.float32)
Step = Callable[..., Any]


def expected(pages: Any, key: Any, value: Any, slots: Any, first_page: int = 0) -> np.ndarray:
    """Number by number."""
    new_pages = np.array(pages)
    for token, slot in enumerate(np.asarray(slots).tolist()):
        page, place = slot // pages.shape[1] + first_page, slot % pages.shape[1]
        if slot >= 0 and 0 <= page < pages.shape[0]:
            for head in range(key.shape[1]):
                new_pages[page, place, 2 * head] = key[token, head]
                new_pages[page, place, 2 * head + 1] = value[token, head]
    return new_pages


def divided(pages: Any) -> tuple[Any, Any]:
    """As a pair."""
    return pages[:, :, ::2], pages[:, :, 1::2]


def joined(key_pages: Any, value_pages: Any) -> np.ndarray:
    return np.stack([key_pages, value_pages], 3).reshape(*key_pages.shape[:2], -1, key_pages.shape[3])


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first_page", [None, 0, 10, 13])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint32"])
def test_values(dtype: str, first_page: int | None, backend: str) -> None:
    slots = SLOTS.astype(dtype)
    right = expected(POOL, KEY, VALUE, slots, first_page or 0)
    options = {"backend": backend} if first_page is None else {"backend": backend, "first_page": first_page}
    np.testing.assert_array_equal(update_kv_pages(KEY, VALUE, POOL, slots, **options), right)
    results = update_kv_pages(KEY, VALUE, divided(POOL), slots, **options)
    assert isinstance(results, tuple)
    np.testing.assert_array_equal(joined(*results), right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_that_an_int32_does_not_hold_are_behind_the_pages(backend: str) -> None:
    with jax.enable_x64(True):
        for slots in (np.array([2**32 + 1, 3, -(2**33) + 2]), np.array([2**32 + 1, 3, 2**64 - 1], np.uint64)):
            result = update_kv_pages(KEY[:3], VALUE[:3], POOL, slots, first_page=1, backend=backend)
            np.testing.assert_array_equal(result, expected(POOL, KEY, VALUE, [-1, 3, -1], 1))
    behind = np.array([2**31 - 1, 2**31 - 4, 19], np.int32)
    result = update_kv_pages(KEY[:3], VALUE[:3], POOL, behind, first_page=12, backend=backend)
    np.testing.assert_array_equal(result, expected(POOL, KEY, VALUE, [-1, -1, -1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_a_first_page_far_away_comes_round_to_no_other(page_size: int, backend: str) -> None:
    """In 32 bits, the places of these tokens would be in the pages again."""
    pages, key = jnp.zeros((5, page_size, 4, 8)), jnp.ones((3, 2, 8))
    slots = np.array([3, 5, 2**31 - 2], np.int32)
    for first_page in (2**30, 2**31 - 1, 2**25, 2**29, -(2**31), 1 - 2**31, -(2**30), 5, -5):
        result = update_kv_pages(key, key, pages, slots, first_page=jnp.int32(first_page), backend=backend)
        places = [int(slot) + first_page * page_size for slot in slots]
        right = sorted(place for place in places if 0 <= place < 5 * page_size)
        assert np.flatnonzero(np.asarray(result).reshape(5 * page_size, -1).any(-1)).tolist() == right
    with jax.enable_x64(True):
        for first_page in (2**32, -(2**32), 2**40 + 1):
            result = update_kv_pages(key, key, pages, slots, first_page=jnp.int64(first_page), backend=backend)
            assert not result.any()


#: By case: slices as (first slot, first token, length), how many count, and the slot of each token.
SLICES: dict[str, tuple[list[tuple[int, int, int]], int | None, list[int]]] = {
    "in order": ([(4, 0, 3), (17, 3, 2)], None, [4, 5, 6, 17, 18, -1, -1]),
    "out of order": ([(0, 5, 2), (9, 0, 1), (10, 3, 1)], None, [9, -1, -1, 10, -1, 0, 1]),
    "over the end of a page": ([(2, 1, 5)], None, [-1, 2, 3, 4, 5, 6, -1]),
    "some of them": ([(0, 0, 2), (5, 2, 2), (9, 4, 3)], 2, [0, 1, 5, 6, -1, -1, -1]),
    "none of them": ([(0, 0, 2), (5, 2, 2)], 0, [-1] * 7),
    "no slices": ([], None, [-1] * 7),
    "empty": ([(0, 0, 0), (8, 2, 1)], None, [-1, -1, 8, -1, -1, -1, -1]),
    "before the pages": ([(-2, 0, 4), (8, 5, 1)], None, [-1, -1, -1, -1, -1, 8, -1]),
    "beyond the tokens": ([(1, 6, 9)], None, [-1] * 6 + [1]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SLICES)
def test_slices(case: str, backend: str) -> None:
    slices, count, slots = SLICES[case]
    mapping = np.array(slices, np.int32).reshape(-1, 3).T
    options = {"backend": backend, "first_page": 5} | ({} if count is None else {"num_slices": count})
    step = jax.jit(lambda mapping, **traced: update_kv_pages(KEY, VALUE, POOL, mapping, **options | traced))
    traced = {} if count is None else {"num_slices": jnp.array([count])}
    right = expected(POOL, KEY, VALUE, slots, 5)
    np.testing.assert_array_equal(step(mapping, **traced), right)
    np.testing.assert_array_equal(update_kv_pages(KEY, VALUE, POOL, mapping, **options), right)


def in_8_bits(number: float, scale: float, dtype: Any) -> Any:
    """One number, rounded in another way: by the nearest of all numbers of 8 bits, and of two the one that is even."""
    quotient = np.float32(number) / np.float32(scale)
    if np.isnan(quotient):
        return np.nan if dtype == ml_dtypes.float8_e4m3fn else 0
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    numbers = codes.astype(np.float64)
    finite = np.flatnonzero(np.isfinite(numbers))
    distances = np.abs(numbers[finite] - np.clip(np.float64(quotient), numbers[finite].min(), numbers[finite].max()))
    nearest = finite[distances == distances.min()]
    even = [code for code in nearest if code % 2 == 0]
    return numbers[(even or [*nearest])[0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8])
@pytest.mark.parametrize("scales", [None, 2, 0.37, [0.5, 3.0]], ids=str)
def test_pages_of_8_bits(scales: Any, dtype: Any, backend: str) -> None:
    """Ties, what is too large, infinities, NaN, and small numbers."""
    numbers = [
        0.5,
        1.5,
        2.5,
        -3.5,
        17.0,
        19.0,
        1e-9,
        -0.002,
        447.0,
        465.0,
        -1e6,
        130.0,
        math.inf,
        -math.inf,
        math.nan,
        0,
    ]
    key = np.array(numbers, np.float32).reshape(2, 2, 4)
    pages = np.zeros((2, 2, 4, 4), dtype)
    options = {} if scales is None else {"k_scale": scales, "v_scale": jnp.asarray(scales, jnp.float32)}
    options = {
        name: np.array(scale, np.float32) if isinstance(scale, list) else scale for name, scale in options.items()
    }
    result = np.asarray(update_kv_pages(key, -key, pages, np.array([2, 1]), backend=backend, **options))
    of_heads = np.broadcast_to(1.0 if scales is None else scales, 2)
    for token, (page, place) in enumerate([(1, 0), (0, 1)]):
        for head in range(2):
            for sign in (1, -1):
                stored = result[page, place, 2 * head + (sign < 0)].astype(np.float64)
                right = [in_8_bits(sign * number, of_heads[head], dtype) for number in key[token, head]]
                np.testing.assert_array_equal(stored, right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "pages"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_tokens_have_the_dtype_of_the_pages(tokens: str, pages: str, backend: str) -> None:
    key, value = (array.astype(jnp.dtype(tokens)) for array in (KEY, VALUE))
    cache = POOL.astype(jnp.dtype(pages))
    result = update_kv_pages(key, value, cache, SLOTS, backend=backend)
    assert result.dtype == cache.dtype
    right = expected(cache, key.astype(np.float32), value.astype(np.float32), SLOTS)
    np.testing.assert_array_equal(np.asarray(result).view(np.uint8), right.view(np.uint8))


# -- in place ----------------------------------------------------------------------------------------------------------


def copies_in(compiled: Any, shape: tuple[int, ...]) -> int:
    return len(re.findall(rf"= f32\[{','.join(map(str, shape))}\]\S* copy\(", compiled.as_text()))


def check_in_place(step: Step, right: np.ndarray, *arrays: Any) -> None:
    """The pool is the first argument. The program has no room for another one, and returns its memory."""
    pool = jnp.array(POOL)
    compiled = jax.jit(step, donate_argnums=0).lower(pool, *arrays).compile()
    assert copies_in(compiled, pool.shape) == 0
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes // 2
    place = pool.unsafe_buffer_pointer()
    result = compiled(pool, *arrays)
    assert result.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_updates_in_a_program(backend: str) -> None:
    """The second one overwrites a token of the first."""

    def step(pool: Any, key: Any, value: Any, slots: Any) -> Any:
        pool = update_kv_pages(key, value, pool, slots, first_page=5, backend=backend)
        return jax.jit(lambda pool: update_kv_pages(2 * key, key, pool, slots[::-1], first_page=6, backend=backend))(
            pool
        )

    once = expected(POOL, KEY, VALUE, SLOTS, 5)
    check_in_place(step, expected(once, 2 * KEY, KEY, SLOTS[::-1], 6), KEY, VALUE, SLOTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_layers_of_a_scan_share_a_pool(backend: str) -> None:
    def step(pool: Any, keys: Any, values: Any, slots: Any) -> Any:
        def layer(pool: Any, number_and_tokens: Any) -> Any:
            number, key, value = number_and_tokens
            return update_kv_pages(key, value, pool, slots, first_page=number * PAGES, backend=backend), None

        return jax.lax.scan(layer, pool, (jnp.arange(LAYERS), keys, values))[0]

    keys, values = RNG.normal(size=(2, LAYERS, TOKENS, HEADS, DIM)).astype(np.float32)
    right = POOL
    for number in range(LAYERS):
        right = expected(right, keys[number], values[number], SLOTS, number * PAGES)
    check_in_place(step, right, keys, values, SLOTS)


@pytest.mark.parametrize("is_pair", [False, True])
def test_an_eager_call_takes_away_what_it_is_given(is_pair: bool) -> None:
    given = tuple(map(jnp.array, divided(POOL))) if is_pair else (jnp.array(POOL),)
    places = [array.unsafe_buffer_pointer() for array in given]
    form = lambda arrays: arrays if is_pair else arrays[0]
    results = update_kv_pages(KEY, VALUE, form(given), SLOTS)
    assert not any(array.is_deleted() for array in given)
    results = jax.tree.leaves(update_kv_pages(KEY, VALUE, form(given), SLOTS, donate=True))
    assert all(array.is_deleted() for array in given)
    assert [result.unsafe_buffer_pointer() for result in results] == places
    right = expected(POOL, KEY, VALUE, SLOTS)
    for result, array in zip(results, divided(right) if is_pair else (right,), strict=True):
        np.testing.assert_array_equal(result, array)
    with pytest.raises(ValueError, match=r"pages was given away, by donate=True of an earlier call"):
        update_kv_pages(KEY, VALUE, form(given), SLOTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mapped(backend: str) -> None:
    """Over pages, tokens, slots and the first page, or some of them."""
    pools, keys = np.stack([POOL, -POOL]), np.stack([KEY, 3 * KEY])
    slots, first_pages = np.stack([SLOTS, SLOTS[::-1]]), np.array([1, 7])
    call = lambda pool, key, slots, page: update_kv_pages(key, VALUE, pool, slots, first_page=page, backend=backend)
    every = jax.vmap(call)(pools, keys, slots, first_pages)
    some = jax.vmap(call, (None, 0, None, None))(POOL, keys, SLOTS, 2)
    for number in range(2):
        right = expected(pools[number], keys[number], VALUE, slots[number], first_pages[number])
        np.testing.assert_array_equal(every[number], right)
        np.testing.assert_array_equal(some[number], expected(POOL, keys[number], VALUE, SLOTS, 2))
    with pytest.raises(ValueError, match="cannot give kv_pages away, because jax.vmap does not map over it"):
        jax.vmap(lambda key: update_kv_pages(key, VALUE, jnp.array(POOL), SLOTS, donate=True))(keys)


# -- devices -----------------------------------------------------------------------------------------------------------


def registry_with_opaque_kernels() -> Registry:
    """Those of a GPU are custom calls, which XLA cannot partition: it asks for the rule of the operation."""
    registry = Registry()
    for op, kernel in (("update_kv_pages", reference.forward), ("update_kv_page_pair", reference.pair)):
        opaque = SimpleNamespace(run_backend=kernel.run_backend, PLATFORMS={"cpu": 90}, OPAQUE=("cpu",))
        registry.register(opaque, f"{op}.opaque")
    return registry


@pytest.mark.parametrize("backend", [*BACKENDS, "opaque"])
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("kind", ["automatic", "explicit", "shard_map"])
def test_heads_over_eight_devices(kind: str, is_pair: bool, backend: str) -> None:
    """Nothing is gathered, and each device updates its shard in place."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(axis_type,), devices=jax.devices()[:8])
    of_tokens, of_pages, whole = P(None, "heads"), P(None, None, "heads"), P()
    put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    cache = tuple(put(array, of_pages) for array in (divided(POOL) if is_pair else (POOL,)))
    key, value, slots = put(KEY, of_tokens), put(VALUE, of_tokens), put(SLOTS, whole)

    registry = registry_with_opaque_kernels() if backend == "opaque" else ejkernel_core.registry
    op = "update_kv_page_pair" if is_pair else "update_kv_pages"

    def step(cache: Any, key: Any, value: Any, slots: Any) -> Any:
        return jax.tree.leaves(registry.call(op, key, value, *cache, slots, first_page=3, backend=backend))

    if kind == "shard_map":
        specs = (of_pages, of_tokens, of_tokens, whole)
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=of_pages)
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, of_pages)] * len(cache)
        compiled = jax.jit(step, donate_argnums=0, out_shardings=shardings).lower(cache, key, value, slots).compile()
        places = [shard.data.unsafe_buffer_pointer() for array in cache for shard in array.addressable_shards]
        results = compiled(cache, key, value, slots)
    text = compiled.as_text()
    assert not re.findall(r"all-gather|all-to-all|all-reduce|collective-permute", text)
    assert compiled.memory_analysis().alias_size_in_bytes == POOL.nbytes // 8
    assert [shard.data.unsafe_buffer_pointer() for array in results for shard in array.addressable_shards] == places
    right = expected(POOL, KEY, VALUE, SLOTS, 3)
    for result, array in zip(results, divided(right) if is_pair else (right,), strict=True):
        np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_pages_over_devices_are_gathered(kind: AxisType) -> None:
    """A slot may be on any of them: values are right all the same."""
    mesh = jax.make_mesh((5,), ("pages",), axis_types=(kind,), devices=jax.devices()[:5])
    pool = jax.device_put(POOL, NamedSharding(mesh, P("pages")))
    np.testing.assert_array_equal(jax.jit(update_kv_pages)(KEY, VALUE, pool, SLOTS), expected(POOL, KEY, VALUE, SLOTS))


# -- the rest of the contract ------------------------------------------------------------------------------------------


def test_there_are_no_gradients() -> None:
    def loss(key: Any) -> Any:
        return update_kv_pages(key, VALUE, POOL, SLOTS).sum()

    with pytest.raises(NotDifferentiable, match="'update_kv_pages' has no gradient for key"):
        jax.grad(loss)(KEY)
    pool = jnp.array(POOL)
    gradient = jax.grad(lambda weight: (weight * update_kv_pages(KEY, VALUE, pool, SLOTS, donate=True)).sum())(2.0)
    np.testing.assert_allclose(gradient, expected(POOL, KEY, VALUE, SLOTS).sum(), rtol=1e-4)
    assert pool.is_deleted()


@pytest.mark.parametrize(("tokens", "pages"), [(6, 4), (20, 4), (0, 3)])
def test_samples_have_a_slot_for_each_token(tokens: int, pages: int) -> None:
    key, cache = jax.ShapeDtypeStruct((tokens, 2, 4), "float32"), jax.ShapeDtypeStruct((pages, 4, 4, 4), "float32")
    inv = ejkernel_core.invocation("update_kv_pages", key, key, cache, jax.ShapeDtypeStruct((tokens,), "int32"))
    slots = np.asarray(inv.operation.samples(inv, jax.random.key(1))["slot_mapping"])
    stored = slots[slots >= 0]
    assert slots.shape == (tokens,)
    assert len({*stored.tolist()}) == stored.size == min(tokens, 4 * pages)
    assert tokens == 0 or stored.max() < 4 * pages


def test_the_cost_is_that_of_the_tokens() -> None:
    key, cache = jax.ShapeDtypeStruct((10, 2, 4), "bfloat16"), jax.ShapeDtypeStruct((7, 4, 4, 4), "int8")
    inv = ejkernel_core.invocation("update_kv_pages", key, key, cache, jax.ShapeDtypeStruct((10,), "int32"))
    assert forward.cost is not None
    assert forward.cost(inv.arguments).bytes == 2 * 80 * (2 + 1) + 40


def test_calls_of_about_as_many_tokens_are_tuned_as_one() -> None:
    def key(tokens: int, pages: int, dim: int = 64) -> Any:
        token, cache = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((tokens, 2, dim), (pages, 4, 4, dim)))
        slots = jax.ShapeDtypeStruct((tokens,), "int32")
        return ejkernel_core.invocation("update_kv_pages", token, token, cache, slots).tuning_keys[-1]

    assert key(100, 40) == key(128, 64)
    assert key(100, 40) != key(129, 40)
    assert key(100, 40) != key(100, 40, dim=32)


K, POOL_8 = jnp.ones((3, 2, 8)), jnp.zeros((4, 5, 4, 8), jnp.int8)
CACHE, PLACES = jnp.zeros((4, 5, 4, 8)), jnp.arange(3)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "heads": (
        {"kv_pages": CACHE[:, :, :2]},
        ValueError,
        "kv_pages: takes 2*kv_heads = 4, with the kv_heads of key; got 2",
    ),
    "odd heads": ({"kv_pages": CACHE[:, :, :3]}, ValueError, "kv_pages: an axis must have 2*kv_heads entries; got 3"),
    "head_dim": ({"kv_pages": CACHE[..., :4]}, ValueError, "kv_pages: head_dim must be 8, as in key; got 4"),
    "value": ({"value": K[..., :4]}, ValueError, "value: head_dim must be 8, as in key; got 4"),
    "dtypes": ({"value": K.astype("float16")}, TypeError, "value: takes the key's dtype, float32; got float16"),
    "rank": ({"key": K[0]}, ValueError, "key: takes (tokens, kv heads, head_dim); got shape (2, 8)"),
    "pages": (
        {"kv_pages": CACHE[0]},
        ValueError,
        "kv_pages: takes (pages, page_size, 2 * kv heads, head_dim); got shape",
    ),
    "integers": ({"kv_pages": CACHE.astype(int)}, TypeError, "float64, float8_e4m3fn, int8; got int"),
    "narrow key": (
        {"key": K.astype(jnp.float8_e4m3fn)},
        TypeError,
        "key: takes float16, bfloat16, float32, float64; got",
    ),
    "tokens": ({"slot_mapping": PLACES[:2]}, ValueError, "slot_mapping: tokens must be 3, as in key; got 2"),
    "slots": ({"slot_mapping": PLACES * 1.0}, TypeError, "slot_mapping: takes integers; got float32"),
    "shape of slots": ({"slot_mapping": PLACES[None]}, ValueError, "takes (tokens,) or (3, slices); got shape (1, 3)"),
    "count": ({"num_slices": 1}, ValueError, "num_slices: is for slices; slot_mapping has a slot for each token"),
    "first pages": ({"first_page": PLACES}, ValueError, "first_page: takes one integer; got shape (3,)"),
    "first page": ({"first_page": 1.0}, TypeError, "first_page: takes integers; got float32"),
    "scale": ({"k_scale": 2.0}, ValueError, "k_scale: is for pages of 8 bits; these are float32"),
    "scales": (
        {"kv_pages": POOL_8, "v_scale": jnp.ones(3)},
        ValueError,
        "v_scale: must broadcast to (kv_heads,) = (2,)",
    ),
    "bool": (
        {"kv_pages": POOL_8, "k_scale": True},
        ValueError,
        "k_scale: takes a number, or one for each head; got bool",
    ),
    "pair": ({"kv_pages": (CACHE, CACHE)}, TypeError, "update_kv_pages takes kv_pages=(key_pages, value_pages), and"),
    "names": ({"key_cache": CACHE}, TypeError, "ejkernel_core.call('update_kv_page_pair', ...) takes key_pages and"),
    "other name": ({"slots": PLACES}, TypeError, "'slots' is called 'slot_mapping' here"),
    "tables": ({"block_table": PLACES}, TypeError, "'slot_mapping' takes page * page_size + row of each token"),
    "of vLLM": ({"kv_cache_dtype": "fp8"}, TypeError, "leave it out: the pages say it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    changes, error, text = REFUSED[case]
    valid = {"key": K, "value": K, "kv_pages": CACHE, "slot_mapping": PLACES}
    with pytest.raises(error, match=f"^update_kv_pages: .*{re.escape(text)}"):
        ejkernel_core.call("update_kv_pages", **valid | changes)


def test_what_a_pair_refuses() -> None:
    keys, values = divided(CACHE)
    for pages, error, text in (
        ((keys, CACHE), ValueError, "value_pages: kv_heads must be 2, as in key; got 4"),
        ((keys, values[:2]), ValueError, "value_pages: pages must be 4, as in key_pages; got 2"),
        ((keys, values[:, :3]), ValueError, "value_pages: page_size must be 5, as in key_pages; got 3"),
        ((keys, values[..., :3]), ValueError, "value_pages: v_head_dim must be 8, as in value; got 3"),
        ((keys, values.astype("float16")), TypeError, "takes the dtype of key_pages, float32; got float16"),
    ):
        with pytest.raises(error, match=f"^update_kv_page_pair: .*{re.escape(text)}"):
            update_kv_pages(K, K, pages, PLACES)
    with pytest.raises(ValueError, match="gives key_pages away, and value_pages is the same array"):
        update_kv_pages(K, K, (keys, keys), PLACES, donate=True)
    with pytest.raises(TypeError, match="pass key_pages and value_pages; one array with both is for update_kv_pages"):
        ejkernel_core.call("update_kv_page_pair", K, K, kv_pages=CACHE, slot_mapping=PLACES)
    with pytest.raises(
        TypeError, match=r"kv_pages takes an array; got tuple .*takes kv_pages=\(key_pages, value_pages"
    ):
        update_kv_pages(K, K, (keys, keys, keys), PLACES)
    assert forward.aliases == {"new_kv_pages": "kv_pages"}
    assert pair.aliases == {"new_key_pages": "key_pages", "new_value_pages": "value_pages"}


WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "behind": ({"slot_mapping": np.array([0, 20, 3])}, "slot_mapping: token 1 goes to slot 20; the pages have 20"),
    "behind, of a layer": ({"first_page": 4}, "slot_mapping: token 0 goes to slot 20; the pages have 20"),
    "before, of a layer": ({"first_page": -1}, "slot_mapping: token 0 goes to slot -5; the pages have 20"),
    "twice": ({"slot_mapping": np.array([4, 0, 4])}, "slot_mapping: 2 tokens go to slot 4"),
    "slice": ({"slot_mapping": np.array([[0, 3], [0, 2], [2, 2]])}, "slice 1 is [3 2 2], and there are 3 tokens"),
    "two slices": ({"slot_mapping": np.array([[0, 3], [0, 1], [2, 2]])}, "slot_mapping: token 1 is in two slices"),
    "count": ({"slot_mapping": np.zeros((3, 2), int), "num_slices": 3}, "num_slices: must be from 0 to 2; got 3"),
    "scale": ({"kv_pages": POOL_8, "k_scale": 0.0}, "k_scale: takes finite numbers above 0; got 0.0"),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_values_are_found_where_they_are_checked(case: str) -> None:
    changes, text = WRONG_VALUES[case]
    valid = {"key": K, "value": K, "kv_pages": CACHE, "slot_mapping": PLACES}
    with pytest.raises(ValueError, match=re.escape(text)):
        update_kv_pages(**valid | changes, validate=True)
    update_kv_pages(**valid, validate=True)


def test_right_values_are_accepted() -> None:
    slices = np.array([[0, 9, 99], [0, 2, 0], [2, 1, 7]])
    update_kv_pages(K, K, CACHE, slices, num_slices=2, first_page=2, validate=True)
    update_kv_pages(K, K, divided(POOL_8), np.array([-1, -1, 19]), k_scale=0.1, v_scale=jnp.ones(2), validate=True)
