"""What a program stores: the sums of a part, or the results of a tile."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ejkernel_triton.flash_attention._tile import LOG2E, LOWEST
from ejkernel_triton.ragged_paged_attention._device import finished, weights_of


@gluon.jit
def store_sums(call, results, part, OWN: gl.constexpr, number, row_max, total, sums, has_keys):
    """Store the sums that have this number. A thread has columns of eight that are next to each other in memory."""
    COLUMNS: gl.constexpr = sums.type.layout
    _, _, place, is_row = call.rows(part, OWN, gl.SliceLayout(0, COLUMNS))
    column = gl.arange(0, sums.shape[0], gl.SliceLayout(1, COLUMNS))
    is_entry = (column < results.V_DIM)[:, None] & is_row[None, :]
    entry = place * call.ENTRIES + number
    # The sums of a split without keys are not read.
    pointers = results.out + entry[None, :] * results.V_DIM + column[:, None]
    gl.store(pointers, sums, mask=is_entry & has_keys)
    gl.store(results.maxima + entry, row_max, mask=is_row)
    gl.store(results.totals + entry, total, mask=is_row)


@gluon.jit
def store_results(call, results, part, OWN: gl.constexpr, row_max, total, sums):
    """Store the output and the log-sum-exp."""
    COLUMNS: gl.constexpr = sums.type.layout
    index, head, place, is_row = call.rows(part, OWN, gl.SliceLayout(0, COLUMNS))
    column = gl.arange(0, sums.shape[0], gl.SliceLayout(1, COLUMNS))
    is_entry = (column < results.V_DIM)[:, None] & is_row[None, :]
    sink, sink_max = _sinks_of(results, head)
    factor, lse = finished(row_max, total, sink, sink_max)
    sums = sums * factor[None, :]
    pointers = results.out + place[None, :] * results.V_DIM + column[:, None]
    gl.store(pointers, sums.to(results.out.dtype.element_ty), mask=is_entry)
    if results.LSE:
        gl.store(results.maxima + call.place_of_lse(place, head, index), lse, mask=is_row)
    call.clear_other_rows(results, OWN, part, sums)


@gluon.jit
def added(row_max, total, sums, own_max, own_total, own_sums):
    """The sums of some parts, and those of the next one, by the operations of the portable kernel's ``combine``."""
    new_max, rescale, weight = weights_of(row_max, own_max)
    total = gl.fma(total, rescale, own_total * weight)
    return new_max, total, gl.fma(sums, rescale[None, :], own_sums * weight[None, :])


@gluon.jit
def _sinks_of(results, head):
    """For the head of each row, the sum of the exponentials of its sinks relative to the largest of them, and that one
    in units of log2.
    """
    total = head * 0.0
    largest = total + LOWEST
    if results.SINKS > 0:
        first = results.sinks + head * results.SINKS
        highest = total + LOWEST / 2
        for i in range(results.SINKS):
            highest = gl.maximum(highest, gl.load(first + i).to(gl.float32))
        # Subtract before scaling: the difference of two rounded products would have a large relative error.
        for i in range(results.SINKS):
            total += gl.exp2((gl.load(first + i).to(gl.float32) - highest) * LOG2E)
        largest = highest * LOG2E
    return total, largest
