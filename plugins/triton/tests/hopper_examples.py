"""The examples of operations as the kernels for Hopper take them, for their proofs on the CPU and on a card."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ejkernel_core import Example
from ejkernel_ops.flash_attention import examples as flash_attention
from ejkernel_ops.flash_attention.few_queries import few_queries
from ejkernel_ops.grouped_matmul import examples as grouped_matmul
from ejkernel_triton.flash_attention_decode._refusals import MOST_QUERIES

DTYPES = ("bfloat16", "float16")
#: What the sizes of matrices are multiples of: 16 bytes in memory, also for one half of the columns.
K, N = 8, 16
#: The checks in which two devices share the matrices.
SHARDED = {"sharding", "sharded_derivatives"}


# -- attention ------------------------------------------------------------------------------------------------------

REFUSED_ARGUMENTS = {"bias", "attention_mask", "dropout_prob", "dropout_seed"}
#: Numbers that float16 does not have.
OVERFLOWING = {"soft-cap-of-overflowing-logits"}
REFUSED = {"other value_dim", "negative scale"}


def attention_examples(examples: Sequence[Example], dtypes: tuple[str, str]) -> Iterator[Example]:
    """The examples, in float16 or bfloat16 instead of float32. The name of an example decides, so that the choice does not
    depend on other examples.
    """
    for wide in examples:
        made = wide.abstract()
        empty = 0 in (*made["query"].shape, *made["key"].shape)
        if wide.features & REFUSED:
            continue
        if "float32" in wide.features and not empty:
            dtype = "bfloat16" if wide.name in OVERFLOWING else dtypes[zlib.crc32(wide.name.encode()) % 2]
            if made["query"].shape[-1] % 8 == 0:
                yield _narrow_attention(wide, dtype)


def _narrow_attention(wide: Example, dtype: str) -> Example:
    def arguments(draw: int) -> dict[str, object]:
        return {name: x for name, x in wide.arguments(draw).items() if name not in REFUSED_ARGUMENTS}

    sets = tuple(names for names in wide.wrt_sets if not REFUSED_ARGUMENTS & {*names})
    shared = {"long": wide.long, "batched": wide.batched, "wrt_sets": sets}
    narrowed = flash_attention.example(wide.name, arguments, wide.checks, dtype=dtype, **shared)
    varied = [one for one in wide.variations if not (REFUSED_ARGUMENTS & {*one.arguments(0)} or one.features & REFUSED)]
    return attrs.evolve(narrowed, variations=tuple(_narrow_attention(one, dtype) for one in varied))


def few_queries_on_hopper(examples: Sequence[Example], dtypes: tuple[str, str]) -> Iterator[Example]:
    """The examples as the decode kernel takes them: in 16 bits, in place of float32 in a dtype by the example's name."""
    for one in few_queries(examples, MOST_QUERIES):
        if _is_for_decoding(one):
            dtype = dtypes[zlib.crc32(one.name.encode()) % 2] if one.dtype == "float32" else one.dtype
            yield _in_dtype(one, "bfloat16" if one.name in OVERFLOWING else dtype)


def _is_for_decoding(one: Example) -> bool:
    made = one.abstract()
    return "kv_positions" not in one.features and not any(made[name].shape[-1] % 8 for name in ("query", "value"))


def _in_dtype(one: Example, dtype: str) -> Example:
    shared = {"long": one.long, "batched": one.batched, "wrt_sets": one.wrt_sets}
    narrow = flash_attention.example(one.name, one.arguments, one.checks, dtype=dtype, **shared)
    varied = tuple(_in_dtype(other, dtype) for other in one.variations if _is_for_decoding(other))
    return attrs.evolve(narrow, wrt=one.wrt, variations=varied)


# -- losses of language models --------------------------------------------------------------------------------------


