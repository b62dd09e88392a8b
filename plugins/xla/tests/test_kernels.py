from __future__ import annotations

from ejkernel_testing import kernel_proofs

#: What kernels in XLA were once wrong on.
ALWAYS = {
    "no-keys-and-all-there-is-beside-them",  # its sinks have weights of 1
    "packed-without-keys",
    "sinks-once-over-many-blocks",
    "disabled-in-groups",
}

globals().update(kernel_proofs("ejkernel-xla", always=ALWAYS))
