"""moe_permute_matmul on a GPU: tokens in place and in parts, against a gather and CUTLASS through PyTorch.

Forward for all calls, and with the gradients for those of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel_ops.moe_permute_matmul.examples import everything, example

from . import suite

TORCH, PARTS = "torch", "by_parts"
MINIMA = (
    # Up to the noise of a measurement, the choice is as fast as the parts.
    suite.Minimum("forward", PARTS, 0.97),
    suite.Minimum("forward+backward", PARTS, 0.97),
    suite.Minimum("forward", TORCH, 1.0),
)


def run(backend: str | None = None, rounds: int = suite.ROUNDS, small: bool = False) -> suite.Report:
    """The products of well-known models with their gates and values; with ``small``, one that a CPU can run."""
    examples = (example("small", everything),) if small else None
    return suite.run(
        "moe_permute_matmul",
        peers(),
        MINIMA,
        examples=examples,
        names={"small"} if small else None,
        backend=backend,
        backends=("triton", PARTS),
        reference="xla",  # the reference multiplies all rows by all matrices
        rounds=rounds,
    )


def peers() -> dict[str, suite.Peer | None]:
    """The peers of a call at any shape."""
    return {TORCH: suite.optional(by_torch, "torch")}


def by_torch(arguments: Mapping[str, Any]) -> suite.TorchFunction | None:
    """By CUTLASS through PyTorch, of rows that are gathered."""
    others = {name for name, value in arguments.items() if value is not None and value is not False}
    if not others <= {"x", "token_order", "rhs", "group_sizes", "k"}:
        return None

    def product(x: Any, token_order: Any, rhs: Any, group_sizes: Any) -> Any:
        import torch

        return torch._grouped_mm(
            x[token_order // arguments["k"]], rhs, offs=torch.cumsum(group_sizes, 0).to(torch.int32)
        )

    return suite.TorchFunction(product)
