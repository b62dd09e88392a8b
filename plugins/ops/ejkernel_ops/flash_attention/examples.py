"""The examples that every kernel of ``flash_attention`` is tested on.

``grid`` crosses every argument with every other; ``faults`` has one example for each fault that attention kernels are
known to have had; ``cached_examples`` are calls against a cache; ``subjects`` are small calls for JAX's transformations
and for one argument at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import attrs
import numpy as np

from ejkernel_core import Example
from ejkernel_testing import TRANSFORMS, pairwise

from .cached import cached_examples

Arguments = dict[str, Any]
Row = Mapping[str, Any]

FACTORS: dict[str, Sequence[Any]] = {
    "q_length": (129, 63, 257, 7, 1),
    "keys": ("equal", "more", "fewer"),
    "head_dim": (16, 64, 80, 128, 256),
    "value_dim": ("same", "other"),
    "group": (1, 2, 8),
    "batch": (1, 2),
    "tokens": ("padded", "segments", "packed", "packed, padding"),
    "bias": (None, "full", "heads", "keys"),
    "mask": (None, "full", "rows"),
    "sinks": (None, 1, 2),
    "scale": (None, 0.3),
    "causal": (False, True),
    "window": (None, 20, (40, 5), (0, 0)),
    "cap": (None, 3.0),
    "dropout": (0.0, 0.3),
    "lse": (True, False),
}
DIFFERENTIABLE = ("query", "key", "value", "bias", "softmax_aux")
#: The number of keys for a number of queries.
K_LENGTH = {"equal": lambda n: n, "more": lambda n: n + 66, "fewer": lambda n: max(n - n // 3, 1)}


@cache
def examples() -> tuple[Example, ...]:
    return (*faults(), *cached_examples(), *subjects(), *plain_subjects(), *accumulations(), *grid())


# -- the grid ------------------------------------------------------------------------------------------------------


def grid() -> Iterator[Example]:
    """Rows that contain every pair of choices, each row in every dtype.

    Not only the long sweep runs a third of them in float32, and a sixth in each other dtype.
    """
    for number, row in enumerate(pairwise(FACTORS, is_possible)):
        for dtype_index, dtype in enumerate(("float32", "bfloat16", "float16", "float64")):
            long = number % 6 != 2 * (dtype_index - 1) if dtype_index else number % 3 != 1
            yield example(
                f"grid{number:02}-{dtype}-{_label(row)}", partial(grid_arguments, row), dtype=dtype, long=long
            )


def is_possible(row: Row) -> bool:
    """Packed calls have a batch of one."""
    is_packed = str(row.get("tokens")).startswith("packed")
    return not (is_packed and row.get("batch", 1) != 1)


def _label(row: Row) -> str:
    lengths = f"{row['q_length']}x{K_LENGTH[row['keys']](row['q_length'])}"
    words = [lengths, f"d{row['head_dim']}", f"b{row['batch']}", f"g{row['group']}", row["tokens"].replace(", ", "+")]
    words += [name for name in ("bias", "mask", "sinks", "causal", "window", "cap", "dropout") if row[name]]
    return "-".join(words)


def grid_arguments(row: Row, draw: int) -> Arguments:
    q_length = row["q_length"]
    k_length = K_LENGTH[row["keys"]](q_length)
    batch, heads, head_dim = row["batch"], max(row["group"], 2), row["head_dim"]
    value_dim = head_dim if row["value_dim"] == "same" else head_dim // 2 + 8
    arguments = qkv(draw, batch, q_length, k_length, heads, row["group"], head_dim, value_dim)
    full = (batch, heads, q_length, k_length)
    shapes = {
        "full": full,
        "heads": (1, heads, 1, k_length),
        "keys": (batch, 1, 1, k_length),
        "rows": (batch, 1, *full[2:]),
    }
    if row["bias"]:
        arguments["bias"] = normal("bias", draw, shapes[row["bias"]])
    if row["mask"]:
        arguments["attention_mask"] = normal("mask", draw, shapes[row["mask"]]) < 0.7
    if row["sinks"]:
        arguments["softmax_aux"] = normal("sinks", draw, (heads, 2) if row["sinks"] == 2 else (heads,))
    if row["dropout"]:
        arguments |= {"dropout_prob": row["dropout"], "dropout_seed": 7 + draw}
    if row["tokens"] == "segments":
        arguments |= segments(draw, batch, q_length, k_length)
    if row["tokens"].startswith("packed"):
        arguments = packed(arguments, draw, padding=3 if "padding" in row["tokens"] else 0)
    return arguments | {
        "softmax_scale": row["scale"],
        "causal": row["causal"],
        "sliding_window": row["window"],
        "logits_soft_cap": row["cap"],
        "return_lse": row["lse"],
    }


# -- one example for each fault ---------------------------------------------------------------------------------------


def faults() -> Iterator[Example]:
    """Known faults of attention kernels, and the limits of what may be called."""
    small = partial(qkv, batch=2, heads=4, group=2, head_dim=16)
    lse = {"return_lse": True}
    calls: dict[str, Callable[[int], Arguments]] = {
        "plain": lambda draw: small(draw, q_length=64, k_length=64),
        "gqa-strides-in-the-backward": lambda d: qkv(d, 2, 63, 129, 8, 4, 32, 24),
        "mqa": lambda d: qkv(d, 2, 33, 33, 8, 8, 16) | lse,
        "bias-of-each-query-head": lambda d: (
            small(d, q_length=9, k_length=20) | {"bias": normal("bias", d, (4, 9, 20))}
        ),
        "mask-of-each-query-head": lambda d: (
            small(d, q_length=9, k_length=20) | {"attention_mask": normal("mask", d, (1, 4, 9, 20)) < 0.3}
        ),
        "bias-gradient-of-its-own-shape": lambda d: (
            small(d, q_length=9, k_length=20) | {"bias": normal("bias", d, (4, 9, 1))} | lse
        ),
        "bias-of-one-number": lambda d: small(d, q_length=9, k_length=20) | {"bias": normal("bias", d, ())} | lse,
        "bias-minus-infinity": lambda d: small(d, q_length=9, k_length=20) | {"bias": _minus_infinity(d)} | lse,
        "sinks-once-over-many-blocks": lambda d: (
            qkv(d, 1, 5, 1030, 4, 2, 16) | {"softmax_aux": normal("sinks", d, (4, 3)) + 5} | lse
        ),
        "sinks-where-nothing-is-seen": lambda d: (
            small(d, q_length=40, k_length=9) | {"softmax_aux": normal("sinks", d, (4,)), "causal": True} | lse
        ),
        "sinks-far-below": lambda d: (
            small(d, q_length=40, k_length=9) | {"softmax_aux": np.full(4, -1e30, np.float32), "causal": True}
        ),
        "dropout-in-the-backward": lambda d: (
            small(d, q_length=65, k_length=70) | {"dropout_prob": 0.5, "dropout_seed": 3 + d} | lse
        ),
        "dropout-of-much": lambda d: small(d, q_length=7, k_length=7) | {"dropout_prob": 0.95, "dropout_seed": -5 - d},
        "causal-more-queries-than-keys": lambda d: small(d, q_length=129, k_length=63) | {"causal": True} | lse,
        "causal-fewer-queries-than-keys": lambda d: small(d, q_length=63, k_length=129) | {"causal": True} | lse,
        "causal-decode": lambda d: small(d, q_length=1, k_length=257) | {"causal": True} | lse,
        "window-decode": lambda d: small(d, q_length=1, k_length=257) | {"sliding_window": (30, 0)} | lse,
        "window-of-itself-only": lambda d: small(d, q_length=63, k_length=63) | {"sliding_window": (0, 0)} | lse,
        "window-of-itself-only-causal": lambda d: (
            small(d, q_length=63, k_length=70) | {"sliding_window": (0, 0), "causal": True} | lse
        ),
        "window-to-the-right": lambda d: small(d, q_length=70, k_length=63) | {"sliding_window": (0, 9)} | lse,
        "window-fewer-queries-than-keys": lambda d: (
            small(d, q_length=63, k_length=129) | {"sliding_window": (20, 3), "causal": True} | lse
        ),
        "window-more-queries-than-keys": lambda d: small(d, q_length=129, k_length=63) | {"sliding_window": 5} | lse,
        "window-over-many-blocks": lambda d: qkv(d, 1, 1030, 1030, 1, 1, 16) | {"sliding_window": (16, 0)},
        "window-wider-than-all": lambda d: small(d, q_length=33, k_length=33) | {"sliding_window": 2**40},
        "lse-of-odd-length": lambda d: qkv(d, 2, 129, 65, 3, 1, 16) | lse,
        "rows-hidden-by-a-finite-bias": lambda d: _hidden(d, -1e30) | lse,
        "rows-hidden-by-the-lowest-bias": lambda d: _hidden(d, float(np.finfo(np.float32).min)) | lse,
        "rows-hidden-by-a-bias-of-keys": lambda d: (
            small(d, q_length=9, k_length=20) | {"bias": np.array([0, -1e30]).reshape(2, 1, 1, 1) + np.zeros(20)}
        ),
        "rows-raised-by-a-bias": lambda d: _hidden(d, 1e30),
        "hidden-rows-and-sinks": lambda d: _hidden(d, -1e30) | {"softmax_aux": np.full((4, 2), -1e30)} | lse,
        "hidden-rows-with-all-else": lambda d: (
            _everything(d) | {"bias": _bias_of_rows(d, -1e30, (1, 4, 12, 17)), "softmax_aux": np.full(4, -1e30)}
        ),
        "hidden-rows-with-dropout": lambda d: _hidden(d, -1e30) | {"dropout_prob": 0.4, "dropout_seed": 5 + d},
        "hidden-rows-packed": lambda d: _hidden_and_packed(d) | lse,
        "hidden-rows-here-and-there": lambda d: _hidden_here_and_there(d) | lse,
        "soft-cap-of-huge-logits": lambda d: _huge(d, 1e4),
        "soft-cap-of-overflowing-logits": _overflowing,
        "soft-cap-then-bias": lambda d: (
            small(d, q_length=9, k_length=20) | {"bias": 9 * normal("bias", d, (9, 20)), "logits_soft_cap": 0.7}
        ),
        "large-logits": lambda d: small(d, q_length=9, k_length=20) | {"bias": np.full((1, 1, 1, 20), 100.0)} | lse,
        "fully-masked-rows": lambda d: (
            small(d, q_length=9, k_length=20) | {"attention_mask": np.arange(9)[:, None] % 3 > 0} | lse
        ),
        "fully-masked": lambda d: small(d, q_length=9, k_length=20) | {"attention_mask": np.zeros((1, 20), bool)} | lse,
        "padding-segments": lambda d: small(d, q_length=33, k_length=40) | segments(d, 2, 33, 40) | lse,
        "packed-sequences-of-length-zero": lambda d: packed(qkv(d, 1, 33, 40, 4, 2, 16), d) | {"causal": True} | lse,
        "packed-padding-tokens": lambda d: packed(qkv(d, 1, 70, 70, 4, 2, 16), d, 9) | {"sliding_window": 7} | lse,
        "packed-many-sequences": lambda d: _many_sequences(d) | {"causal": True},
        "no-keys": lambda d: small(d, q_length=5, k_length=0) | lse,
        "no-queries": lambda d: small(d, q_length=0, k_length=5) | lse,
        "no-batch": lambda d: qkv(d, 0, 5, 5, 4, 2, 16),
        "no-keys-and-all-there-is-beside-them": lambda d: _with_all_arrays(small(d, q_length=5, k_length=0), d) | lse,
        "no-queries-and-all-there-is-beside-them": lambda d: (
            _with_all_arrays(small(d, q_length=0, k_length=5), d) | lse
        ),
        "no-batch-and-all-there-is-beside-it": lambda d: _with_all_arrays(qkv(d, 0, 5, 5, 4, 2, 16), d) | lse,
        "no-sinks": lambda d: small(d, q_length=9, k_length=9) | {"softmax_aux": np.zeros((4, 0)), "causal": True},
        "no-keys-and-no-sinks": lambda d: small(d, q_length=5, k_length=0) | {"softmax_aux": np.zeros((4, 0))} | lse,
        "packed-without-keys": lambda d: packed(qkv(d, 1, 5, 0, 4, 2, 16), d) | {"softmax_aux": np.ones(4)} | lse,
        "packed-without-queries": lambda d: packed(qkv(d, 1, 0, 5, 4, 2, 16), d) | {"softmax_aux": np.ones(4)} | lse,
        "one-token": lambda d: qkv(d, 1, 1, 1, 1, 1, 16) | lse,
        "head-dim-of-one": lambda d: qkv(d, 1, 9, 9, 2, 1, 1, 3) | lse,
    }
    for name, arguments in calls.items():
        yield example(name, arguments)
    yield example("soft-cap-of-huge-logits-float16", calls["soft-cap-of-huge-logits"], dtype="float16")
    yield example("rows-hidden-by-a-finite-bias-bfloat16", calls["rows-hidden-by-a-finite-bias"], dtype="bfloat16")
    yield example("hidden-rows-here-and-there-bfloat16", calls["hidden-rows-here-and-there"], dtype="bfloat16")
    yield example("bias-and-sinks-in-float32", _float32_beside_bfloat16, dtype="bfloat16")


def _with_all_arrays(arguments: Arguments, draw: int) -> Arguments:
    """The call with all arrays that have axes of queries and keys, and with sinks."""
    (batch, q_length, heads, _), k_length = arguments["query"].shape, arguments["key"].shape[1]
    full = (batch, heads, q_length, k_length)
    arrays = {"bias": normal("bias", draw, full), "attention_mask": normal("mask", draw, full) < 1}
    sinks = normal("sinks", draw, (heads, 2))
    return arguments | segments(draw, batch, q_length, k_length) | arrays | {"softmax_aux": sinks, "causal": True}


def _minus_infinity(draw: int) -> Any:
    """-inf for one whole row, for one whole key, and for scattered entries."""
    bias = normal("bias", draw, (2, 4, 9, 20))
    bias[normal("holes", draw, bias.shape) > 1] = -np.inf
    bias[0, 1, 4], bias[..., 3] = -np.inf, -np.inf
    return bias


def _hidden(draw: int, number: float) -> Arguments:
    """A bias that is one large number for all keys of some rows, and for half of the keys of others."""
    return qkv(draw, 2, 40, 50, 4, 2, 16) | {"bias": _bias_of_rows(draw, number, (2, 4, 40, 50))}


def _bias_of_rows(draw: int, number: float, shape: tuple[int, ...]) -> Any:
    bias = normal("bias", draw, shape).astype(np.float32)
    bias[..., 1::3, :], bias[..., 2::3, ::2] = number, number
    return bias


def _hidden_and_packed(draw: int) -> Arguments:
    arguments = packed(qkv(draw, 1, 40, 50, 4, 2, 16), draw, padding=3)
    return arguments | {"bias": _bias_of_rows(draw, -1e30, (1, 1, 40, 50)), "causal": True}


def _hidden_here_and_there(draw: int) -> Arguments:
    """Single rows in several blocks with a large negative bias for the keys that they see; one with a positive bias."""
    bias = normal("bias", draw, (1, 4, 150, 170)).astype(np.float32)
    bias[:, :, [5, 71, 149]], bias[..., 70, ::3] = -1e30, 1e30
    bias[..., 5, 26:] = 0
    sinks = normal("sinks", draw, (4, 2))
    sinks[::2] = -1e30
    return qkv(draw, 1, 150, 170, 4, 2, 16) | {"bias": bias, "softmax_aux": sinks, "causal": True}


def _huge(draw: int, size: float) -> Arguments:
    """Every third row has logits far beyond the cap, all of one sign: near zero, tanh would be ill-conditioned."""
    arguments = qkv(draw, 2, 33, 33, 4, 2, 16)
    arguments["key"] = np.abs(arguments["key"])
    arguments["query"][:, ::3] = size * np.abs(arguments["query"][:, ::3]) * np.sign(arguments["query"][:, ::3, :, :1])
    return arguments | {"logits_soft_cap": 5.0, "return_lse": True}


def _overflowing(draw: int) -> Arguments:
    """Logits that overflow in float32 before they are capped."""
    arguments = qkv(draw, 2, 9, 20, 4, 2, 16)
    return arguments | {
        "query": 1e25 * np.abs(arguments["query"]),
        "key": -1e20 * np.abs(arguments["key"]),
        "logits_soft_cap": 5.0,
    }


def _many_sequences(draw: int) -> Arguments:
    """200 sequences of one or two tokens."""
    arguments = qkv(draw, 1, 300, 300, 2, 1, 16)
    ends = np.cumsum(np.r_[0, np.tile([1, 2], 100)]).astype(np.int32)
    return _without_batch(arguments) | {"cum_seqlens_q": ends, "cum_seqlens_k": ends}


def _float32_beside_bfloat16(draw: int) -> Arguments:
    arguments = qkv(draw, 1, 33, 40, 4, 2, 16)
    extra = {"bias": normal("bias", draw, (4, 33, 40)), "softmax_aux": normal("sinks", draw, (4,))}
    return arguments | {name: array.astype(np.float32) for name, array in extra.items()} | {"return_lse": True}


# -- subjects for transformations, sensitivity and accumulation ----------------------------------------------------


def subjects() -> Iterator[Example]:
    checks_of_loops = {"values", "jit", "vmap", "grad_of_vmap"}
    checks_of_folding = {"values", *(name for name in TRANSFORMS if "vmap" in name)} - {"vmap_with_shared"}
    yield example("everything", _everything, checks=checks_of_loops)
    yield example("everything-in-loops", _everything, checks={"vmap_with_shared", "checkpoint", "scan"}, long=True)
    yield example("all-that-folds", _all_that_folds, checks=checks_of_folding)
    yield example("all-that-folds-and-shared-arrays", _all_that_folds, checks={"vmap_with_shared"}, long=True)
    yield example("with-dropout", _with_dropout, checks={"values", "vmap_of_grad"})
    yield example("with-packing", _with_packing, checks={"values", "vmap_of_grad"})
    yield example("with-packing-and-shared-arrays", _with_packing, checks={"vmap_with_shared"}, long=True)
    yield example("sharded", _sharded, checks={"values", "shard_map", "sharding"})
    twice = lambda draw: qkv(draw, 2, 4, 6, 4, 2, 2) | {"causal": True}
    yield example("sharded-twice", twice, checks={"sharded_derivatives"}, long=True)
    yield example("tiny", _tiny, checks={"values", "forward_mode"})
    yield example("two-calls", _two_calls, checks={"values", "programs"}, wrt_sets=WRT_SETS)
    yield example("tiny-of-second-order", _tiny, checks={"jacrev_of_jacrev"}, long=True)
    yield _varied("one-at-a-time", _base, {word: VARIATIONS[word] for word in VARIATIONS if word not in RELATED})
    yield _varied("one-at-a-time-related", _base, {word: VARIATIONS[word] for word in RELATED}, long=True)
    yield _varied("one-at-a-time-packed", lambda d: packed(qkv(d, 1, 24, 30, 4, 2, 16), d), PACKED_VARIATIONS)


def plain_subjects() -> Iterator[Example]:
    """Each check on a call of nothing but three arrays of one shape, for kernels that refuse all else."""
    small = partial(qkv, batch=2, q_length=6, k_length=6, heads=2, group=1, head_dim=8)
    checks = {*TRANSFORMS} - {"shard_map", "sharding", "sharded_derivatives", "forward_mode", "jacrev_of_jacrev"}
    yield example("plain-transformed", small, checks={"values", *checks})
    sharded = partial(qkv, batch=8, q_length=6, k_length=6, heads=2, group=1, head_dim=8)
    yield example("plain-sharded", sharded, checks={"values", "shard_map", "sharding"})
    twice = partial(qkv, batch=2, q_length=4, k_length=4, heads=2, group=1, head_dim=2)
    yield example("plain-sharded-twice", twice, checks={"sharded_derivatives"}, long=True)
    tiny = partial(qkv, batch=1, q_length=3, k_length=3, heads=1, group=1, head_dim=8)
    yield example("plain-tiny", tiny, checks={"values", "forward_mode", "jacrev_of_jacrev"})
    two_calls = partial(qkv, batch=1, q_length=17, k_length=17, heads=2, group=1, head_dim=8)
    yield example("plain-two-calls", two_calls, checks={"values", "programs"})
    base = partial(qkv, batch=2, q_length=24, k_length=24, heads=2, group=1, head_dim=16)
    changes = {word: VARIATIONS[word] for word in ("causal", "softmax_scale", "sliding_window-causal")}
    yield _varied("plain-one-at-a-time", base, changes)
    for name, length in (("blocks", 128), ("blocks-and-a-tail", 300)):
        arguments = partial(qkv, batch=1, q_length=length, k_length=length, heads=1, group=1, head_dim=16)
        yield example(f"plain-{name}", arguments, checks={"configurations"})
    yield example("plain-sinks-in-float32", _with_float32_sinks, dtype="bfloat16")
    yield example("plain-negative-scale", lambda draw: base(draw) | {"softmax_scale": -0.3})


def _with_float32_sinks(draw: int) -> Arguments:
    arguments = qkv(draw, batch=1, q_length=24, k_length=24, heads=2, group=1, head_dim=16)
    return arguments | {"softmax_aux": normal("sinks", draw, (2,)).astype(np.float32)}


#: The sets of arguments by which two calls of one program are differentiated.
WRT_SETS = (
    *(("query",), ("key",), ("value",)),
    *(("query", "key"), ("query", "value"), ("key", "value"), ("query", "key", "value")),
    *(("bias",), ("softmax_aux",)),
)


def _two_calls(draw: int) -> Arguments:
    arguments = qkv(draw, 1, 17, 19, 4, 2, 16)
    arguments |= {"bias": normal("bias", draw, (1, 4, 17, 19)), "softmax_aux": normal("sinks", draw, (4,))}
    return arguments | {"causal": True, "return_lse": True}


def _base(draw: int) -> Arguments:
    return qkv(draw, 2, 24, 30, 4, 2, 16) | {"return_lse": True}


def _with_changes(base: Callable[[int], Arguments], changes: Callable[[], Arguments]) -> Callable[[int], Arguments]:
    return lambda draw: base(draw) | changes()


def _varied(
    name: str, base: Callable[[int], Arguments], variations: Mapping[str, Callable[[], Arguments]], long: bool = False
) -> Example:
    return example(
        name,
        base,
        checks={"values", "sensitivity"},
        long=long,
        variations=tuple(example(word, _with_changes(base, changes)) for word, changes in variations.items()),
    )


def _bias() -> Arguments:
    return {"bias": normal("bias", 0, (2, 4, 24, 30))}


#: Variations that resemble another one: only the long sweep runs them.
RELATED = (
    "bias-of-other-sign",
    "other-attention_mask",
    "segment_ids",
    "softmax_aux-of-two",
    "softmax_scale-negative",
    "sliding_window-left",
    "sliding_window-right",
    "sliding_window-causal",
    "logits_soft_cap-higher",
    "dropout_prob-higher",
)
#: One argument is added or changed at a time, with the same arrays.
VARIATIONS: dict[str, Callable[[], Arguments]] = {
    "bias": _bias,
    "bias-of-other-sign": lambda: {"bias": -_bias()["bias"]},
    "attention_mask": lambda: {"attention_mask": normal("mask", 0, (2, 4, 24, 30)) < 0.3},
    "other-attention_mask": lambda: {"attention_mask": normal("mask", 1, (2, 1, 24, 30)) < 0.3},
    "segment_ids": lambda: segments(0, 2, 24, 30),
    "q_segment_ids": lambda: segments(0, 2, 24, 30) | {"q_segment_ids": segments(1, 2, 24, 30)["q_segment_ids"]},
    "softmax_aux": lambda: {"softmax_aux": normal("sinks", 0, (4,))},
    "softmax_aux-of-two": lambda: {"softmax_aux": normal("sinks", 0, (4, 2))},
    "softmax_scale": lambda: {"softmax_scale": 0.6},
    "softmax_scale-negative": lambda: {"softmax_scale": -0.3},
    "causal": lambda: {"causal": True},
    "sliding_window": lambda: {"sliding_window": 6},
    "sliding_window-left": lambda: {"sliding_window": (6, 2)},
    "sliding_window-right": lambda: {"sliding_window": (2, 6)},
    "sliding_window-causal": lambda: {"sliding_window": (2, 6), "causal": True},
    "logits_soft_cap": lambda: {"logits_soft_cap": 0.5},
    "logits_soft_cap-higher": lambda: {"logits_soft_cap": 2.0},
    "dropout_prob": lambda: {"dropout_prob": 0.2, "dropout_seed": 1},
    "dropout_prob-higher": lambda: {"dropout_prob": 0.6, "dropout_seed": 1},
    "dropout_seed": lambda: {"dropout_prob": 0.2, "dropout_seed": 2},
    "return_lse": lambda: {"return_lse": False},
}

PACKED_VARIATIONS: dict[str, Callable[[], Arguments]] = {
    "cum_seqlens_q": lambda: {"cum_seqlens_q": np.array([0, 2, 2, 9, 20], np.int32)},
    "cum_seqlens_k": lambda: {"cum_seqlens_k": np.array([0, 12, 14, 14, 29], np.int32)},
    "causal": lambda: {"causal": True},
    "sliding_window": lambda: {"sliding_window": (3, 1)},
    "segment_ids": lambda: {name: ids[0] for name, ids in segments(0, 1, 24, 30).items()},
    "dropout_prob": lambda: {"dropout_prob": 0.2, "dropout_seed": 1},
    "bias": lambda: {"bias": normal("bias", 0, (4, 24, 30))},
}


def _everything(draw: int) -> Arguments:
    return (
        qkv(draw, 2, 12, 17, 4, 2, 8, 6)
        | segments(draw, 2, 12, 17)
        | {
            "bias": normal("bias", draw, (1, 4, 12, 17)),
            "attention_mask": normal("mask", draw, (2, 1, 12, 17)) < 1,
            "softmax_aux": normal("sinks", draw, (4, 2)),
            "sliding_window": (9, 4),
            "logits_soft_cap": 2.0,
            "return_lse": True,
        }
    )


def _all_that_folds(draw: int) -> Arguments:
    """Everything but the arrays that the batch shares, whose gradients make ``jax.vmap`` loop."""
    shared = ("bias", "softmax_aux")
    return {name: value for name, value in _everything(draw).items() if name not in shared} | {"causal": True}


def _with_dropout(draw: int) -> Arguments:
    dropout = {"dropout_prob": 0.4, "dropout_seed": np.int32(11 + draw)}
    return qkv(draw, 2, 12, 17, 4, 2, 8) | dropout | {"causal": True}


def _with_packing(draw: int) -> Arguments:
    return packed(qkv(draw, 1, 24, 30, 4, 2, 8), draw, padding=2) | {"causal": True, "return_lse": True}


def _sharded(draw: int) -> Arguments:
    return (
        qkv(draw, 8, 12, 17, 4, 2, 8)
        | segments(draw, 8, 12, 17)
        | {
            "bias": normal("bias", draw, (4, 12, 17)),
            "softmax_aux": normal("sinks", draw, (4,)),
            "causal": True,
            "return_lse": True,
        }
    )


def _tiny(draw: int) -> Arguments:
    return qkv(draw, 1, 3, 4, 2, 2, 2) | {
        "bias": normal("bias", draw, (2, 1, 4)),
        "softmax_aux": normal("sinks", draw, (2,)),
        "causal": True,
        "return_lse": True,
    }


def accumulations() -> Iterator[Example]:
    """Sums over 8192 keys, and over 8192 queries; and both at once, without gradients."""
    shapes = {"keys": (64, 8192), "queries": (8192, 64)}
    for name, (q_length, k_length) in shapes.items():
        arguments = partial(qkv, batch=1, q_length=q_length, k_length=k_length, heads=1, group=1, head_dim=32)
        yield example(f"sums-over-8192-{name}", arguments, dtype="bfloat16", checks={"accumulation"})
    square = example("sums-over-8192-squared", partial(arguments, k_length=8192, head_dim=16), dtype="bfloat16")
    yield attrs.evolve(square, wrt=(), checks=frozenset({"accumulation"}), long=True)


# -- parts of examples -------------------------------------------------------------------------------------------------


def example(name: str, arguments: Callable[[int], Arguments], checks: Any = ("values",), **fields: Any) -> Example:
    call = arguments(0)
    wrt = tuple(array for array in DIFFERENTIABLE if call.get(array) is not None)
    features = _features(call) | {fields.get("dtype", "float32")}
    return Example(name, "flash_attention", arguments, wrt=wrt, features=features, checks=frozenset(checks), **fields)


def _features(arguments: Arguments) -> frozenset[str]:
    """The names of the arguments that the call has, and properties of its shapes."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    names = {name for name, argument in arguments.items() if argument is not None and argument is not False}
    properties = {
        f"head_dim={query.shape[-1]}": True,
        f"value_dim={value.shape[-1]}": True,
        "other value_dim": value.shape[-1] != query.shape[-1],
        "negative scale": (arguments.get("softmax_scale") or 0) < 0,
        "grouped": query.shape[-2] != key.shape[-2],
        "cross": query.shape[-3] != key.shape[-3],
        "packed": query.ndim == 3,
        "positions": any(arguments.get(name) is not None for name in ("q_start", "kv_lengths", "kv_positions")),
        "empty": 0 in (*query.shape, *key.shape),
        "dropout": arguments.get("dropout_prob", 0) > 0,
        "bidirectional window": arguments.get("sliding_window") is not None and not arguments.get("causal"),
    }
    return frozenset(
        names - {"query", "key", "value", "dropout_prob"} | {word for word, is_true in properties.items() if is_true}
    )


