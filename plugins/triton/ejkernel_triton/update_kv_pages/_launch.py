"""The launch of both operations, and what their configurations are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.pages import pages_of
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors
from ejkernel_triton.launch._requirements import require_card, require_float8

DTYPES = ("float16", "bfloat16", "float32")
#: The entries of a token that a program has at most, of its keys and of its values.
MOST_WIDTH = 4096
#: Those that a thread of it has, of keys and of values: in 16 bits, two loads of 16 bytes each. Where tokens are few,
#: there is one.
ENTRIES, FEW_ENTRIES = 16, 8
#: The least programs of a multiprocessor for which a program has more than one token.
PROGRAMS = 8
#: Of a warp.
THREADS = 32
TOKENS, WARPS = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)


@attrs.frozen
class Config:
    """What a program copies, and with how many threads."""

    #: The tokens of a program.
    tokens: int = attrs.field(default=2, validator=in_(TOKENS))
    #: Its warps, of 32 threads each.
    num_warps: int = attrs.field(default=4, validator=in_(WARPS))


def check(inv: Invocation) -> None:
    """Raise where this card, these versions, or this call is not for Triton."""
    require_card(inv)
    key, pages = inv["key"].dtype, pages_of(inv.arguments)[0].dtype
    if str(key) not in DTYPES or str(pages) == "float64":
        raise Unsupported(
            f"the Triton kernel takes {', '.join(DTYPES)}, and pages of these or of 8 bits; these are {key} and {pages}"
        )
    if pages == jnp.float8_e4m3fn:
        require_float8(inv)


def heuristic(inv: Invocation) -> Config:
    """One token where tokens are few, so that all multiprocessors work, else two."""
    check(inv)
    is_few = inv["key"].shape[0] <= PROGRAMS * multiprocessors(inv)
    return _config(inv, 1, FEW_ENTRIES) if is_few else _config(inv, 2, ENTRIES)


def space(inv: Invocation) -> Iterable[Config]:
    """More tokens, and half and twice as many threads."""
    configs = [heuristic(inv), *(_config(inv, tokens, ENTRIES) for tokens in (1, 2, 4, 8))]
    others = ((cfg.tokens, warps) for cfg in configs for warps in (cfg.num_warps // 2, 2 * cfg.num_warps))
    return dict.fromkeys([*configs, *(Config(tokens, warps) for tokens, warps in others if warps in WARPS)])


def _config(inv: Invocation, tokens: int, entries: int) -> Config:
    """With so many entries for a thread."""
    return Config(tokens, max(1, min(WARPS[-1], tokens * _width(inv) // (entries * THREADS))))


def updated(inv: Invocation, cfg: Config, kernel: str) -> tuple[jax.Array, ...]:
    """The pages, in which a launch of ``kernel`` has stored the tokens."""
    key, value, slots = inv["key"], inv["value"], inv["slot_mapping"]
    pages = pages_of(inv.arguments)
    tokens, heads, dim = key.shape
    count = pages[0].shape[0] * pages[0].shape[1]
    if not (tokens and count):
        return tuple(pages)
    optional = {name: inv[name] for name in ("first_page", "k_scale", "v_scale")}
    arrays = [key, value, slots, *(slots if array is None else array for array in optional.values()), *pages]
    sizes = {name: 0 if array is None else array.size for name, array in optional.items()}
    constants: dict[str, Any] = {
        "FIRST_PAGE": sizes["first_page"] > 0,
        "K_SCALES": sizes["k_scale"],
        "V_SCALES": sizes["v_scale"],
        "PAGE_SIZE": pages[0].shape[1],
        "HEADS": heads,
        "DIM": dim,
        "VALUE_DIM": value.shape[2],
        "TOKENS": cfg.tokens,
        "WIDTH": _width(inv),
    }
    # jax-triton 0.3 passes the results behind these. For later versions their parameters are 1, a constant in Triton.
    unused = () if _jax_triton.version() < (0, 4) else (1,) * len(pages)
    return _jax_triton.call(
        f"ejkernel_triton.update_kv_pages._device:{kernel}",
        arrays,
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pages],
        scalars=(tokens, count, *unused),
        grid=(math.ceil(tokens / cfg.tokens), math.ceil(heads * max(dim, value.shape[2]) / _width(inv))),
        constants=constants,
        num_warps=cfg.num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name=inv.op,
        aliases={len(arrays) - len(pages) + place: place for place in range(len(pages))},
    )


def _width(inv: Invocation) -> int:
    """The entries of a token that a program has: a power of two."""
    entries = inv["key"].shape[1] * max(inv[name].shape[2] for name in ("key", "value"))
    return min(MOST_WIDTH, 1 << (int(entries) - 1).bit_length())
