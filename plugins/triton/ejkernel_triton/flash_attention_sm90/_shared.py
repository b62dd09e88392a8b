"""What both passes are made of: tiles dealt out to programs, tokens that see each other, and rings of shared memory.

The tokens of a tile, which stay with a program, are its own; those that go by are the others. The forward pass keeps
queries, the backward keeps keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate
from triton.language.core import _unwrap_if_constexpr as unwrapped

from ejkernel_triton.flash_attention_sm90 import _tma

LOG2E = gl.constexpr(1.4426950408889634)


@aggregate
class Call:
    """A call, as all warps know it."""

    own_length: gl.tensor
    other_length: gl.tensor
    #: By the host: a row for each program, of the number of its tiles and the tiles.
    schedule: gl.tensor
    schedule_width: gl.tensor
    #: Which blocks each tile sees, by the host: (batch or 1, tiles, 4), and how far apart two batches are.
    sight: gl.tensor
    sight_batch: gl.tensor
    #: Of each own token the others that it sees, if sequences are packed; ids, if there are segments.
    starts: gl.tensor
    stops: gl.tensor
    own_ids: gl.tensor
    other_ids: gl.tensor
    #: Heads, on the own side.
    HEADS: gl.constexpr
    SCALE: gl.constexpr
    CAP: gl.constexpr
    #: How far an own token sees; -1 where nothing limits it.
    BEFORE: gl.constexpr
    AFTER: gl.constexpr
    PACKED: gl.constexpr
    SEGMENTS: gl.constexpr
    #: Whether what a token sees ends with the others. If not, both lengths are looked at apart where there is but one
    #: other limit: by measurement the backward is faster so, but for a soft cap.
    ENDS: gl.constexpr
    WIDTH: gl.constexpr
    OWN_BLOCK: gl.constexpr
    OTHER_BLOCK: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, own_length, other_length, schedule, schedule_width, sight, sight_batch, starts, stops, own_ids,
        other_ids, HEADS, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS, ENDS, WIDTH, OWN_BLOCK, OTHER_BLOCK,
    ):  # fmt: skip
        self.own_length = own_length
        self.other_length = other_length
        self.schedule = schedule
        self.schedule_width = schedule_width
        self.sight = sight
        self.sight_batch = sight_batch
        self.starts = starts
        self.stops = stops
        self.own_ids = own_ids
        self.other_ids = other_ids
        self.HEADS = gl.constexpr(HEADS)
        self.SCALE = gl.constexpr(SCALE)
        self.CAP = gl.constexpr(CAP)
        self.BEFORE = gl.constexpr(BEFORE)
        self.AFTER = gl.constexpr(AFTER)
        self.PACKED = gl.constexpr(PACKED)
        self.SEGMENTS = gl.constexpr(SEGMENTS)
        self.ENDS = gl.constexpr(ENDS)
        self.WIDTH = gl.constexpr(WIDTH)
        self.OWN_BLOCK = gl.constexpr(OWN_BLOCK)
        self.OTHER_BLOCK = gl.constexpr(OTHER_BLOCK)

    @gluon.jit
    def turns(self):
        """How many tiles this program works on."""
        return gl.load(self.schedule + gl.program_id(0) * self.schedule_width)

    @gluon.jit
    def tile(self, turn):
        """Batch, head and block of one of them."""
        tile = gl.load(self.schedule + gl.program_id(0) * self.schedule_width + 1 + turn)
        blocks = gl.cdiv(self.own_length, self.OWN_BLOCK)
        row = tile // blocks
        return row // self.HEADS, row % self.HEADS, tile % blocks

    @gluon.jit
    def blocks_seen(self, batch, block):
        """First to end; of these whole to whole_end without a look at any mask."""
        at = self.sight + batch * self.sight_batch + block * 4
        return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@aggregate
class Own:
    """Tokens of a tile, and the others that each sees: none behind the last, and a token that is none sees none. Who is
    of no segment has an id that no other token has.
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
    """``COUNT`` of them."""
    index = first + gl.arange(0, COUNT, layout)
    real = index < call.own_length
    start, stop, ids = index, index, index
    if call.PACKED:
        start = gl.load(call.starts + index, mask=real, other=0)
        stop = gl.load(call.stops + index, mask=real, other=0)
    else:
        # The last query stands at the last key.
        shift = call.other_length - call.own_length
        start = index + (shift - call.BEFORE)
        stop = index * 0 + call.other_length
        if call.AFTER >= 0:
            stop = gl.minimum(stop, index + (shift + call.AFTER + 1))
        stop = gl.where(real, stop, 0)
    if call.SEGMENTS:
        ids = gl.load(call.own_ids + batch * call.own_length + index, mask=real, other=0)
        ids = gl.where(ids > 0, ids, -1)
    return Own(index, start, stop, ids)


