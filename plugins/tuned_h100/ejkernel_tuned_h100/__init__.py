"""Records that were measured on an NVIDIA H100. The calls that they are of, and similar ones, need no tuning there."""

from ejkernel_cache import PackagedRecords

__all__ = ["records"]

records = PackagedRecords("ejkernel_tuned_h100")