def normal(name: str, draw: int, shape: tuple[int, ...]) -> Any:
    """Normally distributed numbers, which depend only on the name, the draw and the shape."""
    return np.random.default_rng([zlib.crc32(name.encode()), draw]).standard_normal(shape)


def qkv(
    draw: int,
    batch: int,
    q_length: int,
    k_length: int,
    heads: int,
    group: int,
    head_dim: int,
    value_dim: int | None = None,
) -> Arguments:
    return {
        "query": normal("query", draw, (batch, q_length, heads, head_dim)),
        "key": normal("key", draw, (batch, k_length, heads // group, head_dim)),
        "value": normal("value", draw, (batch, k_length, heads // group, value_dim or head_dim)),
    }


def segments(draw: int, batch: int, q_length: int, k_length: int) -> Arguments:
    """Runs of the ids 1, 2 and 3 with 0 (padding) in between, the same for queries and keys; the last key has -1."""
    longest = max(q_length, k_length)
    steps = np.sort(np.random.default_rng([1, draw]).integers(0, longest + 1, (batch, 2)), axis=1)
    ids = 1 + (np.arange(longest) >= steps[:, :1]) + (np.arange(longest) >= steps[:, 1:])
    ids[:, longest // 2 :: 7] = 0
    q_ids, k_ids = (ids[:, :length].astype(np.int32) for length in (q_length, k_length))
    k_ids[:, -1:] = -1
    return {"q_segment_ids": q_ids, "kv_segment_ids": k_ids}


def packed(arguments: Arguments, draw: int, padding: int = 0) -> Arguments:
    """The call with its tokens in four packed sequences: one is empty, and one has queries but no keys."""
    arguments = _without_batch(arguments)
    q_total, k_total = (len(arguments[name]) - padding for name in ("query", "key"))
    q_total, k_total = max(q_total, 0), max(k_total, 0)
    offset = draw % 3
    q_ends = [0, q_total // 3, q_total // 3, max(q_total * 2 // 3 - offset, q_total // 3), q_total]
    k_ends = [0, k_total // 2, k_total // 2, k_total // 2, k_total]
    return arguments | {"cum_seqlens_q": np.array(q_ends, np.int32), "cum_seqlens_k": np.array(k_ends, np.int32)}


def _without_batch(arguments: Arguments) -> Arguments:
    names = ("query", "key", "value", "q_segment_ids", "kv_segment_ids")
    return {name: value[0] if name in names else value for name, value in arguments.items()}