@gluon.jit
def seen(call, own, batch, first, COUNT: gl.constexpr, layout: gl.constexpr):
    """Which of so many others each token sees: (own, others)."""
    others = first + gl.arange(0, COUNT, gl.SliceLayout(0, layout))
    found = gl.full([own.index.shape[0], COUNT], True, gl.int1, layout)
    if call.PACKED or (call.BEFORE >= 0 and (call.AFTER >= 0 or call.ENDS)):
        # One comparison: what lies before the start is a great number without a sign.
        count = gl.maximum(own.stop - own.start, 0)
        found = (others[None, :] - own.start[:, None]).to(gl.uint32) < count[:, None].to(gl.uint32)
    else:
        if not (call.ENDS or call.SEGMENTS):
            found = (own.index < call.own_length)[:, None] & (others < call.other_length)[None, :]
        if call.BEFORE >= 0:
            found = found & (others[None, :] >= own.start[:, None])
        if call.AFTER >= 0 or (call.ENDS and not call.SEGMENTS):
            found = found & (others[None, :] < own.stop[:, None])
    if call.SEGMENTS:
        # Nobody has the segment of what lies behind the last.
        ids = gl.load(call.other_ids + batch * call.other_length + others, mask=others < call.other_length, other=0)
        found = found & (own.ids[:, None] == gl.maximum(ids, 0)[None, :])
    return found


@gluon.jit
def bent(call, logits):
    """With a soft cap the tanh, by the card's own: right to one part in two thousand, and one of the slow operations,
    of which the weight takes another. A large cap keeps large logits, for which that is too coarse: there it is an
    exponential and a division, and near zero, where these are coarse, a series.
    """
    if call.CAP > 0:
        parts = logits * (call.SCALE / call.CAP)
        if call.CAP > 100:
            square = parts * parts
            near_zero = parts * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
            logits = gl.where(square < 0.01, near_zero, 1.0 - 2.0 / (1.0 + gl.exp2(parts * (2.0 * LOG2E))))
        else:
            logits = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [parts], gl.float32, True, 1)
    return logits


@gluon.jit
def bent_weights(call, logits):
    """2 to the power of what a soft cap leaves of the logits, by which two slow operations become one most of the time:
    where all logits of a warp are small beside the cap, their tanh is a polynomial.
    """
    COUNT: gl.constexpr = logits.shape[0] * logits.shape[1] // 128  # by four warps
    CODE: gl.constexpr = _bent_weights(call.SCALE / call.CAP, call.CAP * LOG2E, COUNT)
    return gl.inline_asm_elementwise(CODE[0], CODE[1], [logits], gl.float32, True, COUNT)


@gluon.constexpr_function
def _bent_weights(scale, unit, count):
    """PTX for 2 ** (unit * tanh(scale * x)) of so many numbers of each thread, and what it takes and gives."""
    # Up to there the tanh is a x + b x^3, as nearly as the card's own.
    near, a, b = 0.35, 0.9997628, -0.31769618
    # Logits of other sizes would leave what floats can be on the way: for them it is the tanh in any case.
    usual = 1e-9 < scale < 1e9
    limit = near / scale if usual else -1.0
    first, third = (unit * a * scale, unit * b * scale**3) if usual else (0.0, 0.0)
    given = [f"${count + i}" for i in range(count)]
    greatest = [f"abs.f32 m{i}, {x};" for i, x in enumerate(given[:4])]
    polynomials, operations = [], []
    for i, x in enumerate(given):
        if i >= 4:
            greatest += [f"abs.f32 x, {x};", f"max.f32 m{i % 4}, m{i % 4}, x;"]
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
        *greatest,
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
    """Tiles that one side fills and the other empties, in turn; and the barriers by which they tell each other."""

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
        """Fetch the n-th tile, as soon as its place is free."""
        place = n % self.COUNT
        full = self.full.index(place)
        mbarrier.wait(self.empty.index(place), ((n // self.COUNT) & 1) ^ 1)
        mbarrier.expect(full, desc.block_type.nbytes)
        _tma.load(desc, coordinates, full, self.tiles.index(place))

    @gluon.jit
    def wait(self, n):
        """Until the n-th tile is there."""
        mbarrier.wait(self.full.index(n % self.COUNT), (n // self.COUNT) & 1)

    @gluon.jit
    def at(self, n):
        """The n-th tile as it lies: (1, rows, 1, columns)."""
        return self.tiles.index(n % self.COUNT)

    @gluon.jit
    def release(self, n):
        """The n-th tile was read."""
        mbarrier.arrive(self.empty.index(n % self.COUNT))


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Each ends a phase when it has heard from so many."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def ring(desc, COUNT: gl.constexpr, READERS: gl.constexpr):
    """An empty one, for what the copy engine brings."""
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)
    return Ring(tiles, barriers(COUNT, 1), barriers(COUNT, READERS), COUNT)


@builtin
def reinterpreted(place, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory; Triton calls it by another name from 3.9 on."""
    shape = [unwrapped(size) for size in unwrapped(shape)]
    return _semantic.memdesc_reinterpret(place, unwrapped(dtype), shape, unwrapped(layout))


@gluon.jit
def store_rows(
    place, values, base, batch, row, head, dim, length, HEADS: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """Into an array of (batch, length, heads, dim), from a row and a dim on, by way of shared memory: whole rows are
    written faster.
    """
    WIDTH: gl.constexpr = place.shape[1]
    # Eight numbers, which are 16 bytes, by each thread.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    place.store(values)
    found = place.load(ROWS)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    dims = dim + gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
    at = ((batch.to(gl.int64) * length + rows) * HEADS + head) * DIM
    gl.store(base + at[:, None] + dims[None, :], found, mask=(rows < length)[:, None] & (dims < DIM)[None, :])