def loss_examples(wide: Sequence[Example]) -> Iterator[Example]:
    """The examples of losses and log-probabilities in 16 bits, with rows that the copy engine can read. The name of an
    example decides on its dtype, so that it does not depend on other examples.

    Programs are in bfloat16: they have gradients of 1e-5, where neighbouring numbers of float16 are a percent apart.
    Calls of one word are left out where it would be padded to eight equal ones: their gradient, which is exactly 0 for
    one word, is 0 for eight only by cancellation.
    """
    for one in wide:
        if "empty" not in one.features and not _is_padded_word(one):
            dtype = "bfloat16" if "programs" in one.checks else DTYPES[zlib.crc32(one.name.encode()) % 2]
            yield _narrow_loss(one, one.dtype if one.dtype in DTYPES else dtype)


def _is_padded_word(one: Example) -> bool:
    return "transpose_weight" not in one.features and one.abstract()["weight"].shape[-1] == 1


def _narrow_loss(wide: Example, dtype: str) -> Example:
    return attrs.evolve(
        wide,
        arguments=lambda draw: _padded_loss(wide.arguments(draw)),
        dtype=dtype,
        features=wide.features - {wide.dtype} | {dtype},
        variations=tuple(_narrow_loss(one, dtype) for one in wide.variations),
    )


def _padded_loss(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """With more entries, which repeat the first ones, along the axes that are multiples of 16 bytes."""
    transposed = arguments.get("transpose_weight")
    multiples = {"hidden": (K,), "weight": (1, K) if transposed else (K, K), "bias": (1 if transposed else K,)}

    def padded(name: str, value: Any) -> Any:
        if name not in multiples or value is None:
            return value
        last = multiples[name]
        widths = [(0, 0)] * (value.ndim - len(last))
        sizes = value.shape[-len(last) :]
        widths += [(0, -size % multiple) for size, multiple in zip(sizes, last, strict=True)]
        return np.pad(np.asarray(value), widths, mode="wrap")

    return {name: padded(name, value) for name, value in arguments.items()}


# -- grouped products -----------------------------------------------------------------------------------------------


def grouped_examples(wide: Sequence[Example]) -> Iterator[Example]:
    """The examples in 16 bits, with matrices that the copy engine can read. The name of an example decides on its dtype,
    so that it does not depend on other examples.
    """
    for one in wide:
        if 0 not in [size for name in ("lhs", "rhs", "d_out") for size in _shape(one, name)]:
            yield _narrow_grouped(one)


def _shape(one: Example, name: str) -> tuple[int, ...]:
    array = one.abstract().get(name)
    return () if array is None else tuple(array.shape)


def _narrow_grouped(wide: Example) -> Example:
    dtype = wide.dtype if wide.dtype in DTYPES else DTYPES[zlib.crc32(wide.name.encode()) % 2]

    def arguments(draw: int) -> Mapping[str, Any]:
        return _padded(wide.arguments(draw), 2 * K if SHARDED & wide.checks else K)

    fields = {name: getattr(wide, name) for name in ("checks", "wrt", "wrt_sets", "batched", "long")}
    constructors: dict[str, Callable[..., Example]] = {
        "grouped_matmul": grouped_matmul.example,
        "grouped_matmul_d_rhs": grouped_matmul.d_rhs_example,
    }
    narrow = constructors[wide.op](wide.name, arguments, dtype=dtype, **fields)
    return attrs.evolve(narrow, variations=tuple(map(_narrow_grouped, wide.variations)))


def _padded(arguments: Mapping[str, Any], k: int) -> dict[str, Any]:
    """With more columns, which repeat the first ones. ``k``: what the contracted axis is a multiple of."""
    transposed = arguments.get("transpose_rhs")
    multiples = {
        "lhs": (1, k),
        "rhs": (1, N, k) if transposed else (1, k, N),
        "rhs_bias": (1, N),
        "d_out": (1, N),
    }

    def padded(name: str, value: Any) -> Any:
        if name not in multiples or value is None:
            return value
        widths = [(0, -size % multiple) for size, multiple in zip(value.shape, multiples[name], strict=True)]
        return np.pad(np.asarray(value), widths, mode="wrap")

    return {name: padded(name, value) for name, value in arguments.items()}
