"""The calls of ``flash_attention`` that are measured and recorded, and those that compilers check without a device.

No results are checked on them: their arrays are large, and drawn by JAX. They have the same numbers in all runs and
dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example

BENCHMARK, RESOURCES, VMEM, ESTIMATE = (frozenset({use}) for use in ("benchmark", "resources", "vmem", "estimate"))
BF16 = "bfloat16"


def self_attention(
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    dtype: str = "float32",
    *,
    causal: bool = True,
    window: int | None = None,
    kv_heads: int | None = None,
    soft_cap: float | None = None,
    bias: bool = False,
    sinks: bool = False,
    sequences: int | None = None,
    uses: Iterable[str] = BENCHMARK,
) -> Example:
    """Self-attention of ``length`` tokens.

    ``window`` is the number of keys on the left that a query sees besides its own, and on the right too unless
    ``causal``. The bias has an entry for each head and pair of tokens, and each head has a sink. ``sequences`` is the
    number of packed sequences, of random lengths, in a batch of one.

    >>> self_attention(1, 4096, 16, 128, "bfloat16", window=1023, kv_heads=4).name
    'B1 S4096 H16/4 D128 bfloat16 causal, window 1023'
    """
    if sequences is not None and batch != 1:
        raise ValueError(f"packed sequences are a batch of 1; got {batch}")
    options: dict[str, Any] = {"causal": causal}
    if window is not None:
        options["sliding_window"] = (window, 0 if causal else window)
    if soft_cap is not None:
        options["logits_soft_cap"] = soft_cap
    words = ["causal" if causal else "full"]
    words += [] if window is None else [f"window {window}"]
    words += [] if soft_cap is None else [f"soft cap {soft_cap:g}"]
    words += [name for name, is_present in (("bias", bias), ("sinks", sinks)) if is_present]
    words += [] if sequences is None else [f"{sequences} sequences"]
    shape, kv_shape = (batch, length, heads, head_dim), (batch, length, kv_heads or heads, head_dim)
    arguments = partial(_arguments, shape, kv_shape, dtype, bias, sinks, sequences, options)
    return _example(_size(shape, kv_heads, dtype), words, arguments, dtype, uses)


def _example(size: str, words: Iterable[str], arguments: Any, dtype: str, uses: Iterable[str]) -> Example:
    name, wrt = f"{size} {', '.join(words)}", ("query", "key", "value")
    return Example(name, "flash_attention", arguments, dtype, wrt, checks=frozenset(), uses=frozenset(uses))


def _size(shape: tuple[int, ...], kv_heads: int | None, dtype: str) -> str:
    batch, length, heads, head_dim = shape
    return f"B{batch} S{length} H{heads}{'' if kv_heads is None else f'/{kv_heads}'} D{head_dim} {dtype}"


def _arguments(
    shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: str,
    bias: bool,
    sinks: bool,
    sequences: int | None,
    options: dict[str, Any],
    draw: int,
) -> dict[str, Any]:
    _, length, heads, _ = shape
    keys = jax.random.split(jax.random.key(draw), 4)  # the benchmarks draw the cotangent of the output from the fourth
    arguments = {
        name: jax.random.normal(key, size, jnp.float32).astype(dtype)
        for name, key, size in zip(("query", "key", "value"), keys, (shape, kv_shape, kv_shape), strict=False)
    }
    if sequences is not None:
        arguments = {name: array[0] for name, array in arguments.items()}
    if bias:
        arguments["bias"] = _normal(10 * draw + 7, (1, heads, length, length), dtype)
    if sinks:
        arguments["softmax_aux"] = _normal(10 * draw + 8, (heads,), dtype)
    if sequences is not None:
        arguments |= dict.fromkeys(("cum_seqlens_q", "cum_seqlens_k"), boundaries(length, sequences, draw))
    return {**arguments, **options}


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normally distributed numbers that bfloat16 represents exactly, so that they are the same in every dtype."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)


def boundaries(length: int, sequences: int, draw: int = 0) -> Any:
    """The boundaries of packed sequences of at least one token, n + 1 integers from 0 to ``length``."""
    inner = np.random.default_rng(draw).choice(length - 1, sequences - 1, replace=False)
    return np.concatenate([[0], np.sort(inner) + 1, [length]]).astype(np.int32)


# -- measured and recorded -------------------------------------------------------------------------------------------

#: Sizes of common models.
COMMON = (
    self_attention(4, 4096, 16, 128, BF16, causal=False),
    self_attention(4, 4096, 16, 128, BF16),
    self_attention(1, 16384, 16, 128, BF16, causal=False),
    self_attention(1, 16384, 16, 128, BF16),
    self_attention(4, 4096, 32, 64, BF16),
    self_attention(2, 8192, 32, 128, BF16, kv_heads=8),
    self_attention(8, 2048, 16, 128, BF16),
)
#: Other head dims, and each option by itself.
VARIED = (
    *(self_attention(1, 8192, 16, head_dim, BF16) for head_dim in (64, 96, 128, 192, 256)),
    self_attention(1, 16384, 16, 128, BF16, window=1023),
    self_attention(1, 16384, 16, 128, BF16, sequences=8),
    self_attention(1, 16384, 16, 128, BF16, sequences=64),
    self_attention(1, 8192, 16, 128, BF16, soft_cap=30.0),
    self_attention(1, 8192, 16, 128, BF16, bias=True),
    self_attention(1, 8192, 16, 128, BF16, sinks=True),
)
#: Other lengths, batches of short sequences, a very long one, and groups of eight heads that share their keys.
SCALED = (
    *(self_attention(1, length, 16, dim, BF16) for dim in (64, 256) for length in (512, 1024, 4096, 8192, 16384)),
    *(self_attention(1, length, 16, 128, BF16) for length in (512, 1024, 4096)),
    *(self_attention(batch, length, 16, 128, BF16) for batch, length in ((32, 512), (16, 1024))),
    self_attention(1, 131072, 2, 128, BF16),
    self_attention(2, 8192, 32, 128, BF16, kv_heads=4),
)
#: Training with grouped heads on one device and on a few: batch and heads are divided over devices.
TRAINED = (
    *(self_attention(batch, 4096, 32, 128, BF16, kv_heads=8) for batch in (1, 2, 4)),
    self_attention(1, 8192, 32, 128, BF16, kv_heads=8),
    *(self_attention(4, 4096, heads, 128, BF16, kv_heads=heads // 8) for heads in (8, 16, 32)),
)
#: Long calls that cuDNN refuses.
WITHOUT_CUDNN = (
    self_attention(1, 16384, 16, 128, BF16, soft_cap=30.0),
    self_attention(1, 16384, 16, 128, BF16, sinks=True),
    self_attention(1, 16384, 16, 128, BF16, sequences=8),
    self_attention(1, 16384, 16, 128, BF16, window=4095, sinks=True),
    self_attention(1, 16384, 16, 128, BF16, window=4095, soft_cap=30.0),
)

# -- compiled without a device ---------------------------------------------------------------------------------------

#: Every head dim that kernels for GPUs are compiled for, by the size of an element: float16 compiles as bfloat16 does.
FOR_GPUS = tuple(
    self_attention(1, 4096, 16, head_dim, dtype, uses=RESOURCES)
    for dtype in ("bfloat16", "float32")
    for head_dim in (64, 96, 128, 192, 256)
)


def _everything(draw: int) -> dict[str, Any]:
    """A call with all arguments that may be combined."""
    heads, length = 4, 2048
    arguments = _arguments((1, length, heads, 128), (1, length, 2, 128), BF16, False, False, None, {}, draw)
    ids = np.arange(length, dtype=np.int32)[None] * 4 // length + 1
    return arguments | {
        "bias": jax.random.normal(jax.random.key(10 * draw + 7), (1, heads, length, length), jnp.float32),
        "attention_mask": jax.random.bernoulli(jax.random.key(10 * draw + 9), 0.7, (1, 1, length, length)),
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
        "softmax_aux": _normal(10 * draw + 8, (heads, 2), BF16),
        "causal": True,
        "logits_soft_cap": 30.0,
        "dropout_prob": 0.1,
        "dropout_seed": np.int32(draw),
    }


def _cached(draw: int, dtype: str, names: tuple[str, ...]) -> dict[str, Any]:
    """A call on a cache that is not full, with these of its positions."""
    arguments = _arguments((2, 2048, 4, 128), (2, 2048, 2, 128), dtype, False, False, None, {"causal": True}, draw)
    slots, lengths = np.arange(2048, dtype=np.int32), np.array([1500, 900 + draw], np.int32)
    positions = {
        "q_start": lengths - np.int32(700),
        "kv_lengths": lengths,
        "kv_positions": np.where(slots < lengths[:, None], slots, np.int32(-1)),
    }
    return arguments | {name: positions[name] for name in names}


#: The memory of TPU kernels is compared with its estimate in these calls.
FOR_TPU_MEMORY = (
    *(self_attention(1, 4096, 4, head_dim, BF16, kv_heads=2, uses=VMEM) for head_dim in (128, 64, 256)),
    self_attention(1, 2048, 4, 128, "float32", kv_heads=2, uses=VMEM),
    _example(_size((1, 2048, 4, 128), 2, BF16), ["everything"], _everything, BF16, VMEM),
    *(
        _example(_size((2, 2048, 4, 128), 2, dtype), [*names], partial(_cached, dtype=dtype, names=names), dtype, VMEM)
        for dtype in (BF16, "float32")
        for names in (("kv_lengths",), ("q_start", "kv_positions"))
    ),
)
#: The times of TPU kernels and of JAX's own ones are estimated for these calls.
FOR_TPU_TIME = (
    self_attention(1, 4096, 8, 128, BF16, uses=ESTIMATE),
    self_attention(1, 4096, 8, 128, BF16, kv_heads=2, uses=ESTIMATE),
    self_attention(1, 16384, 8, 128, BF16, uses=ESTIMATE),
    self_attention(1, 4096, 8, 64, BF16, uses=ESTIMATE),
    self_attention(1, 4096, 8, 256, BF16, uses=ESTIMATE),
    self_attention(1, 4096, 8, 128, BF16, window=1023, uses=ESTIMATE),
)


@cache
def sizes() -> tuple[Example, ...]:
    """Each call once, with all its uses."""
    examples: dict[str, Example] = {}
    measured = (*COMMON, *SCALED, *TRAINED, *WITHOUT_CUDNN, *VARIED)
    for example in (*measured, *FOR_GPUS, *FOR_TPU_MEMORY, *FOR_TPU_TIME):
        uses = examples[example.name].uses if example.name in examples else frozenset[str]()
        examples[example.name] = attrs.evolve(example, uses=example.uses | uses)
    return tuple(examples.values())
