"""The kernel for Hopper of attention over pages: which parts a program has, and how they are fetched page by page."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ejkernel_triton.flash_attention_decode._device import blocks_of_split
from ejkernel_triton.gluon import tma
from ejkernel_triton.ragged_paged_attention._device import end_of_sequences, tile_at
from ejkernel_triton.split_keys import attend as programs
from ejkernel_triton.split_keys.steps import Results, allocate_steps


@aggregate
class Part:
    """The keys of a split of a sequence and a key head, for one tile of tokens or two."""

    tile: gl.tensor
    kv_head: gl.tensor
    split: gl.tensor
    sequence: gl.tensor
    #: The first token, and the one behind the last.
    token: gl.tensor
    token_stop: gl.tensor
    #: The position of the first token.
    q_start: gl.tensor
    #: The slots that any token sees. Blocks begin at ``origin``.
    first: gl.tensor
    end: gl.tensor
    origin: gl.tensor
    #: The first block of the part, and the one behind its last.
    block: gl.tensor
    stop: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, tile, kv_head, split, sequence, token, token_stop, q_start, first, end, origin, block, stop
    ):  # fmt: skip
        self.tile = tile
        self.kv_head = kv_head
        self.split = split
        self.sequence = sequence
        self.token = token
        self.token_stop = token_stop
        self.q_start = q_start
        self.first = first
        self.end = end
        self.origin = origin
        self.block = block
        self.stop = stop


@aggregate
class Call:
    """What all warps know of the call."""

    tables: gl.tensor
    kv_lens: gl.tensor
    starts: gl.tensor
    first_page: gl.tensor
    tiles: gl.tensor
    #: Of keys and values of 8 bits: none, one, or one for each key head.
    k_scale: gl.tensor
    v_scale: gl.tensor
    tokens: gl.tensor
    table_length: gl.tensor
    page_count: gl.tensor
    tile_count: gl.tensor
    #: The first token of no sequence.
    owned_end: gl.tensor
    #: How many parts all programs have to take.
    PARTS: gl.constexpr
    HEADS: gl.constexpr
    GROUP: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    #: Keys and values of a head are in one array, next to each other.
    INTERLEAVED: gl.constexpr
    FIRST_PAGE: gl.constexpr
    K_SCALES: gl.constexpr
    V_SCALES: gl.constexpr
    PAGE_SIZE: gl.constexpr
    #: The keys that are fetched at a time: all of a block, or a page.
    PIECE: gl.constexpr
    #: The tokens of a tile, its rows, and how many tiles read the same blocks.
    TOKENS: gl.constexpr
    ROWS: gl.constexpr
    TOGETHER: gl.constexpr
    SPLITS: gl.constexpr
    #: The sums that are stored for each row, and the keys of each if their number is fixed; else 0.
    ENTRIES: gl.constexpr
    PART_SIZE: gl.constexpr
    BLOCK: gl.constexpr
    WARPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tables, kv_lens, starts, first_page, tiles, k_scale, v_scale, tokens, table_length, page_count,
        tile_count, owned_end, PARTS, HEADS, GROUP, LEFT, RIGHT, INTERLEAVED, FIRST_PAGE, K_SCALES, V_SCALES,
        PAGE_SIZE, PIECE, TOKENS, ROWS, TOGETHER, SPLITS, ENTRIES, PART_SIZE, BLOCK, WARPS,
    ):  # fmt: skip
        self.tables = tables
        self.kv_lens = kv_lens
        self.starts = starts
        self.first_page = first_page
        self.tiles = tiles
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.tokens = tokens
        self.table_length = table_length
        self.page_count = page_count
        self.tile_count = tile_count
        self.owned_end = owned_end
        self.PARTS = gl.constexpr(PARTS)
        self.HEADS = gl.constexpr(HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.INTERLEAVED = gl.constexpr(INTERLEAVED)
        self.FIRST_PAGE = gl.constexpr(FIRST_PAGE)
        self.K_SCALES = gl.constexpr(K_SCALES)
        self.V_SCALES = gl.constexpr(V_SCALES)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.PIECE = gl.constexpr(PIECE)
        self.TOKENS = gl.constexpr(TOKENS)
        self.ROWS = gl.constexpr(ROWS)
        self.TOGETHER = gl.constexpr(TOGETHER)
        self.SPLITS = gl.constexpr(SPLITS)
        self.ENTRIES = gl.constexpr(ENTRIES)
        self.PART_SIZE = gl.constexpr(PART_SIZE)
        self.BLOCK = gl.constexpr(BLOCK)
        self.WARPS = gl.constexpr(WARPS)

    @gluon.jit
    def part(self, number):
        """The part with this number. Those of all heads of the same pages are next to each other."""
        KV_HEADS: gl.constexpr = self.HEADS // self.GROUP
        kv_head, number = number % KV_HEADS, number // KV_HEADS
        split, tile = number % self.SPLITS, number // self.SPLITS
        sequence, token, token_stop, q_start, first, end = tile_at(
            self.tiles, self.kv_lens, self.starts, tile, self.tokens, self.table_length * self.PAGE_SIZE,
            self.tile_count, self.LEFT, self.RIGHT, self.TOKENS * self.TOGETHER,
        )  # fmt: skip
        origin = first // self.BLOCK * self.BLOCK
        block, stop = self._blocks(first, end, origin, split)
        return Part(tile, kv_head, split, sequence, token, token_stop, q_start, first, end, origin, block, stop)

    @gluon.jit
    def _blocks(self, first, end, origin, split):
        """The first of the blocks of a split, and the one behind its last. Parts of a fixed size are in one split."""
        if self.PART_SIZE == 0:
            block, stop = blocks_of_split(origin, end, split, self.SPLITS, self.BLOCK)
        else:
            begin = first // self.PART_SIZE * self.PART_SIZE
            part, part_stop = blocks_of_split(begin, end, split, self.SPLITS, self.PART_SIZE)
            block = gl.maximum(begin + part * self.PART_SIZE - origin, 0) // self.BLOCK
            stop = gl.cdiv(gl.minimum(begin + part_stop * self.PART_SIZE, end) - origin, self.BLOCK)
        return block, stop

    @gluon.jit
    def rows(self, part, OWN: gl.constexpr, layout: gl.constexpr):
        """The rows of a tile: which token of the part and head each is, its place among all of them, and whether there
        is one.
        """
        row = gl.arange(0, self.ROWS, layout)
        head = part.kv_head * self.GROUP + row % self.GROUP
        index = OWN * self.TOKENS + row // self.GROUP
        token = part.token + index
        is_row = (row < self.TOKENS * self.GROUP) & (token < part.token_stop)
        return index, head, token.to(gl.int64) * self.HEADS + head, is_row

    @gluon.jit
    def clear_other_rows(self, results, OWN: gl.constexpr, part, sums):
        """Store 0 for tokens of no sequence. They come last: those that would be here, were all tiles full."""
        layout: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
        row = gl.arange(0, self.ROWS, layout)
        head = part.kv_head * self.GROUP + row % self.GROUP
        token = (part.tile * self.TOGETHER + OWN) * self.TOKENS + row // self.GROUP
        is_row = (row < self.TOKENS * self.GROUP) & (token >= self.owned_end) & (token < self.tokens)
        column = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        place = token.to(gl.int64) * self.HEADS + head
        pointers = results.out + place[None, :] * results.V_DIM + column[:, None]
        nothing = gl.zeros_like(sums).to(results.out.dtype.element_ty)
        gl.store(pointers, nothing, mask=(column < results.V_DIM)[:, None] & is_row[None, :])
        if results.LSE:
            lse = gl.full([self.ROWS], -float("inf"), gl.float32, layout)
            gl.store(results.maxima + self.place_of_lse(place, head, row), lse, mask=is_row)

    @gluon.jit
    def place_of_lse(self, place, head, query):
        return head.to(gl.int64) * self.tokens + place // self.HEADS

    @gluon.jit
    def seen_by_all(self, part):
        """Where the keys that all tokens see begin and end."""
        full, full_end = part.first, part.end
        if self.LEFT >= 0:
            full = gl.maximum(part.first, part.q_start + (part.token_stop - part.token - 1 - self.LEFT))
        if self.RIGHT >= 0:
            full_end = gl.minimum(part.end, part.q_start + (self.RIGHT + 1))
        return full, full_end

    @gluon.jit
    def begin(self, part, slot):
        """Of the slots from ``slot`` on, how many come before the first one that is seen."""
        begin = 0
        if self.LEFT >= 0:
            begin = part.first - slot
        return begin

    @gluon.jit
    def visible(self, visible, position, end, q_position):
        """Without the keys that a token does not see."""
        visible = visible & (position < end)
        if self.LEFT >= 0:
            visible = visible & (position >= q_position - self.LEFT)
        if self.RIGHT >= 0:
            visible = visible & (position <= q_position + self.RIGHT)
        return visible

    @gluon.jit
    def scale_of_keys(self, part):
        """What the products with keys of 8 bits are multiplied by."""
        scale = 1.0
        if self.K_SCALES > 0:
            scale = gl.load(self.k_scale + (part.kv_head if self.K_SCALES > 1 else 0))
        return scale

    @gluon.jit
    def scale_of_values(self, part):
        scale = 1.0
        if self.V_SCALES > 0:
            scale = gl.load(self.v_scale + (part.kv_head if self.V_SCALES > 1 else 0))
        return scale

    @gluon.jit
    def fetch(self, steps, step, key, value, part):
        """Fetch the blocks of a part, each as soon as there is a place for it; the step behind them.

        A warp reads the entries of a block while it waits for the place of the one before.
        """
        PIECES: gl.constexpr = self.BLOCK // self.PIECE
        piece = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        shift = 0
        if self.FIRST_PAGE:
            shift = gl.load(self.first_page)
        key_head, value_head = part.kv_head, part.kv_head
        if self.INTERLEAVED:
            key_head, value_head = 2 * part.kv_head, 2 * part.kv_head + 1
        table = self.tables + part.sequence.to(gl.int64) * self.table_length
        entries = self._entries(table, part, part.block, piece)
        for j in range(part.block, part.stop):
            next_entries = self._entries(table, part, j + 1, piece)
            slot = part.origin + j * self.BLOCK
            # Where none is seen the copy engine writes zeros.
            pages = gl.where(self._is_seen(part, slot + piece * self.PIECE), entries + shift, self.page_count)
            keys, values, keys_full, values_full = steps.wait_for_place(step)
            mbarrier.expect(keys_full, PIECES * key.block_type.nbytes)
            for i in gl.static_range(PIECES):
                page = gl.sum(gl.where(piece == i, pages, 0), 0)
                row = (slot + i * self.PIECE) % self.PAGE_SIZE
                tile = keys.slice(i * self.PIECE, self.PIECE, dim=1)
                tma.load(key, [page, row, key_head, 0], keys_full, tile)
            mbarrier.expect(values_full, PIECES * value.block_type.nbytes)
            for i in gl.static_range(PIECES):
                page = gl.sum(gl.where(piece == i, pages, 0), 0)
                row = (slot + i * self.PIECE) % self.PAGE_SIZE
                tma.load(
                    value, [page, row, value_head, 0], values_full, values.slice(i * self.PIECE, self.PIECE, dim=1)
                )
            entries = next_entries
            step += 1
        return step

    @gluon.jit
    def _entries(self, table, part, j, piece):
        """The entries of the table for the pieces of a block; those that no token sees are not read."""
        slot = part.origin + j * self.BLOCK + piece * self.PIECE
        is_seen = (piece < self.BLOCK // self.PIECE) & (j < part.stop) & self._is_seen(part, slot)
        return gl.load(table + slot // self.PAGE_SIZE, mask=is_seen, other=0)

    @gluon.jit
    def _is_seen(self, part, slot):
        """Whether the part sees a slot of the pieces that begin at these."""
        return (slot < part.end) & (slot + self.PIECE > part.first)


@gluon.jit
def attend(
    query, key, value, tables, kv_lens, starts, num_seqs, first_page, tiles, k_scale, v_scale, sinks,
    tokens, sequences, table_length, page_count, tile_count,
    out, maxima, totals,
    PARTS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr,
    SCALE: gl.constexpr, CAP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, INTERLEAVED: gl.constexpr,
    FIRST_PAGE: gl.constexpr, NUM_SEQS: gl.constexpr, K_SCALES: gl.constexpr, V_SCALES: gl.constexpr,
    PAGE_SIZE: gl.constexpr, PIECE: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, TOKENS: gl.constexpr,
    ROWS: gl.constexpr, TOGETHER: gl.constexpr, SPLITS: gl.constexpr, ENTRIES: gl.constexpr, PART_SIZE: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The results are those of the portable kernel's ``attend``."""
    owned_end = end_of_sequences(starts, num_seqs, sequences, NUM_SEQS)
    # Triton makes constants of what is 1.
    call = Call(
        tables, kv_lens, starts, first_page, tiles, k_scale, v_scale, gl.to_tensor(tokens), gl.to_tensor(table_length),
        gl.to_tensor(page_count), gl.to_tensor(tile_count), owned_end, PARTS, HEADS, GROUP, LEFT, RIGHT, INTERLEAVED,
        FIRST_PAGE, K_SCALES, V_SCALES, PAGE_SIZE, PIECE, TOKENS, ROWS, TOGETHER, SPLITS, ENTRIES, PART_SIZE, BLOCK,
        WARPS,
    )  # fmt: skip
    steps = allocate_steps(key, value, BLOCK, STAGES, TOGETHER)
    results = Results(out, maxima, totals, sinks, LSE, SINKS, V_DIM)
    fence_async_shared()
    programs.attend(call, steps, key, value, query, results, DIM, SCALE, CAP)
