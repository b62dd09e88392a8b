"""The tuner as an object."""

from __future__ import annotations

from ejkernel_tuning import policy

from ._other_names import other_names


class Autotuner:
    """The policy that measures. A registry with the installed plugins has it already; to another one, it is added by
    ``registry.register(Autotuner(), "tuner")``. The ``AutotunePolicy`` says when it measures, and for how long.
    """

    RANK = policy.RANK
    measure = staticmethod(policy.measure)

    @other_names(
        warmup="autotune(kernel, ..., num_warmup=1) takes that number",
        iters="autotune(kernel, ..., num_iters=10) takes that number",
    )
    def __init__(self) -> None:
        pass
