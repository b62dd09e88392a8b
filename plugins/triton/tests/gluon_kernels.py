"""Small Gluon kernels for Hopper: a right one, and one for each mistake that the interpreter finds."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ejkernel_triton.gluon import tma
from ejkernel_triton.gluon.shared_memory import barriers, reinterpret, words

SIZE = gl.constexpr(64)
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def multiply(x, y, out, STEPS: gl.constexpr, MISTAKE: gl.constexpr):
    """The product of (64, 64 * STEPS) and (64 * STEPS, 64): one warp fetches, and a group of warps multiplies."""
    first = gl.allocate_shared_memory(x.dtype, [2] + x.block_shape, x.layout)
    second = gl.allocate_shared_memory(y.dtype, [2] + y.block_shape, y.layout)
    full, empty = barriers(2, 1), barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_sum, (first, second, full, empty, out, STEPS, MISTAKE)),
            (_fetch, (x, y, first, second, full, empty, STEPS)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _fetch(x, y, first, second, full, empty, STEPS: gl.constexpr):
    for step in range(STEPS):
        slot = step % 2
        mbarrier.wait(empty.index(slot), ((step // 2) & 1) ^ 1)
        mbarrier.expect(full.index(slot), x.block_type.nbytes + y.block_type.nbytes)
        tma.load(x, [0, step * SIZE], full.index(slot), first.index(slot))
        tma.load(y, [step * SIZE, 0], full.index(slot), second.index(slot))


@gluon.jit
def _sum(first, second, full, empty, out, STEPS: gl.constexpr, MISTAKE: gl.constexpr):
    total = gl.zeros([SIZE, SIZE], gl.float32, SUMS)
    for step in range(STEPS):
        slot = step % 2
        if MISTAKE != "reads before the copy":
            mbarrier.wait(full.index(slot), (step // 2) & 1)
        if MISTAKE == "stores without a fence":
            first.index(slot).store(first.index(slot).load(ROWS))
        total = warpgroup_mma(first.index(slot), second.index(slot), total, is_async=True)
        if MISTAKE == "releases before the wait":
            mbarrier.arrive(empty.index(slot))
        total = warpgroup_mma_wait(0, [total])
        if MISTAKE != "releases before the wait" and MISTAKE != "never releases":
            mbarrier.arrive(empty.index(slot))
        if MISTAKE == "releases twice":
            mbarrier.arrive(empty.index(slot))
    row = gl.arange(0, SIZE, gl.SliceLayout(1, SUMS))
    column = gl.arange(0, SIZE, gl.SliceLayout(0, SUMS))
    gl.store(out + row[:, None] * SIZE + column[None, :], total)


@gluon.jit
def use_before_wait(x, out):
    tile = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], gl.NVMMASharedLayout(128, 16, 2))
    tile.store(gl.zeros([SIZE, SIZE], gl.bfloat16, ROWS))
    fence_async_shared()
    total = warpgroup_mma(tile, tile, gl.zeros([SIZE, SIZE], gl.float32, SUMS), is_async=True)
    gl.store(out + gl.arange(0, SIZE, gl.SliceLayout(1, SUMS)), gl.sum(total + 1.0, 1))


@gluon.jit
def wait_before_init(x, out):
    mbarrier.wait(gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()), 0)


@gluon.jit
def take_part_of_nothing(x, out):
    gl.allocate_shared_memory(gl.float32, [2, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(2)


@gluon.jit
def view_as_another_type(x, out):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tile = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], layout)
    reinterpret(tile, gl.float16, [SIZE, SIZE], layout)


@gluon.jit
def add(x, sums, COUNT: gl.constexpr):
    """Add ``x`` to an array, so many times, by the copy engine."""
    tile = gl.allocate_shared_memory(gl.float32, sums.block_shape, sums.layout)
    row = gl.arange(0, SIZE, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, SIZE, gl.SliceLayout(0, ROWS))
    values = gl.load(x + row[:, None] * SIZE + column[None, :])
    for i in gl.static_range(COUNT):
        tile.store(values * (i + 1))
        fence_async_shared()
        tma.add(sums, [0, 0], tile)
        tma.store_wait(0)


@gluon.jit
def tanh(x, out):
    index = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    code: gl.constexpr = "tanh.approx.f32 $0, $1;"
    gl.store(out + index, gl.inline_asm_elementwise(code, "=f,f", [gl.load(x + index)], gl.float32, True, 1))


@gluon.jit
def sine(x, out):
    index = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    code: gl.constexpr = "sin.approx.f32 $0, $1;"
    gl.store(out + index, gl.inline_asm_elementwise(code, "=f,f", [gl.load(x + index)], gl.float32, True, 1))


@gluon.jit
def numbers_of_words(x, out, CODE: gl.constexpr):
    """The first numbers of words of two numbers of 8 bits, and behind them the second ones."""
    tile = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    full = barriers(1, 1)
    mbarrier.expect(full.index(0), x.block_type.nbytes)
    tma.load(x, [0, 0], full.index(0), tile)
    mbarrier.wait(full.index(0), 0)
    pairs = words(tile).load(ROWS)
    first, second = gl.inline_asm_elementwise(CODE, "=r,=r,r", [pairs], (gl.float16, gl.float16), True, 2)
    row = gl.arange(0, SIZE, gl.SliceLayout(1, ROWS))[:, None]
    column = gl.arange(0, SIZE // 2, gl.SliceLayout(0, ROWS))[None, :]
    gl.store(out + row * SIZE + column, first.to(gl.float32))
    gl.store(out + row * SIZE + column + SIZE // 2, second.to(gl.float32))
