from __future__ import annotations

from ejkernel_testing import kernel_proofs

#: On one device all kernels do the same; the tests beside this one prove them on several.
globals().update(kernel_proofs("ejkernel-context"))
