"""Barriers, for groups of warps that wait for each other or for the copy engine, and views of shared memory."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _unwrap_if_constexpr as unwrapped


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """``COUNT`` barriers, each of which ends a phase after ``ARRIVALS`` arrivals."""
    array = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(array.index(i), count=ARRIVALS)
    return array


@builtin
def wait_for_group(_semantic=None):
    """All threads of a group of warps wait for each other. The versions of Triton have different names for this."""
    return _semantic.debug_barrier()


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory as another type. Triton 3.9 has a new name for this."""
    shape = [unwrapped(size) for size in unwrapped(shape)]
    return _semantic.memdesc_reinterpret(memory, unwrapped(dtype), shape, unwrapped(layout))


@builtin
def words(memory, _semantic=None):
    """Rows of numbers of 8 bits, as rows of words of 16 bits with two numbers each. The copy engine permutes bytes, so
    each word is in the same place.
    """
    old = memory.layout
    shape = [*memory.shape[:-1], memory.shape[-1] // 2]
    return _semantic.memdesc_reinterpret(memory, gl.int16, shape, type(old)(old.swizzle_byte_width, 16, old.rank))
