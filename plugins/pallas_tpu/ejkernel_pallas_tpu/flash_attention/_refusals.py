"""The calls that the kernels refuse."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.launch._devices import check_device

DTYPES = ("bfloat16", "float32")
#: Wider heads would leave no room for blocks.
WIDEST = 512


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernels do not support."""
    check_device(inv)
    check_arguments(inv)


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernels do not support, interpreted or not."""
    refuse_symbolic(inv)
    query, value = inv["query"], inv["value"]
    if str(query.dtype) not in DTYPES:
        raise Unsupported(
            f"the Pallas TPU kernels take {' and '.join(DTYPES)}; not {query.dtype}, which a TPU does not multiply"
        )
    widest = max(query.shape[3], value.shape[3])
    if widest > WIDEST:
        raise Unsupported(f"the Pallas TPU kernels take head dims up to {WIDEST}, not {widest}")
