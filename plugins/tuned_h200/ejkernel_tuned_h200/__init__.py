"""What was measured on an NVIDIA H200: a call that was measured there, or one like it, needs no tuning."""

from ejkernel_cache import PackagedRecords

__all__ = ["records"]

records = PackagedRecords("ejkernel_tuned_h200")
