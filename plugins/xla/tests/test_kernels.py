from __future__ import annotations

from ejkernel_testing import kernel_proofs

globals().update(kernel_proofs("ejkernel-xla", quick=0.25))
