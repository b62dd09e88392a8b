"""The results of a forward operation, which the measurement of its backward operation takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import jax

import ejkernel_core
from ejkernel_core import Candidate, Invocation, Unsupported
from ejkernel_core.extend import plugin_faults

from ._checks import bytes_needed, fault_text, memory_fault, results_fault

#: The most memory that the reference may take only to check another kernel. That of attention takes memory in
#: proportion to the square of the length.
CHECK_BYTES = 2**30

Results = tuple[jax.Array, ...]


def forward_results(inv: Invocation, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The results of a call on these arrays by name. ``Unsupported`` where no kernel has them.

    They are those of the first kernel that agrees with the reference: kernels in plain JAX come first, because others
    may take more memory, or end the process. Nothing is compared where the reference takes too much memory for that.
    It gives the results itself where no other kernel does.
    """
    assert inv.operation is not None
    runs = [_Run(inv, candidate, arrays) for candidate in _frugal_first(inv)]
    references = [run for run in runs if run.candidate.backend == inv.operation.reference]
    others = [run for run in runs if run not in references]
    expected = references[0].results(CHECK_BYTES) if references and others else None
    for run in (*others, *references):
        results = expected if run in references and expected else run.results()
        if results is not None and run.agrees(results, expected):
            return dict(zip(inv.operation.results, results, strict=True))
    reasons = "; ".join(f"{run.candidate.kernel.name}: {run.reason}" for run in runs) or "no kernel can run it"
    raise Unsupported(f"there are no results of {inv.op} to measure with: {reasons}")


def _frugal_first(inv: Invocation) -> Sequence[Candidate]:
    registry = inv.registry or ejkernel_core.registry
    candidates, _ = registry.candidates(inv)
    return sorted(candidates, key=lambda candidate: candidate.kernel.is_opaque_on(inv.platform))


@attrs.define(eq=False)
class _Run:
    """One kernel on the arrays of a call."""

    inv: Invocation
    candidate: Candidate
    arrays: Mapping[str, jax.Array]
    #: Why it has no results, or wrong ones.
    reason: str = ""

    def results(self, most_bytes: float = math.inf) -> Results | None:
        """Its results; None where it fails, or takes more memory than this or than is free."""
        try:
            compiled = jax.jit(self._run).lower(*self.arrays.values()).compile()
            self.reason = memory_fault(compiled, jax.local_devices(backend=self.inv.platform)[0]) or ""
            if self.reason or bytes_needed(compiled) > most_bytes:
                return None
            results: Results = jax.block_until_ready(compiled(*self.arrays.values()))
            return results
        except plugin_faults() as fault:  # a broken kernel excludes only itself
            self.reason = fault_text("running", fault)
            return None

    def _run(self, *arrays: jax.Array) -> Results:
        inv = self.inv.with_arrays(dict(zip(self.arrays, arrays, strict=True)))
        return self.candidate.kernel.run_backend(inv, self.candidate.cfg)

    def agrees(self, results: Results, expected: Results | None) -> bool:
        """Whether its results are the expected ones, as far as they are known."""
        self.reason = results_fault(results, results if expected is None else expected, self.inv) or ""
        return not self.reason
