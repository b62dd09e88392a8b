"""What a program stores: the sums of a part, or the results of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ejkernel_triton.flash_attention._tile import LN2, LOG2E, LOWEST


@gluon.jit
def store_sums(call, results, part, OWN: gl.constexpr, row_max, total, sums, has_keys):
    """Store the sums of a split. A thread has columns of eight that are next to each other in memory."""
    COLUMNS: gl.constexpr = sums.type.layout
    _, _, place, is_row = call.rows(part, OWN, gl.SliceLayout(0, COLUMNS))
    column = gl.arange(0, sums.shape[0], gl.SliceLayout(1, COLUMNS))
    is_entry = (column < results.V_DIM)[:, None] & is_row[None, :]
    entry = place * call.SPLITS + part.split
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
    new_max = gl.maximum(row_max, sink_max)
    rescale = gl.exp2(row_max - new_max)
    total = total * rescale + sink * gl.exp2(sink_max - new_max)
    sums = sums * (rescale * gl.where(total != 0, 1.0 / total, 0.0))[None, :]
    pointers = results.out + place[None, :] * results.V_DIM + column[:, None]
    gl.store(pointers, sums.to(results.out.dtype.element_ty), mask=is_entry)
    if results.LSE:
        lse = gl.where(total != 0, (new_max + gl.log2(total)) * LN2, -float("inf"))
        gl.store(results.maxima + call.place_of_lse(place, head, index), lse, mask=is_row)
    call.clear_other_rows(results, OWN, part, sums)


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
