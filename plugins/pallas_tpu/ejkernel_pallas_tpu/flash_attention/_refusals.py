"""What the kernels do not do, said before anything is committed."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.flash_attention.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.launch._generations import KINDS, generation

DTYPES = ("bfloat16", "float32")
#: Wider heads would leave no room for blocks.
WIDEST = 512


def check(inv: Invocation) -> None:
    """Raise where this device or these arguments are not for these kernels."""
    if inv.platform != "tpu":
        raise Unsupported(
            f"the Pallas TPU kernels run on TPUs; this is {inv.platform}. To debug them here, see "
            "ejkernel_pallas_tpu.testing.interpreted_registry"
        )
    if inv.device_kind is None:
        raise Unsupported(
            "blocks are chosen for one TPU, and none is here: say which is meant, by "
            "jax.sharding.use_abstract_mesh with an AbstractDevice('TPU v5e', 1, 'tpu')"
        )
    if generation(inv.device_kind) is None:
        raise Unsupported(f"the Pallas TPU kernels know {', '.join(KINDS)}; not {inv.device_kind}")
    check_arguments(inv)


def check_arguments(inv: Invocation) -> None:
    """Raise where these arguments are not for these kernels, interpreted or not."""
    refuse_symbolic(inv)
    query, value = inv["query"], inv["value"]
    if str(query.dtype) not in DTYPES:
        raise Unsupported(
            f"the Pallas TPU kernels take {' and '.join(DTYPES)}; not {query.dtype}, which a TPU does not multiply"
        )
    widest = max(query.shape[3], value.shape[3])
    if widest > WIDEST:
        raise Unsupported(f"the Pallas TPU kernels take head dims up to {WIDEST}, not {widest}")
