"""What both passes are made of: tiles of programs, masks, soft caps, and rings of tiles in shared memory.

A program keeps the tokens of a tile, its *own* tokens, and loops over blocks of *other* tokens. The own tokens are
queries in the forward pass, and keys in the backward.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ejkernel_triton.gluon import tma
from ejkernel_triton.gluon.constants import LOG2E
from ejkernel_triton.gluon.shared_memory import barriers, wait_for_group


@aggregate
class Call:
    """The arguments of a call that all warps use."""

    own_length: gl.tensor
    other_length: gl.tensor
    #: From the host: a row for each program, with the number of its tiles, and the tiles.
    schedule: gl.tensor
    schedule_width: gl.tensor
    #: From the host: the range of blocks that each tile sees, (batch or 1, tiles, 4), and the stride of the batch.
    ranges: gl.tensor
    ranges_stride: gl.tensor
    #: If sequences are packed, the interval of other tokens that each own token sees. With ``START``, the position of
    #: the first query of each batch entry; and either its number of keys, or the position of the key in each slot.
    starts: gl.tensor
    stops: gl.tensor
    #: The ids of segments.
    own_ids: gl.tensor
    other_ids: gl.tensor
    #: The heads of own tokens.
    HEADS: gl.constexpr
    SCALE: gl.constexpr
    CAP: gl.constexpr
    #: How many tokens to its left and right an own token sees; -1 for all.
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    PACKED: gl.constexpr
    SEGMENTS: gl.constexpr
    #: Whether queries are at positions of a cache, which holds ``LENGTHS`` keys or has keys in some ``SLOTS``.
    START: gl.constexpr
    LENGTHS: gl.constexpr
    SLOTS: gl.constexpr
    #: Whether own tokens are queries.
    OWN_QUERIES: gl.constexpr
    #: Whether masks compare with the end of the interval of each token. If not, and unless both sides are limited, they
    #: compare with both lengths: in measurements the backward was faster so, except with a soft cap.
    COMPARE_STOP: gl.constexpr
    WIDTH: gl.constexpr
    OWN_BLOCK: gl.constexpr
    OTHER_BLOCK: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, own_length, other_length, schedule, schedule_width, ranges, ranges_stride, starts, stops, own_ids,
        other_ids, HEADS, SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS, START, LENGTHS, SLOTS, OWN_QUERIES, COMPARE_STOP,
        WIDTH, OWN_BLOCK, OTHER_BLOCK,
    ):  # fmt: skip
        self.own_length = own_length
        self.other_length = other_length
        self.schedule = schedule
        self.schedule_width = schedule_width
        self.ranges = ranges
        self.ranges_stride = ranges_stride
        self.starts = starts
        self.stops = stops
        self.own_ids = own_ids
        self.other_ids = other_ids
        self.HEADS = gl.constexpr(HEADS)
        self.SCALE = gl.constexpr(SCALE)
        self.CAP = gl.constexpr(CAP)
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.PACKED = gl.constexpr(PACKED)
        self.SEGMENTS = gl.constexpr(SEGMENTS)
        self.START = gl.constexpr(START)
        self.LENGTHS = gl.constexpr(LENGTHS)
        self.SLOTS = gl.constexpr(SLOTS)
        self.OWN_QUERIES = gl.constexpr(OWN_QUERIES)
        self.COMPARE_STOP = gl.constexpr(COMPARE_STOP)
        self.WIDTH = gl.constexpr(WIDTH)
        self.OWN_BLOCK = gl.constexpr(OWN_BLOCK)
        self.OTHER_BLOCK = gl.constexpr(OTHER_BLOCK)

    @gluon.jit
    def tile_count(self):
        """The number of tiles of this program."""
        return gl.load(self.schedule + gl.program_id(0) * self.schedule_width)

    @gluon.jit
    def tile(self, t):
        """Batch, head and block of the t-th of them."""
        tile = gl.load(self.schedule + gl.program_id(0) * self.schedule_width + 1 + t)
        blocks = gl.cdiv(self.own_length, self.OWN_BLOCK)
        row = tile // blocks
        return row // self.HEADS, row % self.HEADS, tile % blocks

    @gluon.jit
    def block_range(self, batch, block):
        """The range of blocks that a tile sees: first, full, full_end, end. From full to full_end they are full."""
        pointer = self.ranges + batch * self.ranges_stride + block * 4
        return gl.load(pointer), gl.load(pointer + 1), gl.load(pointer + 2), gl.load(pointer + 3)


@aggregate
class OwnTokens:
    """Own tokens of a tile, with the interval of other tokens that each sees. It is empty for padding. A token outside
    all segments has an id that no other token has.
    """

    index: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    ids: gl.tensor

    @gluon.constexpr_function
    def __init__(self, index, start, stop, ids):
        self.index = index
        self.start = start
        self.stop = stop
        self.ids = ids


@gluon.jit
def own_tokens(call, batch, first, COUNT: gl.constexpr, layout: gl.constexpr):
    """``COUNT`` own tokens from the token ``first``."""
    index = first + gl.arange(0, COUNT, layout)
    is_token = index < call.own_length
    start, stop, ids = index, index, index
    if call.PACKED:
        start = gl.load(call.starts + index, mask=is_token, other=0)
        stop = gl.load(call.stops + index, mask=is_token, other=0)
    elif call.START:
        query_start = gl.load(call.starts + batch)
        if call.OWN_QUERIES:
            # Positions of keys; without ``SLOTS`` these are their numbers.
            middle = index + query_start
            stop = middle * 0 + key_count(call, batch, call.other_length)
        else:
            # Numbers of queries.
            place, is_token = key_places(call, batch, index, call.own_length)
            middle = place - query_start
            stop = middle * 0 + call.other_length
        start = middle - call.LEFT
        if call.RIGHT >= 0:
            end = middle + (call.RIGHT + 1)
            stop = end if call.SLOTS and call.OWN_QUERIES else gl.minimum(stop, end)
        stop = gl.where(is_token, stop, 0)
    else:
        # The last query is aligned with the last key.
        offset = call.other_length - call.own_length
        start = index + (offset - call.LEFT)
        stop = index * 0 + call.other_length
        if call.RIGHT >= 0:
            stop = gl.minimum(stop, index + (offset + call.RIGHT + 1))
        stop = gl.where(is_token, stop, 0)
    if call.SEGMENTS:
        ids = gl.load(call.own_ids + batch * call.own_length + index, mask=is_token, other=0)
        ids = gl.where(ids > 0, ids, -1)
    return OwnTokens(index, start, stop, ids)


@gluon.jit
def key_count(call, batch, length):
    """The number of slots up to the last one that may hold a key."""
    if call.LENGTHS:
        length = gl.minimum(gl.load(call.stops + batch), length)
    return length


@gluon.jit
def key_places(call, batch, slots, length):
    """The position of the key in each slot, and whether there is one."""
    place = slots
    is_key = slots < key_count(call, batch, length)
    if call.SLOTS:
        place = gl.load(call.stops + batch * length + slots, mask=is_key, other=-1)
        is_key = place >= 0
    return place, is_key


@gluon.jit
def clear_empty_slots(call, batch, first, length, tile):
    """Set keys or values of slots without a key to 0, which may be NaN: their weights are 0, but not the products.

    Two groups of warps may do this to the same tile, and one may read it meanwhile: each has written what the other
    writes.
    """
    COUNT: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    for row in gl.static_range(0, COUNT, 16):  # few, for their registers
        rows = tile.slice(row, 16, dim=0)
        slots = first + row + gl.arange(0, 16, gl.SliceLayout(1, ROWS))
        _, is_key = key_places(call, batch, slots, length)
        numbers = rows.load(ROWS)
        rows.store(gl.where(is_key[:, None], numbers, gl.zeros_like(numbers)))
    fence_async_shared()
    # The compiler does not see that a product reads this tile, which may have two names.
    wait_for_group()


@gluon.jit
def is_visible(call, own, batch, first, COUNT: gl.constexpr, layout: gl.constexpr):
    """Whether each own token sees each of ``COUNT`` other tokens: (own, others)."""
    others = first + gl.arange(0, COUNT, gl.SliceLayout(0, layout))
    visible = gl.full([own.index.shape[0], COUNT], True, gl.int1, layout)
    if call.SLOTS and call.OWN_QUERIES:
        place, is_key = key_places(call, batch, others, call.other_length)
        visible = visible & is_key[None, :]
        if call.LEFT >= 0:
            visible = visible & (place[None, :] >= own.start[:, None])
        if call.RIGHT >= 0:
            visible = visible & (place[None, :] < own.stop[:, None])
    elif call.PACKED or (call.LEFT >= 0 and (call.RIGHT >= 0 or call.COMPARE_STOP)):
        # One comparison: the difference is a large unsigned number for tokens before the start.
        count = gl.maximum(own.stop - own.start, 0)
        visible = (others[None, :] - own.start[:, None]).to(gl.uint32) < count[:, None].to(gl.uint32)
    else:
        if not (call.COMPARE_STOP or call.SEGMENTS):
            visible = (own.index < call.own_length)[:, None] & (others < call.other_length)[None, :]
        if call.LEFT >= 0:
            visible = visible & (others[None, :] >= own.start[:, None])
        if call.RIGHT >= 0 or (call.COMPARE_STOP and (call.START or not call.SEGMENTS)):
            visible = visible & (others[None, :] < own.stop[:, None])
    if call.SEGMENTS:
        # No own token has the id 0, which padding gets.
        ids = gl.load(call.other_ids + batch * call.other_length + others, mask=others < call.other_length, other=0)
        visible = visible & (own.ids[:, None] == gl.maximum(ids, 0)[None, :])
    return visible


@gluon.jit
def apply_soft_cap(call, logits):
    """With a soft cap the tanh, by the hardware's instruction: it has a relative error of one part in two thousand, and
    is one of the slow operations, of which the weight takes another. For a large cap, which allows large logits, that
    is too coarse: there the tanh is an exponential and a division, and near zero, where these are coarse, a series.
    """
    if call.CAP > 0:
        scaled = logits * (call.SCALE / call.CAP)
        if call.CAP > 100:
            square = scaled * scaled
            near_zero = scaled * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
            logits = gl.where(square < 0.01, near_zero, 1.0 - 2.0 / (1.0 + gl.exp2(scaled * (2.0 * LOG2E))))
        else:
            logits = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [scaled], gl.float32, True, 1)
    return logits


@gluon.jit
def soft_cap_weights(call, logits):
    """2 to the power of the logits after a soft cap. Usually it takes one slow operation instead of two: if all logits
    of a warp are small compared with the cap, their tanh is a polynomial.
    """
    COUNT: gl.constexpr = logits.shape[0] * logits.shape[1] // 128  # by four warps
    CODE: gl.constexpr = _soft_cap_weights_ptx(call.SCALE / call.CAP, call.CAP * LOG2E, COUNT)
    return gl.inline_asm_elementwise(CODE[0], CODE[1], [logits], gl.float32, True, COUNT)


@gluon.constexpr_function
def _soft_cap_weights_ptx(scale, unit, count):
    """PTX for 2 ** (unit * tanh(scale * x)) of ``count`` numbers of each thread, and its constraints."""
    # Up to this magnitude, a x + b x^3 is as close to the tanh as the hardware's instruction.
    small, a, b = 0.35, 0.9997628, -0.31769618
    # With other scales the polynomial would overflow or underflow: then it is always the tanh.
    has_polynomial = 1e-9 < scale < 1e9
    limit = small / scale if has_polynomial else -1.0
    first, third = (unit * a * scale, unit * b * scale**3) if has_polynomial else (0.0, 0.0)
    inputs = [f"${count + i}" for i in range(count)]
    largest = [f"abs.f32 m{i}, {x};" for i, x in enumerate(inputs[:4])]
    polynomials, operations = [], []
    for i, x in enumerate(inputs):
        if i >= 4:
            largest += [f"abs.f32 x, {x};", f"max.f32 m{i % 4}, m{i % 4}, x;"]
        polynomials += [
            f"mul.f32 y, {x}, {x};",
            f"fma.rn.f32 z, y, {third:.9e}, {first:.9e};",
            f"mul.f32 y, {x}, z;",
            f"ex2.approx.ftz.f32 ${i}, y;",
        ]
        operations += [
            f"mul.f32 y, {x}, {scale:.9e};",
            "tanh.approx.f32 y, y;",
            f"mul.f32 y, y, {unit:.9e};",
            f"ex2.approx.ftz.f32 ${i}, y;",
        ]
    code = [
        "{ .reg .f32 m<4>, x, y, z; .reg .pred p;",
        *largest,
        "max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2;",
        f"setp.gt.f32 p, m0, {limit:.9e};",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@p bra FAR;",
        *polynomials,
        "bra.uni END;",
        "FAR:",
        *operations,
        "END: }",
    ]
    return "\n".join(code), ",".join(["=&f"] * count + ["f"] * count)


@aggregate
class Ring:
    """A ring of tiles in shared memory, which one warp fills and others read, and the barriers of its slots."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, COUNT):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.COUNT = gl.constexpr(COUNT)

    @gluon.jit
    def fill(self, n, desc, coordinates):
        """Fetch the n-th tile as soon as its slot is empty."""
        slot = n % self.COUNT
        full = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), ((n // self.COUNT) & 1) ^ 1)
        mbarrier.expect(full, desc.block_type.nbytes)
        tma.load(desc, coordinates, full, self.tiles.index(slot))

    @gluon.jit
    def wait(self, n):
        """Wait for the n-th tile."""
        mbarrier.wait(self.full.index(n % self.COUNT), (n // self.COUNT) & 1)

    @gluon.jit
    def tile(self, n):
        """The n-th tile: (1, rows, 1, columns)."""
        return self.tiles.index(n % self.COUNT)

    @gluon.jit
    def release(self, n):
        """Give the slot of the n-th tile back, which has been read."""
        mbarrier.arrive(self.empty.index(n % self.COUNT))


@gluon.jit
def allocate_ring(desc, COUNT: gl.constexpr, READERS: gl.constexpr):
    """An empty ring of ``COUNT`` tiles that the copy engine fills."""
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)
    return Ring(tiles, barriers(COUNT, 1), barriers(COUNT, READERS), COUNT)


@gluon.jit
def store_rows(
    tile, values, base, batch, row, head, dim, length, HEADS: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """Store a tile into an array of (batch, length, heads, dim), from a row and a dim on. It passes through shared
    memory, because stores of whole rows are faster.
    """
    WIDTH: gl.constexpr = tile.shape[1]
    # Eight numbers, or 16 bytes, for each thread.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    tile.store(values)
    rows = tile.load(ROWS)
    row_indices = row + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    dim_indices = dim + gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
    offsets = ((batch.to(gl.int64) * length + row_indices) * HEADS + head) * DIM
    gl.store(
        base + offsets[:, None] + dim_indices[None, :],
        rows,
        mask=(row_indices < length)[:, None] & (dim_indices < DIM)[None, :],
    )
