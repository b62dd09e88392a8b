"""What every kernel of ``flash_attention`` is proved on.

``grid`` crosses every argument with every other; ``faults`` has one case for each fault that attention kernels are
known to have had; ``subjects`` are small calls for JAX's transformations and for one argument at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import attrs
import numpy as np

from ejkernel_testing import TRANSFORMS, Case, pairwise

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
#: How many keys there are, by how many queries.
K_LENGTH = {"equal": lambda n: n, "more": lambda n: n + 66, "fewer": lambda n: max(n - n // 3, 1)}


@cache
def forward_cases() -> tuple[Case, ...]:
    return (*faults(), *subjects(), *accumulations(), *grid())


# -- the grid ------------------------------------------------------------------------------------------------------


def grid() -> Iterator[Case]:
    """Every pair of choices in float32; every row in each other dtype. Some are not for the long sweep alone: every
    third row in float32, and of the other dtypes each a sixth.
    """
    for number, row in enumerate(pairwise(FACTORS, possible)):
        for place, dtype in enumerate(("float32", "bfloat16", "float16", "float64")):
            long = number % 6 != 2 * (place - 1) if place else number % 3 != 1
            yield case(f"grid{number:02}-{dtype}-{_label(row)}", partial(grid_arguments, row), dtype=dtype, long=long)


def possible(row: Row) -> bool:
    """Packed calls are a batch of one, and their sequences have lengths of their own."""
    packed = str(row.get("tokens")).startswith("packed")
    return not (packed and row.get("batch", 1) != 1)


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
    made = qkv(draw, batch, q_length, k_length, heads, row["group"], head_dim, value_dim)
    full = (batch, heads, q_length, k_length)
    shapes = {
        "full": full,
        "heads": (1, heads, 1, k_length),
        "keys": (batch, 1, 1, k_length),
        "rows": (batch, 1, *full[2:]),
    }
    if row["bias"]:
        made["bias"] = normal("bias", draw, shapes[row["bias"]])
    if row["mask"]:
        made["attention_mask"] = normal("mask", draw, shapes[row["mask"]]) < 0.7
    if row["sinks"]:
        made["softmax_aux"] = normal("sinks", draw, (heads, 2) if row["sinks"] == 2 else (heads,))
    if row["dropout"]:
        made |= {"dropout_prob": row["dropout"], "dropout_seed": 7 + draw}
    if row["tokens"] == "segments":
        made |= segments(draw, batch, q_length, k_length)
    if row["tokens"].startswith("packed"):
        made = packed(made, draw, padding=3 if "padding" in row["tokens"] else 0)
    return made | {
        "softmax_scale": row["scale"],
        "causal": row["causal"],
        "sliding_window": row["window"],
        "logits_soft_cap": row["cap"],
        "return_lse": row["lse"],
    }


# -- one case for each fault ---------------------------------------------------------------------------------------


def faults() -> Iterator[Case]:
    """Known faults of attention kernels, and the edges of what may be asked."""
    small = partial(qkv, batch=2, heads=4, group=2, head_dim=16)
    lse = {"return_lse": True}
    made: dict[str, Callable[[int], Arguments]] = {
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
        "rows-hidden-by-the-lowest-bias": lambda d: _hidden(d, np.finfo(np.float32).min) | lse,
        "rows-hidden-by-a-bias-of-keys": lambda d: (
            small(d, q_length=9, k_length=20) | {"bias": np.array([0, -1e30]).reshape(2, 1, 1, 1) + np.zeros(20)}
        ),
        "rows-raised-by-a-bias": lambda d: _hidden(d, 1e30),
        "hidden-rows-and-sinks": lambda d: _hidden(d, -1e30) | {"softmax_aux": np.full((4, 2), -1e30)} | lse,
        "hidden-rows-with-all-else": lambda d: (
            _everything(d) | {"bias": _of_rows(d, -1e30, (1, 4, 12, 17)), "softmax_aux": np.full(4, -1e30)}
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
        "no-keys-and-all-there-is-beside-them": lambda d: _beside(small(d, q_length=5, k_length=0), d) | lse,
        "no-queries-and-all-there-is-beside-them": lambda d: _beside(small(d, q_length=0, k_length=5), d) | lse,
        "no-batch-and-all-there-is-beside-it": lambda d: _beside(qkv(d, 0, 5, 5, 4, 2, 16), d) | lse,
        "no-sinks": lambda d: small(d, q_length=9, k_length=9) | {"softmax_aux": np.zeros((4, 0)), "causal": True},
        "no-keys-and-no-sinks": lambda d: small(d, q_length=5, k_length=0) | {"softmax_aux": np.zeros((4, 0))} | lse,
        "packed-without-keys": lambda d: packed(qkv(d, 1, 5, 0, 4, 2, 16), d) | {"softmax_aux": np.ones(4)} | lse,
        "packed-without-queries": lambda d: packed(qkv(d, 1, 0, 5, 4, 2, 16), d) | {"softmax_aux": np.ones(4)} | lse,
        "one-token": lambda d: qkv(d, 1, 1, 1, 1, 1, 16) | lse,
        "head-dim-of-one": lambda d: qkv(d, 1, 9, 9, 2, 1, 1, 3) | lse,
    }
    for name, arguments in made.items():
        yield case(name, arguments)
    yield case("soft-cap-of-huge-logits-float16", made["soft-cap-of-huge-logits"], dtype="float16")
    yield case("rows-hidden-by-a-finite-bias-bfloat16", made["rows-hidden-by-a-finite-bias"], dtype="bfloat16")
    yield case("hidden-rows-here-and-there-bfloat16", made["hidden-rows-here-and-there"], dtype="bfloat16")
    yield case("bias-and-sinks-in-float32", _float32_beside_bfloat16, dtype="bfloat16")


def _beside(made: Arguments, draw: int) -> Arguments:
    """Arrays that have the axes of queries and keys, and sinks."""
    (batch, q_length, heads, _), k_length = made["query"].shape, made["key"].shape[1]
    full = (batch, heads, q_length, k_length)
    arrays = {"bias": normal("bias", draw, full), "attention_mask": normal("mask", draw, full) < 1}
    sinks = normal("sinks", draw, (heads, 2))
    return made | segments(draw, batch, q_length, k_length) | arrays | {"softmax_aux": sinks, "causal": True}


def _minus_infinity(draw: int) -> Any:
    """One row without a way out, one key that nobody sees, and a scattering."""
    bias = normal("bias", draw, (2, 4, 9, 20))
    bias[normal("holes", draw, bias.shape) > 1] = -np.inf
    bias[0, 1, 4], bias[..., 3] = -np.inf, -np.inf
    return bias


def _hidden(draw: int, number: float) -> Arguments:
    """Rows whose keys all have one great number for a bias; in others half of the keys have it."""
    return qkv(draw, 2, 40, 50, 4, 2, 16) | {"bias": _of_rows(draw, number, (2, 4, 40, 50))}


def _of_rows(draw: int, number: float, shape: tuple[int, ...]) -> Any:
    bias = normal("bias", draw, shape).astype(np.float32)
    bias[..., 1::3, :], bias[..., 2::3, ::2] = number, number
    return bias


def _hidden_and_packed(draw: int) -> Arguments:
    made = packed(qkv(draw, 1, 40, 50, 4, 2, 16), draw, padding=3)
    return made | {"bias": _of_rows(draw, -1e30, (1, 1, 40, 50)), "causal": True}


def _hidden_here_and_there(draw: int) -> Arguments:
    """Single rows among several blocks, hidden by what they see and not by what they do not see; one that is raised."""
    bias = normal("bias", draw, (1, 4, 150, 170)).astype(np.float32)
    bias[:, :, [5, 71, 149]], bias[..., 70, ::3] = -1e30, 1e30
    bias[..., 5, 26:] = 0
    sinks = normal("sinks", draw, (4, 2))
    sinks[::2] = -1e30
    return qkv(draw, 1, 150, 170, 4, 2, 16) | {"bias": bias, "softmax_aux": sinks, "causal": True}


def _huge(draw: int, size: float) -> Arguments:
    """Every third row of logits far beyond the cap, each on one side: near zero it would be ill-conditioned."""
    made = qkv(draw, 2, 33, 33, 4, 2, 16)
    made["key"] = np.abs(made["key"])
    made["query"][:, ::3] = size * np.abs(made["query"][:, ::3]) * np.sign(made["query"][:, ::3, :, :1])
    return made | {"logits_soft_cap": 5.0, "return_lse": True}


def _overflowing(draw: int) -> Arguments:
    """Logits that overflow in float32 themselves."""
    made = qkv(draw, 2, 9, 20, 4, 2, 16)
    return made | {"query": 1e25 * np.abs(made["query"]), "key": -1e20 * np.abs(made["key"]), "logits_soft_cap": 5.0}


def _many_sequences(draw: int) -> Arguments:
    """200 sequences of one or two tokens."""
    made = qkv(draw, 1, 300, 300, 2, 1, 16)
    ends = np.cumsum(np.r_[0, np.tile([1, 2], 100)]).astype(np.int32)
    return _without_batch(made) | {"cum_seqlens_q": ends, "cum_seqlens_k": ends}


def _float32_beside_bfloat16(draw: int) -> Arguments:
    made = qkv(draw, 1, 33, 40, 4, 2, 16)
    extra = {"bias": normal("bias", draw, (4, 33, 40)), "softmax_aux": normal("sinks", draw, (4,))}
    return made | {name: array.astype(np.float32) for name, array in extra.items()} | {"return_lse": True}


# -- subjects for transformations, sensitivity and accumulation ----------------------------------------------------


def subjects() -> Iterator[Case]:
    looped = {"values", "jit", "vmap", "grad_of_vmap"}
    folded = {"values", *(name for name in TRANSFORMS if "vmap" in name)} - {"vmap_with_shared"}
    yield case("everything", _everything, checks=looped)
    yield case("everything-in-loops", _everything, checks={"vmap_with_shared", "checkpoint", "scan"}, long=True)
    yield case("all-that-folds", _all_that_folds, checks=folded)
    yield case("all-that-folds-and-shared-arrays", _all_that_folds, checks={"vmap_with_shared"}, long=True)
    yield case("with-dropout", _with_dropout, checks={"values", "vmap_of_grad"})
    yield case("with-packing", _with_packing, checks={"values", "vmap_of_grad"})
    yield case("with-packing-and-shared-arrays", _with_packing, checks={"vmap_with_shared"}, long=True)
    yield case("sharded", _sharded, checks={"values", "shard_map"})
    yield case("tiny", _tiny, checks={"values", "forward_mode"})
    yield case("two-calls", _two_calls, checks={"values", "programs"}, wrt_sets=WRT_SETS)
    yield case("tiny-of-second-order", _tiny, checks={"jacrev_of_jacrev"}, long=True)
    yield _varied("one-at-a-time", _base, {word: VARIATIONS[word] for word in VARIATIONS if word not in RELATED})
    yield _varied("one-at-a-time-related", _base, {word: VARIATIONS[word] for word in RELATED}, long=True)
    yield _varied("one-at-a-time-packed", lambda d: packed(qkv(d, 1, 24, 30, 4, 2, 16), d), PACKED_VARIATIONS)


#: What two calls of one program are differentiated in.
WRT_SETS = (
    *(("query",), ("key",), ("value",)),
    *(("query", "key"), ("query", "value"), ("key", "value"), ("query", "key", "value")),
    *(("bias",), ("softmax_aux",)),
)


def _two_calls(draw: int) -> Arguments:
    made = qkv(draw, 1, 17, 19, 4, 2, 16)
    made |= {"bias": normal("bias", draw, (1, 4, 17, 19)), "softmax_aux": normal("sinks", draw, (4,))}
    return made | {"causal": True, "return_lse": True}


def _base(draw: int) -> Arguments:
    return qkv(draw, 2, 24, 30, 4, 2, 16) | {"return_lse": True}


def _varied(
    name: str, base: Callable[[int], Arguments], variations: Mapping[str, Callable[[], Arguments]], long: bool = False
) -> Case:
    return case(
        name,
        base,
        checks={"values", "sensitivity"},
        long=long,
        variations=tuple(
            case(word, lambda d, change=change: base(d) | change()) for word, change in variations.items()
        ),
    )


def _bias() -> Arguments:
    return {"bias": normal("bias", 0, (2, 4, 24, 30))}


#: Those that differ little from another, which is tried before the long sweep.
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
#: Each argument given or changed, on the same arrays.
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
    """Without what makes ``jax.vmap`` loop: the gradients of what the batch shares."""
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


def accumulations() -> Iterator[Case]:
    """Sums over 8192 keys, and over 8192 queries; and the whole square of them, of which the results alone."""
    shapes = {"keys": (64, 8192), "queries": (8192, 64)}
    for name, (q_length, k_length) in shapes.items():
        arguments = partial(qkv, batch=1, q_length=q_length, k_length=k_length, heads=1, group=1, head_dim=32)
        yield case(f"sums-over-8192-{name}", arguments, dtype="bfloat16", checks={"accumulation"})
    square = case("sums-over-8192-squared", partial(arguments, k_length=8192, head_dim=16), dtype="bfloat16")
    yield attrs.evolve(square, wrt=(), checks=frozenset({"accumulation"}), long=True)


# -- what cases are made of ----------------------------------------------------------------------------------------


def case(name: str, arguments: Callable[[int], Arguments], checks: Any = ("values",), **more: Any) -> Case:
    made = arguments(0)
    wrt = tuple(array for array in DIFFERENTIABLE if made.get(array) is not None)
    features = _features(made) | {more.get("dtype", "float32")}
    return Case(name, "flash_attention", arguments, wrt=wrt, features=features, checks=frozenset(checks), **more)


def _features(made: Arguments) -> frozenset[str]:
    """The arguments that are given, and what is particular about the shapes."""
    query, key, value = made["query"], made["key"], made["value"]
    given = {name for name, argument in made.items() if argument is not None and argument is not False}
    shapes = {
        f"head_dim={query.shape[-1]}": True,
        f"value_dim={value.shape[-1]}": True,
        "other value_dim": value.shape[-1] != query.shape[-1],
        "grouped": query.shape[-2] != key.shape[-2],
        "cross": query.shape[-3] != key.shape[-3],
        "packed": query.ndim == 3,
        "empty": 0 in (*query.shape, *key.shape),
        "dropout": made.get("dropout_prob", 0) > 0,
        "bidirectional window": made.get("sliding_window") is not None and not made.get("causal"),
    }
    return frozenset(
        given - {"query", "key", "value", "dropout_prob"} | {word for word, true in shapes.items() if true}
    )


def normal(name: str, draw: int, shape: tuple[int, ...]) -> Any:
    """Normal numbers that depend on the name, the draw and nothing else."""
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
    """Ids from 0 (padding) to 3 in runs, the same on both sides up to their lengths; -1 at the very end."""
    longest = max(q_length, k_length)
    steps = np.sort(np.random.default_rng([1, draw]).integers(0, longest + 1, (batch, 2)), axis=1)
    ids = 1 + (np.arange(longest) >= steps[:, :1]) + (np.arange(longest) >= steps[:, 1:])
    ids[:, longest // 2 :: 7] = 0
    q_ids, k_ids = (ids[:, :length].astype(np.int32) for length in (q_length, k_length))
    k_ids[:, -1:] = -1
    return {"q_segment_ids": q_ids, "kv_segment_ids": k_ids}


def packed(made: Arguments, draw: int, padding: int = 0) -> Arguments:
    """The call with its tokens parted into four sequences, one empty on both sides, one of queries without keys."""
    made = _without_batch(made)
    q_total, k_total = (len(made[name]) - padding for name in ("query", "key"))
    q_total, k_total = max(q_total, 0), max(k_total, 0)
    shift = draw % 3
    q_ends = [0, q_total // 3, q_total // 3, max(q_total * 2 // 3 - shift, q_total // 3), q_total]
    k_ends = [0, k_total // 2, k_total // 2, k_total // 2, k_total]
    return made | {"cum_seqlens_q": np.array(q_ends, np.int32), "cum_seqlens_k": np.array(k_ends, np.int32)}


def _without_batch(made: Arguments) -> Arguments:
    names = ("query", "key", "value", "q_segment_ids", "kv_segment_ids")
    return {name: value[0] if name in names else value for name, value in made.items()}
