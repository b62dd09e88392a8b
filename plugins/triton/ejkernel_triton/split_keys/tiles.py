"""What all forms of the products do with tiles: queries in shared memory, logits, and values that may not be used."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ejkernel_triton.flash_attention._tile import LOG2E, tanh
from ejkernel_triton.gluon.shared_memory import wait_for_group


@gluon.jit
def load_queries(call, query, queries, part, OWN: gl.constexpr, DIM: gl.constexpr):
    """Copy the queries of a tile into shared memory."""
    WIDTH: gl.constexpr = queries.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [call.WARPS, 1], [1, 0])
    _, _, place, is_row = call.rows(part, OWN, gl.SliceLayout(1, LINES))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))
    is_entry = is_row[:, None] & (column < DIM)[None, :]
    queries.store(gl.load(query + place[:, None] * DIM + column[None, :], mask=is_entry, other=0.0))
    fence_async_shared()


@gluon.jit
def scaled(logits, SCALE: gl.constexpr, CAP: gl.constexpr):
    """The logits in units of log2, except for a scale that one instruction multiplies with later."""
    if CAP > 0:
        logits = tanh(logits * (SCALE / CAP), CAP) * (CAP * LOG2E)
    elif SCALE <= 1e-30:
        logits = logits * (SCALE * LOG2E)
    return logits


@gluon.jit
def values(call, steps, step, part, slot):
    """The values of a step, when they are there. Those of slots that the part does not see are set to 0: what stands
    there may be NaN, for which a weight of 0 is not enough.
    """
    v = steps.wait_for_values(step)
    begin, end = call.begin(part, slot), part.end - slot
    if (begin > 0) | (end < call.BLOCK):
        _clear(v, begin, end, call.WARPS)
        fence_async_shared()
        wait_for_group()
    return v


@gluon.jit
def _clear(tile, begin, end, WARPS: gl.constexpr):
    """Set the rows before ``begin`` and from ``end`` on to 0."""
    WIDTH: gl.constexpr = tile.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LINES))
    numbers = tile.load(LINES)
    tile.store(gl.where(((row >= begin) & (row < end))[:, None], numbers, gl.zeros_like(numbers)))
