"""The lines of the pages of attention over pages and its update for programs that come from a server: beside NumPy in
float64, and beside the other libraries where they are installed.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
import ejkernel_ops
from ejkernel_ops.ragged_paged_attention.examples import DECODE, MIXED, Sizes, drawn
from ejkernel_ops.ragged_paged_attention.random_calls import as_dtype, expected
from tests.pages import functions_of

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations"
PAGE, UPDATE_PAGE = OPERATIONS / "ragged_paged_attention.md", OPERATIONS / "update_kv_pages.md"


LINES = functions_of(PAGE)
CASES = {
    "decode": DECODE,
    "mixed": MIXED,
    "a prompt": Sizes((37,), (37,), 16),
    "speculative": Sizes((4, 4, 3), (40, 9, 21), 8, 8, 2, 80),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "window of its own key": {"sliding_window": 1},
    "cap and scale": {"soft_cap": 1.5, "sm_scale": 0.3},
}


def step_of(sizes: Sizes, fill: float = np.nan) -> dict[str, Any]:
    """A call in float32, in which numbers that no query may see are NaN, or ``fill``, as peers need it."""
    call = as_dtype(drawn(sizes, 5), "float32")
    call["kv_pages"] = jnp.where(jnp.isnan(call["kv_pages"]), fill, call["kv_pages"])
    return call


def in_float64(call: dict[str, Any], sm_scale: float, sliding_window: int | None, soft_cap: float | None) -> Any:
    window = None if sliding_window is None else (sliding_window - 1, 0)
    options = {"softmax_scale": sm_scale, "sliding_window": window, "logits_soft_cap": soft_cap}
    return expected({**call, **options})[0]


def of_jax(**options: Any) -> dict[str, Any]:
    """With the defaults of jax."""
    return {"sm_scale": 1.0, "sliding_window": None, "soft_cap": None, **options}


close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


# -- jax, levanter -----------------------------------------------------------------------------------------------------


def arrays_of(call: dict[str, Any], count: int) -> list[Any]:
    names = ("query", "kv_pages", "kv_lens", "block_tables", "query_start_loc")
    return [*(jnp.asarray(call[name]) for name in names), jnp.array([count], jnp.int32)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_jax(case: str, options: str) -> None:
    """The last sequence does not count."""
    call = step_of(CASES[case]) | {"num_seqs": len(CASES[case].keys) - 1}
    given = OPTIONS[options]
    out = LINES["attention_of_jax"](*arrays_of(call, call["num_seqs"]), **given)
    close(out, in_float64(call, **of_jax(**given)))


@pytest.mark.parametrize(
    ("options", "dtype"), [*((name, None) for name in OPTIONS), ("window", "float8_e4m3fn"), ("cap and scale", "int8")]
)
@pytest.mark.parametrize("case", CASES)
def test_the_reference_of_jax(case: str, options: str, dtype: str | None) -> None:
    peer = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    count = len(CASES[case].keys)
    query, pages, *tables = arrays_of(step_of(CASES[case], 0.0), count)
    given = dict(OPTIONS[options])
    if dtype is not None:
        pages = jnp.clip(pages * 30, -120, 120).astype(dtype)
        given |= {"k_scale": 0.03, "v_scale": 0.05}
    right = peer.ref_ragged_paged_attention(query, pages, *tables, **given)
    out = LINES["attention_of_jax"](query, pages, *tables, **given)
    close(out[: len(right)], right)
    assert not out[len(right) :].any()


@pytest.mark.parametrize("name", ["mask_value", "vmem_limit_bytes", "num_kv_pages_per_block", "num_queries_per_block"])
def test_arguments_of_its_kernel_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"^ragged_paged_attention: .*{name}.*; .*(leave it out|Config)"):
        LINES["attention_of_jax"](*arrays_of(step_of(DECODE), 4), **{name: 1})


@dataclasses.dataclass(frozen=True)
class Named:
    """An array with names of axes, as haliax has them."""

    array: Any
    axes: tuple[str, ...]


def named(array: Any, axes: str) -> Any:
    """An array of haliax where it is installed."""
    try:
        import haliax
    except ImportError:
        return Named(array, tuple(axes.split()))
    return haliax.named(array, tuple(axes.split()))


@pytest.mark.parametrize("is_scalar", [True, False])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("case", CASES)
def test_levanter(case: str, soft_cap: float | None, is_scalar: bool) -> None:
    """As its layer calls it. What it does not use is -1, also in lengths and starts."""
    sizes = CASES[case]
    call = step_of(sizes)
    count, unused = len(sizes.keys), np.full(2, -1, np.int32)
    query, pages, lengths, tables, starts, _ = arrays_of(call, count)
    lengths, starts = (jnp.concatenate([array, unused]) for array in (lengths, starts))
    tables = jnp.concatenate([tables, jnp.full((2, tables.shape[1]), -1)])
    heads = query.reshape(query.shape[0], sizes.kv_heads, -1, query.shape[2])
    q = named(heads, "position kv_head q_heads_per_group head_size")
    kv_pages = named(pages, "page slot kv_head head_size")
    page_indices, kv_lens = named(tables, "seq page"), named(lengths, "seq")
    num_seqs = jnp.array(count if is_scalar else [count])
    step = kv_lens, page_indices, named(starts, "seq"), num_seqs
    out = LINES["attention_of_levanter"](q, kv_pages, *step, sm_scale=0.2, soft_cap=soft_cap)
    assert type(out) is type(q)
    assert out.axes == q.axes
    close(out.array.reshape(query.shape), in_float64(call, **of_jax(sm_scale=0.2, soft_cap=soft_cap)))


# -- EasyDeL -----------------------------------------------------------------------------------------------------------

UNIFIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "no window and cap": {"sliding_window": 0, "logits_soft_cap": 0.0},
    "cap and scale": {"logits_soft_cap": 1.5, "softmax_scale": 0.3},
    "sinks": {"softmax_aux": np.array([0.5, -1.0, 2.0, 0.0], np.float32)},
}


def arrays_of_easydel(call: dict[str, Any]) -> list[Any]:
    query, pages, *tables, _ = arrays_of(call, 0)
    return [query, pages[:, :, ::2], pages[:, :, 1::2], *tables]


def of_unified(sliding_window: int | None = None, logits_soft_cap: float | None = None, **options: Any) -> Any:
    window = (sliding_window - 1, 0) if sliding_window else None
    return {"sliding_window": window, "logits_soft_cap": logits_soft_cap or None, **options}


@pytest.mark.parametrize("options", UNIFIED)
@pytest.mark.parametrize("sizes", [DECODE, MIXED], ids=["decode", "mixed"])
def test_easydel(sizes: Sizes, options: str) -> None:
    call, given = step_of(sizes), UNIFIED[options]
    out = LINES["unified_attention"](*arrays_of_easydel(call), **given)
    close(out, expected({**call, **of_unified(**given)})[0])


@pytest.mark.parametrize("options", UNIFIED)
@pytest.mark.parametrize("sizes", [DECODE, MIXED], ids=["decode", "mixed"])
def test_the_kernel_of_easydel(sizes: Sizes, options: str) -> None:
    peer = pytest.importorskip("ejkernel.kernels._xla.unified_attention", reason="ejKernel is not in the environment")
    arrays = arrays_of_easydel(step_of(sizes, 0.0))
    given = {name: jnp.array(x) if isinstance(x, np.ndarray) else x for name, x in UNIFIED[options].items()}
    close(LINES["unified_attention"](*arrays, **given), peer.unified_attention(*arrays, **given))


@pytest.mark.parametrize("name", ["alibi_slopes", "qq_bias"])
def test_biases_of_easydel_are_refused(name: str) -> None:
    arrays = arrays_of_easydel(step_of(DECODE))
    with pytest.raises(TypeError, match=f"^ragged_paged_attention: .*'{name}'; attention over pages has no"):
        LINES["unified_attention"](*arrays, **{name: jnp.ones(4)})


def test_the_class_is_registered_and_computes_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In modules with the names of EasyDeL's, because it is in no environment of this project."""
    registered = []
    registry = types.SimpleNamespace(register=lambda operation: registered.append(operation) or operation)
    output = types.SimpleNamespace
    modules = {
        "easydel": {},
        "easydel.caching": {"unwrap_metadata": lambda metadata, kind: metadata[kind]},
        "easydel.operations": {"AttentionOutput": output, "OperationRegistry": registry},
        "easydel.operations.kernels": {"UnifiedAttn": object},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    LINES["register_in_easydel"]()
    operation = registered[0]()
    operation.metadata = types.SimpleNamespace(runtime_dtype=jnp.float32)
    call = step_of(DECODE)
    query, keys, values, lengths, tables, starts = arrays_of_easydel(call)
    step = types.SimpleNamespace(context_lens=lengths, pages_tables=tables, query_start_loc=starts)
    caches = types.SimpleNamespace(key_cache=keys, value_cache=values)
    options = {"softmax_scale": 0.3, "sliding_window": 5, "logits_soft_cap": None, "softmax_aux": None}
    ignored = {"key": None, "mask_info": None, "bias": None, "dropout_prob": 0.0}
    given = {"cache_view": caches, "cache_metadata": {"ragged": step}, "causal": True, **options, **ignored}
    result = operation.forward_native(query=query[None], **given)
    assert result.cache_view is caches
    close(result.attention_outputs[0], expected({**call, "softmax_scale": 0.3, "sliding_window": (4, 0)})[0])


# -- the third version on TPUs -----------------------------------------------------------------------------------------

#: By name: the page's form of a cache (pages, page_size, 2 * heads, head_dim), whose heads are in packs.
PACKS = {"without packs": (), "of bfloat16": (2,), "of 8 bits": (4,)}


def v3_of(call: dict[str, Any], packs: tuple[int, ...], cache_dim: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The arguments by name. The pages have no tokens of this step yet, and unused entries are a page of no sequence:
    EasyDeL's kernel writes all pages of a table.
    """
    rng = np.random.default_rng(3)
    query, pages, lengths, tables, starts, _ = arrays_of(call, 0)
    is_page = lambda entries: (entries >= 0) & (entries < len(pages))
    spare = np.setdiff1d(np.arange(len(pages)), np.asarray(tables))[0]
    tokens, _, dim = query.shape
    heads = pages.shape[2] // 2
    cache = np.array(jnp.pad(pages, ((0, 0),) * 3 + ((0, cache_dim - dim),)))
    keys, values = rng.normal(size=(2, tokens, heads, dim)).astype(np.float32)
    return {
        "queries": query.astype(dtype),
        "keys": jnp.asarray(keys, dtype),
        "values": jnp.asarray(values, dtype),
        "kv_cache": jnp.asarray(cache, dtype).reshape(*cache.shape[:2], -1, *packs, cache_dim),
        "kv_lens": lengths,
        "page_indices": jnp.where(is_page(tables), tables, spare).reshape(-1),
        "cu_q_lens": starts,
        "distribution": jnp.array([1, 1, len(lengths)], jnp.int32),
    }


def written(given: dict[str, Any], count: int) -> Any:
    """The cache as (pages, page_size, 2 * heads, cache_dim) with the tokens of so many sequences, by loops."""
    cache = np.array(given["kv_cache"], np.float64)
    cache = cache.reshape(*cache.shape[:2], -1, cache.shape[-1])
    size, dim = cache.shape[1], given["keys"].shape[2]
    tables = np.asarray(given["page_indices"]).reshape(len(given["kv_lens"]), -1)
    starts, lengths = np.asarray(given["cu_q_lens"]), np.asarray(given["kv_lens"])
    for sequence in range(count):
        for token in range(starts[sequence], starts[sequence + 1]):
            place = lengths[sequence] - starts[sequence + 1] + token
            row = cache[tables[sequence, place // size], place % size]
            row[:] = 0
            row[::2, :dim], row[1::2, :dim] = given["keys"][token], given["values"][token]
    return cache


@pytest.mark.parametrize("packs", PACKS)
@pytest.mark.parametrize("cache_dim", [64, 128])
@pytest.mark.parametrize("options", ["plain", "window", "cap and scale"])
def test_v3(options: str, cache_dim: int, packs: str) -> None:
    """The last sequence does not count: it is not written, its tokens are 0, and what it has is of no meaning."""
    call, count = step_of(MIXED), len(MIXED.keys) - 1
    given = v3_of(call, PACKS[packs], cache_dim)
    given["distribution"] = given["distribution"].at[2].set(count)
    given["cu_q_lens"] = given["cu_q_lens"].at[count + 1 :].set(-5)
    given["kv_lens"] = given["kv_lens"].at[count:].set(2**31 - 1)
    right_cache = written(given, count)
    shape = given["kv_cache"].shape
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    out, cache = LINES["attention_of_v3"](**given, attention_sink=sinks, **OPTIONS[options])
    assert cache.shape == shape
    np.testing.assert_array_equal(np.asarray(cache, np.float64).reshape(right_cache.shape), right_cache)
    right = {**call, "kv_pages": right_cache[..., :64], "num_seqs": count, "softmax_aux": sinks}
    close(out, in_float64(right, **of_jax(**OPTIONS[options])))


def test_v3_of_8_bits() -> None:
    """Keys and values come as they are stored."""
    call = step_of(DECODE, 0.0)
    given = v3_of(call, (4,), 64, jnp.bfloat16)
    for name in ("kv_cache", "keys", "values"):
        given[name] = given[name].astype(jnp.float8_e4m3fn)
    right = written({**given, "keys": given["keys"].astype(float), "values": given["values"].astype(float)}, 4)
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    out, cache = LINES["attention_of_v3"](**given, sm_scale=0.1, **scales)
    assert cache.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(cache, np.float64).reshape(right.shape), right)
    query = np.asarray(given["queries"], np.float64)
    right_out = expected({**call, "query": query, "kv_pages": right, "softmax_scale": 0.1, **scales})[0]
    np.testing.assert_allclose(np.asarray(out, np.float64), right_out, atol=0.02)


def test_v3_writes_into_the_cache_that_it_is_given() -> None:
    given = v3_of(step_of(MIXED), (2,), 128)
    program = jax.jit(LINES["attention_of_v3"], donate_argnames="kv_cache").lower(**given).compile()
    memory, size = program.memory_analysis(), given["kv_cache"].nbytes
    assert memory.alias_size_in_bytes == size
    assert "copy(" not in "".join(re.findall(rf".*f32\[{given['kv_cache'].shape[0]},.*", program.as_text()))


@pytest.mark.parametrize("name", ["q_scale", "use_causal_mask", "update_kv_cache", "custom_mask", "out_dtype"])
def test_arguments_of_v3_that_are_not_there_are_named(name: str) -> None:
    given = v3_of(step_of(DECODE), (2,), 64)
    with pytest.raises((TypeError, ValueError), match=f"^ragged_paged_attention: .*{name}"):
        LINES["attention_of_v3"](**given, **{name: 1.0})


def test_heads_that_fill_a_pack_are_refused() -> None:
    given = v3_of(step_of(DECODE), (2,), 64)
    wide = jnp.concatenate([given["kv_cache"], given["kv_cache"]], axis=2)
    with pytest.raises(ValueError, match=r"update_kv_pages: kv_pages: takes 2\*kv_heads = 4"):
        LINES["attention_of_v3"](**{**given, "kv_cache": wide})


@pytest.mark.parametrize("options", ["plain", "window", "cap and scale"])
@pytest.mark.parametrize("case", CASES)
def test_tokamax(case: str, options: str) -> None:
    peer = pytest.importorskip("tokamax._src.ops.batched_rpa.reference", reason="tokamax 0.0.17 is not installed")
    given = v3_of(step_of(CASES[case], 0.0), (), 128)
    right, right_cache = peer.batched_ragged_paged_attention_reference(**given, **OPTIONS[options])
    out, cache = LINES["attention_of_v3"](**given, **OPTIONS[options])
    close(out, right)
    np.testing.assert_array_equal(cache, right_cache)


@pytest.mark.parametrize("options", ["plain", "window", "cap and scale"])
@pytest.mark.parametrize("case", ["decode", "mixed"])
def test_v3_of_easydel(case: str, options: str) -> None:
    """Its window begins at that of a sequence's last query, so with a window only this one is compared."""
    peer = pytest.importorskip("ejkernel.kernels._xla.ragged_page_attention_v3", reason="ejKernel is not installed")
    given = v3_of(step_of(CASES[case], 0.0), (2,), 128, jnp.bfloat16)
    names = {"page_indices": "block_tables", "cu_q_lens": "query_start_loc"}
    theirs = {names.get(name, name): array for name, array in given.items()}
    options_there = {"sm_scale": "softmax_scale", "soft_cap": "logits_soft_cap"}
    there = {options_there.get(name, name): value for name, value in OPTIONS[options].items()}
    out, cache = LINES["attention_of_v3"](**given, **OPTIONS[options])
    right, right_cache = peer.ragged_page_attention_v3(**theirs, **there)
    ends = np.asarray(given["cu_q_lens"])
    compared = np.unique(ends[1:][np.diff(ends) > 0] - 1) if options == "window" else np.arange(ends[-1])
    np.testing.assert_allclose(*(np.asarray(x, np.float32)[compared] for x in (out, right)), atol=0.03)
    np.testing.assert_array_equal(np.asarray(cache, np.float32), np.asarray(right_cache, np.float32))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_tables_of_sglang(size: int) -> None:
    """By the loop of its reference: the pages of a sequence begin at its first token, counted in whole pages."""
    lengths, most = np.array([5, 16, 1, 33]), 40
    counts = -(-lengths // size)
    row = np.random.default_rng(4).permutation(100)[: counts.sum() + 3]
    starts = np.concatenate([[0], np.cumsum(counts)])
    tables = LINES["tables_of_sglang"](jnp.array(row), jnp.array(starts * size), size, most)
    for sequence, count in enumerate(counts):
        np.testing.assert_array_equal(tables[sequence, :count], row[starts[sequence] :][:count])


# -- the update --------------------------------------------------------------------------------------------------------

SLICES = np.array([[9, 30, 0, 7], [0, 2, 5, 9], [2, 3, 4, 9]], np.int32)  # the last one does not count


def test_update_of_slots() -> None:
    update = functions_of(UPDATE_PAGE)["kv_cache_update"]
    rng = np.random.default_rng(6)
    tokens, cache = rng.normal(size=(11, 6, 8)).astype(np.float32), rng.normal(size=(48, 6, 8)).astype(np.float32)
    right = cache.copy()
    for slot, token, count in SLICES[:, :3].T:
        right[slot : slot + count] = tokens[token : token + count]
    given = (jnp.array(tokens), SLICES, jnp.array(cache), jnp.array([3]))
    np.testing.assert_array_equal(update(*given, page_size=16), right)
    try:
        from easydel.caching.ragged_page.utils import kv_cache_update_jax
    except ImportError:
        return
    theirs = kv_cache_update_jax(given[0], given[1], given[2], given[3], page_size=16)
    np.testing.assert_array_equal(theirs, right)


def test_update_in_the_cache_of_easydel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module with the names of EasyDeL's."""

    @dataclasses.dataclass(frozen=True)
    class View:
        key_cache: Any
        value_cache: Any
        replace = dataclasses.replace

    module = types.ModuleType("easydel.caching")
    vars(module).update(UnifiedAttentionCacheView=View, unwrap_metadata=lambda metadata, kind: metadata[kind])
    monkeypatch.setitem(sys.modules, "easydel", types.ModuleType("easydel"))
    monkeypatch.setitem(sys.modules, "easydel.caching", module)
    functions_of(UPDATE_PAGE)["write_in_easydel"]()
    rng = np.random.default_rng(7)
    tokens = rng.normal(size=(2, 1, 11, 3, 8)).astype(np.float32)
    caches = rng.normal(size=(2, 3, 16, 3, 8)).astype(np.float32)
    step = types.SimpleNamespace(slot_mapping=jnp.array(SLICES), num_kv_update_slices=jnp.array([3]))
    before: Any = View(*map(jnp.array, caches))
    view = before.concatenate_to_cache(*map(jnp.array, tokens), {"ragged": step})
    for new, cache, own in zip((view.key_cache, view.value_cache), caches, tokens, strict=True):
        right = cache.reshape(48, 3, 8).copy()
        for slot, token, count in SLICES[:, :3].T:
            right[slot : slot + count] = own[0, token : token + count]
        np.testing.assert_array_equal(new.reshape(right.shape), right)


# -- names -------------------------------------------------------------------------------------------------------------

ROWS = re.findall(r"^\| (`.*?) \| (.*?) \|$", PAGE.read_text().partition("### vLLM")[2].partition("\n###")[0], re.M)


def test_the_table_of_names_is_read() -> None:
    assert len(ROWS) > 15


@pytest.mark.parametrize(("there", "here"), ROWS)
def test_names_of_vllm_are_answered(there: str, here: str) -> None:
    """Each with the name that stands beside it; where that is none, with the reason."""
    ours = set(re.findall(r"`(\w+)", here))
    for name in re.findall(r"`(\w+)", there):
        if name in ours:
            continue
        with pytest.raises(TypeError) as raised:
            ejkernel_core.call("ragged_paged_attention", **step_of(DECODE), **{name: 1})
        answer = str(raised.value).partition(f"'{name}'; ")[2]
        assert answer, f"{name} has no other name: {raised.value}"
        is_there = any(re.search(rf"\b{own}\b", answer) for own in ours)
        assert is_there or here.startswith("none"), f"{name}: {answer}"


def test_the_typed_function_answers_too() -> None:
    with pytest.raises(TypeError, match="'seq_lens' is called 'kv_lens' here"):
        ejkernel_ops.ragged_paged_attention(jnp.ones((1, 1, 1)), seq_lens=1)  # type: ignore[call-overload]
