"""The calls that the kernel refuses."""

from __future__ import annotations

from typing import Any

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.pages import EIGHT_BITS, pages_of
from ejkernel_ops.ragged_paged_attention.tiles import tile_bound
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.launch._devices import check_device
from ejkernel_pallas_tpu.launch._generations import SMEM

from ._plan import FIELDS

DTYPES = ("bfloat16", "float32", "float8_e4m3fn")
#: Wider heads would leave no room for blocks.
WIDEST = 512
#: Bytes of scalar memory for tables and tiles; the rest is the compiler's.
SCALARS = SMEM - 2**16


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernel does not support."""
    check_device(inv)
    check_arguments(inv)


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernel does not support, interpreted or not."""
    refuse_symbolic(inv)
    query, pages = inv["query"], pages_of(inv)
    if str(query.dtype) not in DTYPES:
        raise Unsupported(f"the Pallas TPU kernel takes queries of {', '.join(DTYPES)}; these are {query.dtype}")
    if query.shape[0] == 0:
        raise Unsupported("the Pallas TPU kernel takes no call without tokens")
    widest = max(query.shape[2], *(array.shape[3] for array in pages))
    if widest > WIDEST:
        raise Unsupported(f"the Pallas TPU kernel takes head dims up to {WIDEST}, not {widest}")
    for array in pages:
        _check_rows(array)
    _check_scalars(inv)


def _check_rows(pages: Any) -> None:
    """XLA has pages in another order in main memory if the rows of a slot do not fill tiles. It would copy all of them
    before each call.
    """
    _, page_size, count, _ = pages.shape
    sublanes = 32 // pages.dtype.itemsize
    if count == 1:
        if page_size % sublanes:
            raise Unsupported(
                f"pages of one head and {pages.dtype} have a multiple of {sublanes} slots: XLA would copy those of "
                f"{page_size} into another layout"
            )
        return
    fewest = 4 if pages.dtype in EIGHT_BITS else 2
    if count % 8 and (count not in (2, 4) or count < fewest):
        raise Unsupported(
            f"a slot of {pages.dtype} pages has 1, {'' if fewest == 4 else '2, '}4 or a multiple of 8 rows of a head, "
            f"keys and values counted together where they are in one array; not {count}: XLA would copy all pages into "
            "another layout"
        )


def _check_scalars(inv: Invocation) -> None:
    sequences, width = inv["block_tables"].shape
    tiles = tile_bound(inv["query"].shape[0], sequences, 1)
    size = 4 * (sequences * width + len(FIELDS) * (tiles + 1))
    if size > SCALARS:
        raise Unsupported(
            f"a table of {sequences} x {width} pages and the tiles of {inv['query'].shape[0]} tokens take "
            f"{size / 1024:.0f} KiB of scalar memory, of which there are {SCALARS // 1024}"
        )
