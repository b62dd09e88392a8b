from __future__ import annotations

from ejkernel_testing import kernel_proofs

#: Sinks, whose weights are 1 where there are no keys.
WITHOUT_KEYS = {"no-keys-and-all-there-is-beside-them", "packed-without-keys"}

globals().update(kernel_proofs("ejkernel-xla", always=WITHOUT_KEYS))
