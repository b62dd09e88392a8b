"""The copy engine, by one name for what the versions of Triton call differently: 3.6 and 3.9 have no name in common."""

# mypy: ignore-errors

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _add(desc, coordinates, tile, _semantic=None):
    """In Triton 3.6 Gluon has no name for it, though its compiler can do it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, tile.handle)


#: (descriptor, coordinates, barrier, tile): from global memory; the barrier counts the bytes.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: (descriptor, coordinates, tile): added to what is in global memory.
add = getattr(tma, "async_atomic_add", None) or _add
#: (count): until no more than so many of these have still to read their tiles.
store_wait = tma.store_wait
Descriptor = tma.tensor_descriptor
