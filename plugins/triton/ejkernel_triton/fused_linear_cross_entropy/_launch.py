"""Chunks of rows: XLA multiplies, and one launch computes all that depends on the logits of a chunk.

What a chunk moves in memory, in bytes for each logit, where hidden states have 16 bits. Both write the logits in
float32, as cuBLAS has summed them: rounded to bfloat16, a logit of 20 is off by up to 0.06, and the loss with it, which
has to be right to 3e-5 of its size.

===================================  =========================  =====================================
step                                 in plain JAX               here
===================================  =========================  =====================================
largest logit, sum of exponentials   4 + 4 read                 4 read
gradient of the logits               4 read, 2 written          4 read (in part by L2), 2 written
products of the gradients            2 + 2 read                 2 + 2 read
===================================  =========================  =====================================

The gradient in 16 bits has a buffer of its own, beside the logits: 6 bytes of memory for each. In place of them it
would be strided, and XLA would copy it for the products. In float32 it is written in place of the logits, for 4 bytes.
So is what the gradient of a bias is summed from, which is not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.fused_linear_cross_entropy import chunks, gradients
from ejkernel_ops.fused_linear_cross_entropy.definition import (
    LARGEST_IN_FLOAT16,
    Gradients,
    Labels,
    active_rows,
    logits_of,
    products_of_rounded,
    vocab,
)
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

from ._tiling import THREADS, Config

Arrays = dict[str, Any]
#: In place of the column of a label, as the kernel knows them: it is one of another shard, or ignored.
ELSEWHERE, IGNORED = -1, -2
#: A result that a call does not have.
ABSENT = jax.ShapeDtypeStruct((1,), jnp.float32)
NOTHING = {"hidden": False, "weight": False, "bias": False}


def forward(inv: Invocation, cfg: Config) -> Arrays:
    """The losses and the lse of the rows."""

    def step(carry: None, arrays: Arrays) -> tuple[None, Arrays]:
        return None, _launched(inv, cfg, arrays, NOTHING)

    return chunks.over_chunks(step, None, chunks.rows_of(inv), cfg.rows)[1]


def with_gradients(
    inv: Invocation, cfg: Config, cotangents: Mapping[str, Any], needs: Mapping[str, bool], dtype: Any
) -> tuple[Arrays, Gradients]:
    """The losses and the lse of the rows, and the needed gradients: as those of ``gradients``."""
    return gradients.summed(partial(_of_chunk, inv, cfg, needs), inv, cfg.rows, cotangents, needs, dtype)


def _of_chunk(inv: Invocation, cfg: Config, needs: Mapping[str, bool], arrays: Arrays) -> tuple[Gradients, Arrays]:
    rows = _launched(inv, cfg, arrays, needs)
    wide, narrow, scales = (rows.pop(name, None) for name in ("wide", "narrow", "scales"))
    if wide is None and narrow is None:
        return Gradients(), rows
    is_active = active_rows(chunks.labels_of(arrays), arrays.get("d_lse"))
    narrow = wide if narrow is None else narrow
    scale = None if scales is None else scales[:, None]
    parts = products_of_rounded(narrow, scale, arrays["hidden"], inv, is_active, needs)
    return parts._replace(bias=wide.sum(0) if needs["bias"] else None), rows


def _launched(inv: Invocation, cfg: Config, arrays: Arrays, needs: Mapping[str, bool]) -> Arrays:
    """The losses, the lse, the entropies if there are any, and the needed gradients of a chunk: "wide" in float32,
    "narrow" in the dtype of a product with the factors "scales", if there are any.
    """
    logits = logits_of(arrays["hidden"], {**inv.arguments, "bias": None, "logits_soft_cap": None})
    count, size = logits.shape
    dtype, has_product = arrays["hidden"].dtype, needs["hidden"] or needs["weight"]
    is_rounded = has_product and dtype != jnp.float32
    is_in_place = needs["bias"] or (has_product and not is_rounded)
    is_scaled = is_rounded and dtype == jnp.float16
    of_rows = jax.ShapeDtypeStruct((count,), jnp.float32)
    results = {
        **({"wide": jax.ShapeDtypeStruct((count, size), jnp.float32)} if is_in_place else {}),
        "narrow": jax.ShapeDtypeStruct((count, size), dtype) if is_rounded else None,
        "losses": of_rows,
        "lse": of_rows,
        "scales": of_rows if is_scaled else None,
        "entropies": of_rows if _has_entropy(inv, arrays) else None,
    }
    outputs = [ABSENT if result is None else result for result in results.values()]
    if count:
        arrays_of_results = _call(inv, cfg, logits, arrays, outputs, is_in_place, is_rounded, is_scaled)
    else:
        arrays_of_results = tuple(jnp.zeros(output.shape, output.dtype) for output in outputs)
    return {name: array for name, array in zip(results, arrays_of_results, strict=True) if results[name] is not None}


def _call(
    inv: Invocation,
    cfg: Config,
    logits: jax.Array,
    arrays: Arrays,
    results: list[jax.ShapeDtypeStruct],
    is_in_place: bool,
    is_rounded: bool,
    is_scaled: bool,
) -> tuple[jax.Array, ...]:
    columns = _columns(chunks.labels_of(arrays))
    optional = [inv["bias"], *(arrays.get(name) for name in ("d_loss", "d_lse", "d_entropy"))]
    # What is not read may be any array but the logits, which XLA would copy before they are updated.
    bias, d_loss, d_lse, d_entropy = (columns if array is None else array for array in optional)
    # As many columns as are 16 bytes of what a thread stores.
    vector = 8 if is_rounded and not is_in_place else 4
    lanes = min(cfg.block // vector, THREADS * cfg.num_warps)
    # jax-triton 0.3 passes a result in place among the results. Where there is none, its parameter is a constant.
    unused = () if is_in_place and _jax_triton.version() < (0, 4) else (1,)
    return _jax_triton.call(
        "ejkernel_triton.fused_linear_cross_entropy._kernels:lose",
        [logits, bias, columns, d_loss, d_lse, d_entropy],
        results,
        scalars=(logits.shape[0], *unused),
        grid=(_programs(logits.shape[0], cfg.programs),),
        constants={
            "BIAS": inv["bias"] is not None,
            "CAP": float(inv["logits_soft_cap"] or 0.0),
            "SCALE": 1 / float(inv.get("temperature", 1.0)),
            "Z_LOSS": float(inv.get("z_loss", 0.0)),
            "SMOOTHING": float(inv.get("label_smoothing", 0.0)),
            "D_LSE": "d_lse" in arrays,
            "ENTROPY": _has_entropy(inv, arrays),
            "IN_PLACE": is_in_place,
            "ROUNDED": is_rounded,
            "LARGEST": LARGEST_IN_FLOAT16 if is_scaled else 0.0,
            "VOCAB": vocab(inv),
            "DEPTH": cfg.block // (lanes * vector),
            "LANES": lanes,
            "VECTOR": vector,
        },
        num_warps=cfg.num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name=inv.op,
        aliases={0: 0} if is_in_place else None,
    )


def _has_entropy(inv: Invocation, arrays: Arrays) -> bool:
    """Whether the entropy is computed: it is a needed result, or has a cotangent."""
    return "d_entropy" in arrays or (inv.op == "linear_log_probs" and inv.needs("entropy"))


def _columns(labels: Labels) -> jax.Array:
    """The column of each label, or why it has none."""
    elsewhere = jnp.where(labels.counts, ELSEWHERE, IGNORED)
    return jnp.where(labels.is_here, labels.column, elsewhere).astype(jnp.int32)


def _programs(rows: int, most: int) -> int:
    """So many programs that each has equally many rows, or one less."""
    return math.ceil(rows / math.ceil(rows / most)) if most else rows
