"""Random calls of attention over pages, and a proof of a kernel on them: `check`.

Results are compared with those of `expected`, which is NumPy in float64, one query at a time. All that no query may see
is NaN: keys behind lengths, and pages of no sequence. Entries of tables that are not read are -1 or no page at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import ejkernel_core

from .examples import Sizes, drawn
from .tiles import paged_attention_metadata

Arguments = dict[str, Any]

#: By dtype: the largest error, as a part of the largest number of the array, or of 1.
TOLERANCES = {"float64": 1e-11, "float32": 3e-5, "float16": 8e-3, "bfloat16": 5e-2}
PAGE_SIZES = (1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256, 1024)
DIMS = (16, 64, 80, 96, 128, 192, 256)
FP8, INT8 = "float8_e4m3fn", "int8"


# -- the proof -----------------------------------------------------------------------------------------------------


def check(
    seed: int,
    *,
    registry: Any = None,
    backend: str | None = None,
    cfg: Any = None,
    dtype: str = "float32",
    most_keys: int = 4097,
    without: frozenset[str] = frozenset(),
    page_sizes: tuple[int, ...] = PAGE_SIZES,
) -> None:
    """Raise AssertionError unless a kernel has the right results for the random call ``seed``, and the same bits twice.

    ``without`` are the arguments that it does not take, or "fp8_query", "pages of 8 bits", "other v_head_dim".
    """
    registry = ejkernel_core.registry if registry is None else registry
    call = as_dtype(random_call(seed, most_keys, without, page_sizes), dtype)
    options = {"backend": backend, "cfg": cfg, "return_lse": True}
    out, lse = registry.call("ragged_paged_attention", **call, **options)
    again, _ = registry.call("ragged_paged_attention", **call, **options)
    assert np.asarray(out).tobytes() == np.asarray(again).tobytes(), f"random call {seed}: other bits the second time"
    right_out, right_lse = expected(call)
    # An output of 8 bits' queries is bfloat16.
    _compare(f"random call {seed}: out", out, right_out, TOLERANCES[str(out.dtype)])
    _compare(f"random call {seed}: lse", lse, right_lse, TOLERANCES[dtype])


def as_dtype(call: Arguments, dtype: str) -> Arguments:
    """The call with its float64 arrays in a dtype."""
    return {
        name: jnp.asarray(x, dtype) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x
        for name, x in call.items()
    }


def _compare(name: str, array: Any, right: np.ndarray, tolerance: float) -> None:
    actual = np.asarray(array, np.float64)
    is_finite = np.isfinite(right)
    assert actual.shape == right.shape, f"{name}: {actual.shape}, not {right.shape}"
    assert (actual[~is_finite] == right[~is_finite]).all(), f"{name}: infinities elsewhere"
    largest = max(1.0, np.abs(right[is_finite]).max(initial=0))
    error = np.abs(actual[is_finite] - right[is_finite]).max(initial=0)
    assert error <= tolerance * largest, f"{name}: an error of {error:.3g} beside numbers up to {largest:.3g}"


# -- calls -----------------------------------------------------------------------------------------------------------


def random_call(
    seed: int,
    most_keys: int = 4097,
    without: frozenset[str] = frozenset(),
    page_sizes: tuple[int, ...] = PAGE_SIZES,
) -> Arguments:
    """A call of a few sequences with any of the options, in NumPy: numbers are float64."""
    rng = np.random.default_rng([5, seed])
    sizes = _sizes(rng, most_keys, without, page_sizes)
    call = drawn(sizes, seed)
    call |= _options(rng, sizes)
    if "kv_pages" in call and rng.random() < 0.4:
        pages = call.pop("kv_pages")
        call |= {"key_pages": pages[:, :, ::2], "value_pages": pages[:, :, 1::2]}
    if rng.random() < 0.35 and "pages of 8 bits" not in without:
        call |= _narrow(rng, call, without)
    call |= _of_a_layer(rng, call)
    return {name: value for name, value in call.items() if name not in without}


def _sizes(rng: np.random.Generator, most_keys: int, without: frozenset[str], page_sizes: tuple[int, ...]) -> Sizes:
    sequences = int(rng.choice([1, 2, 3, 6]))
    kind = rng.choice(["decode", "speculative", "mixed", "mixed"])
    most = {"decode": 1, "speculative": 6, "mixed": 70}[str(kind)]
    least = 1 if kind == "decode" else 0
    ends = [1, 2, 40, most_keys + 1]
    lengths = [int(rng.integers(max(end // 20, 1), end)) if end > 1 else 0 for end in rng.choice(ends, sequences)]
    queries = [int(rng.integers(least, most + 1)) for _ in range(sequences)]
    # A sequence without keys may have queries; another one has no more queries than keys.
    queries = [min(count, length) if length else count for count, length in zip(queries, lengths, strict=True)]
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 4, 5, 8]))
    dim = int(rng.choice(DIMS))
    return Sizes(
        tuple(queries),
        tuple(lengths),
        int(rng.choice(page_sizes)),
        kv_heads * group,
        kv_heads,
        dim,
        int(rng.choice(DIMS)) if rng.random() < 0.2 and "other v_head_dim" not in without else None,
        int(rng.choice([0, 0, 1, 5])) or int(sum(queries) == 0),
    )


def _options(rng: np.random.Generator, sizes: Sizes) -> Arguments:
    options: Arguments = {}
    if rng.random() < 0.25:
        options["causal"] = False
    if rng.random() < 0.35:
        options["sliding_window"] = (int(rng.choice([0, 3, 40, 500])), int(rng.choice([0, 5, 100])))
    if rng.random() < 0.25:
        options["logits_soft_cap"] = float(rng.choice([0.7, 5.0]))
    if rng.random() < 0.3:
        options["softmax_aux"] = rng.normal(size=(sizes.heads, int(rng.choice([1, 2]))))
    if rng.random() < 0.3:
        options["softmax_scale"] = float(rng.choice([0.05, 0.3]))
    if rng.random() < 0.4:
        options["max_query_len"] = max(1, *sizes.queries)
    if rng.random() < 0.2:
        options["split_size"] = int(rng.choice([128, 512]))
    if rng.random() < 0.3:
        options["num_seqs"] = np.int32(rng.integers(0, len(sizes.queries) + 1))
    if rng.random() < 0.3:
        starts = np.concatenate([[0], np.cumsum(sizes.queries)]).astype(np.int32)
        tokens = int(starts[-1]) + sizes.padding
        of_step = (np.array(sizes.keys, np.int32), starts, options.get("num_seqs"))
        options["metadata"] = paged_attention_metadata(*of_step, num_tokens=tokens)
    return options


def _narrow(rng: np.random.Generator, call: Arguments, without: frozenset[str]) -> Arguments:
    """Pages of 8 bits, whose unused rows hold the largest numbers, since not all of these dtypes have NaN."""
    dtype = str(rng.choice([FP8, INT8]))
    changes: Arguments = {}
    for name in ("kv_pages", "key_pages", "value_pages"):
        if name in call:
            pages, unit = call[name], 1.0 if dtype == FP8 else 30.0
            changes[name] = np.where(np.isnan(pages), 120, np.clip(pages * unit, -120, 120)).astype(jnp.dtype(dtype))
    heads = call["key_pages"].shape[2] if "key_pages" in call else call["kv_pages"].shape[2] // 2
    for name in ("k_scale", "v_scale"):
        count = int(rng.choice([1, heads]))
        scale = (1.0 if dtype == FP8 else 1 / 30) * np.exp(rng.normal(size=count) * 0.3)
        changes[name] = scale.astype(np.float32)
    if dtype == FP8 and "fp8_query" not in without and rng.random() < 0.4:
        changes["query"] = (4 * call["query"]).astype(jnp.dtype(FP8))
        changes["q_scale"] = np.float32(0.25)
    return changes


def _of_a_layer(rng: np.random.Generator, call: Arguments) -> Arguments:
    """Behind the pages of another layer, in a third of the calls."""
    if rng.random() > 1 / 3:
        return {}
    changes: Arguments = {}
    for name in ("kv_pages", "key_pages", "value_pages"):
        if name in call:
            pages = call[name]
            other = pages[::-1] if pages.dtype.itemsize == 1 else np.full_like(pages, np.nan)
            changes[name] = np.concatenate([other, pages])
            changes["first_page"] = np.int32(len(pages))
    return changes


# -- the results in float64 ------------------------------------------------------------------------------------------


def expected(call: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The output and the lse, one query at a time."""
    query = _numbers(call["query"], call.get("q_scale"), call["query"].shape[1])
    keys, values = _keys_and_values(call)
    tokens, heads, _ = query.shape
    out, lse = np.zeros((tokens, heads, values.shape[3])), np.full((heads, tokens), -np.inf)
    starts, count = np.asarray(call["query_start_loc"]), call.get("num_seqs")
    for sequence in range(len(starts) - 1 if count is None else int(count)):
        length = int(np.asarray(call["kv_lens"])[sequence])
        slots = np.arange(length)
        page = np.asarray(call["block_tables"])[sequence][slots // keys.shape[1]] + int(call.get("first_page", 0))
        own_keys, own_values = (pages[page, slots % keys.shape[1]] for pages in (keys, values))
        for token in range(starts[sequence], starts[sequence + 1]):
            position = length - (starts[sequence + 1] - token)
            visible = _visible(call, position, slots)
            out[token], lse[:, token] = _row(call, query[token], own_keys[visible], own_values[visible])
    return out, lse


def _keys_and_values(call: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    pages = call.get("kv_pages")
    pair = (call["key_pages"], call["value_pages"]) if pages is None else (pages[:, :, ::2], pages[:, :, 1::2])
    scales = (call.get("k_scale"), call.get("v_scale"))
    keys, values = (_numbers(x, scale, x.shape[2]) for x, scale in zip(pair, scales, strict=True))
    return keys, values


def _numbers(array: Any, scale: Any, heads: int) -> np.ndarray:
    numbers = np.asarray(array).astype(np.float64)
    if scale is None:
        return numbers
    return numbers * np.broadcast_to(np.asarray(scale, np.float64).reshape(-1), heads)[:, None]


def _visible(call: Mapping[str, Any], position: int, slots: np.ndarray) -> np.ndarray:
    visible = np.ones(slots.shape, bool)
    if call.get("sliding_window") is not None:
        left, right = call["sliding_window"]
        visible &= (slots >= position - left) & (slots <= position + right)
    return visible & (slots <= position) if call.get("causal", True) else visible


def _row(call: Mapping[str, Any], query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[Any, Any]:
    """(heads, dim), and what it sees, to (heads, v_head_dim) and (heads,)."""
    heads, group = len(query), len(query) // keys.shape[1]
    scale = call.get("softmax_scale", query.shape[1] ** -0.5)
    out, lse = np.zeros((heads, values.shape[2])), np.full(heads, -np.inf)
    for head in range(heads):
        logits = keys[:, head // group] @ query[head] * scale
        if call.get("logits_soft_cap") is not None:
            logits = call["logits_soft_cap"] * np.tanh(logits / call["logits_soft_cap"])
        sinks = np.asarray(call.get("softmax_aux", np.zeros((heads, 0))), np.float64).reshape(heads, -1)[head]
        every = np.concatenate([logits, sinks])
        if every.size:
            lse[head] = every.max() + np.log(np.exp(every - every.max()).sum())
            out[head] = np.exp(logits - lse[head]) @ values[:, head // group]
    return out, lse
