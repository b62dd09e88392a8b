"""The devices that every kernel for TPUs refuses."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported

from ._generations import KINDS, generation


def check_device(inv: Invocation) -> None:
    """Raise `Unsupported` for a device that is not a TPU of a known generation."""
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
