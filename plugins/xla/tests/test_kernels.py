from __future__ import annotations

from ejkernel_testing import kernel_proofs

#: Sinks, whose weights are 1 where there are no keys.
WITHOUT_KEYS = {"no-keys-and-all-there-is-beside-them", "packed-without-keys"}

CLASSES = kernel_proofs("ejkernel-xla", quick=0.04, always=WITHOUT_KEYS)
for proofs in CLASSES.values():
    if "_norm" in proofs.kernel:
        proofs.quick = 0.01  # one case of each test: they are the references' own definition
globals().update(CLASSES)
